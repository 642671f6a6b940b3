"""Files and batches by OpenAI's own client, over a server that is killed on the way."""

import json
import os
import signal
import time

import openai
import pytest

from tests.e2e.servers import Server
from tests.e2e.test_fleet import Route
from tokenyard.cli import submit_batch
from tokenyard.cli.main import main

FLAGS = ("--executor", "mock", "--mock-step-ms", "2", "--admin-api-key", "admin")


def start(folder, *more):
    """A server with the keys of two tenants, which keeps files in `folder`."""
    config = folder / "server.yaml"
    config.write_text("tenant-keys:\n  acme: a-key\n  other: b-key\n", encoding="utf-8")
    return Server(*FLAGS, "--config", str(config), "--file-storage-path", str(folder / "kept"), *more)


def client_of(server, key="a-key"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def lines(count, tokens=4, first=0):
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "default",
                "prompt": [5, 6, 7, number + 8],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
            },
        }
        for number in range(first, first + count)
    ]


def upload(client, requests, **more):
    data = requests if isinstance(requests, bytes) else b"".join(json.dumps(one).encode() + b"\n" for one in requests)
    return client.files.create(file=("lines.jsonl", data), purpose="batch", **more)


def begin(client, requests, **more):
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return client.batches.create(input_file_id=upload(client, requests).id, **fields)


def ended(client, batch, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch has not ended: {batch}")


def output(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = start(tmp_path_factory.mktemp("files"))
    yield running
    assert running.close() == 0


def test_a_batch_from_upload_to_answers(server):
    client = client_of(server)
    wrong = lines(1, first=50)[0]
    wrong["body"]["temperature"] = -3
    batch = begin(client, [*lines(20), wrong], metadata={"run": "nightly"})
    assert batch.status == "validating"
    batch = ended(client, batch)
    assert (batch.status, batch.metadata) == ("completed", {"run": "nightly"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    answers = output(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(20)]
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in answers)
    direct = client.completions.create(
        model="default", prompt=[5, 6, 7, 8], max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answers[0]["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
    errors = output(client, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in errors] == [("line-50", 400)]
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [one.id for one in client.batches.list()]


@pytest.mark.parametrize(
    ("line", "param", "code"),
    [
        (b"no json", None, "invalid_json_line"),
        (b"[1]", None, "invalid_json_line"),
        ({"custom_id": None}, "custom_id", "invalid_request"),
        ({"custom_id": "line-0"}, "custom_id", "duplicate_custom_id"),
        ({"method": "GET"}, "method", "invalid_method"),
        ({"url": "/pause_generation"}, "url", "mismatched_url"),
        ({"body": 3}, "body", "invalid_request"),
        ({"body": {"prompt": "x", "stream": True}}, "body.stream", "invalid_request"),
    ],
)
def test_a_line_that_is_no_request_fails_the_batch_and_nothing_else(server, line, param, code):
    client = client_of(server)
    good = lines(2)
    data = line if isinstance(line, bytes) else json.dumps(lines(1, first=7)[0] | line).encode()
    whole = b"".join(json.dumps(one).encode() + b"\n" for one in good) + data
    other = begin(client, lines(3))
    batch = ended(client, begin(client, whole))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    error = batch.errors.data[0]
    assert (error.line, error.param, error.code) == (3, param, code)
    assert ended(client, other).status == "completed"


def test_the_command_waits_and_writes_answers_and_errors(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(submit_batch, "POLL_S", 0.05)
    wrong = lines(1, first=50)[0]
    wrong["body"]["temperature"] = -3
    source, output = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in [*lines(5), wrong]), encoding="utf-8")
    to_server = ("--output", str(output), "--url", server.url)
    assert main(["batch", str(source), *to_server, "--key", "a-key"]) == 1
    said = capsys.readouterr().err
    assert "is completed: 5 of 6 lines answered, the others are in " in said
    files = (output, tmp_path / "answers.jsonl.errors")
    written = [[json.loads(line) for line in path.read_bytes().splitlines()] for path in files]
    assert [[one["custom_id"] for one in some] for some in written] == [[f"line-{i}" for i in range(5)], ["line-50"]]
    # Another tenant may not wait for it; its own may, for a second copy of the answers.
    name = said.split()[1]
    monkeypatch.setenv("TOKENYARD_API_KEY", "b-key")
    assert main(["batch", "--id", name, *to_server]) == 2
    assert "there is no batch" in capsys.readouterr().err
    before = output.read_bytes()
    output.unlink()
    monkeypatch.setenv("TOKENYARD_API_KEY", "a-key")
    main(["batch", "--id", name, *to_server])
    assert output.read_bytes() == before


def test_the_command_refuses_a_file_that_has_no_requests(server, tmp_path, capsys):
    source = tmp_path / "lines.jsonl"
    flags = (str(source), "--output", str(tmp_path / "answers.jsonl"), "--url", server.url, "--key", "a-key")
    assert main(["batch", *flags]) == 2
    assert "lines.jsonl cannot be read: No such file" in capsys.readouterr().err
    source.write_text("no json", encoding="utf-8")
    assert main(["batch", *flags]) == 2
    assert "line 1 is no request" in capsys.readouterr().err
    source.write_text(json.dumps(lines(1)[0]) + '\n{"custom_id": 3}\n', encoding="utf-8")
    assert main(["batch", *flags]) == 1
    assert "line 2: custom_id must be a string" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/audio"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id"),
    ],
)
def test_wrong_fields_of_a_batch_are_named(server, fields, param):
    client = client_of(server)
    known = {"input_file_id": upload(client, lines(1)).id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**known | fields)
    assert refused.value.param == param


def test_a_file_belongs_to_its_tenant(server):
    own, other = client_of(server), client_of(server, "b-key")
    file = upload(own, lines(1), expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at - file.created_at == 3600
    assert own.files.retrieve(file.id).filename == "lines.jsonl"
    assert file.id in [one.id for one in own.files.list(purpose="batch")]
    assert file.id not in [one.id for one in other.files.list()]
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.BadRequestError) as refused:
        other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert refused.value.param == "input_file_id"
    batch = ended(own, begin(own, lines(1)))
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(batch.id)
    assert own.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        own.files.retrieve(file.id)


def test_a_cancelled_batch_keeps_what_was_answered(server):
    client = client_of(server)
    batch = begin(client, lines(400, tokens=60))
    while client.batches.retrieve(batch.id).request_counts.completed == 0:
        time.sleep(0.02)
    client.batches.cancel(batch.id)
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    answered, rest = output(client, batch.output_file_id), output(client, batch.error_file_id)
    assert len(answered) == batch.request_counts.completed > 0
    assert len({one["custom_id"] for one in answered + rest}) == 400
    assert rest[0]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


def test_a_server_without_a_folder_says_so():
    running = Server("--executor", "mock")
    try:
        with pytest.raises(openai.NotFoundError, match="--file-storage-path"):
            upload(client_of(running), lines(1))
    finally:
        assert running.close() == 0


def test_a_killed_server_goes_on_and_answers_each_line_once(tmp_path):
    running = start(tmp_path, "--max-file-storage-mb", "0.05")
    client = client_of(running)
    batch = begin(client, lines(150, tokens=40))
    with pytest.raises(openai.RateLimitError, match="delete some"):
        upload(client, b"x" * 49_000)
    while client.batches.retrieve(batch.id).request_counts.completed < 20:
        time.sleep(0.02)
    os.kill(running.process.pid, signal.SIGKILL)
    running.wait()
    kept = next((tmp_path / "kept" / "batches").glob("*.answers"))
    before = kept.read_bytes()
    kept.write_bytes(before + b'[149,true,{"cut')
    running = start(tmp_path, "--max-file-storage-mb", "0.05")
    try:
        client = client_of(running)
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 150)
        answers = output(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(150)]
        ids = {answer["id"] for answer in answers}
        assert {json.loads(line)[2]["id"] for line in before.splitlines()} <= ids
    finally:
        assert running.close() == 0


@pytest.mark.slow
def test_a_killed_router_and_engine_answer_each_line_once(tmp_path):
    engines = [Server("--executor", "mock", "--mock-step-ms", "2") for _ in range(2)]
    flags = ("--file-storage-path", str(tmp_path / "kept"))
    router = Route(*(engine.url for engine in engines), flags=flags)
    try:
        client = client_of(router)
        batch = begin(client, lines(200, tokens=40))
        for count, victim in ((20, engines[1]), (60, router)):
            while client.batches.retrieve(batch.id).request_counts.completed < count:
                time.sleep(0.02)
            os.kill(victim.process.pid, signal.SIGKILL)
            victim.process.wait()
        router = Route(engines[0].url, flags=flags)
        client = client_of(router)
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 200)
        answers = output(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(200)]
    finally:
        router.close()
        assert engines[0].close() == 0
