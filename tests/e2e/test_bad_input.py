"""Mistakes of new users, against real servers: each is named in the error, and no other client notices."""

import json
import shutil
import socket
import threading
import time
from contextlib import ExitStack, closing

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
HELLO = [{"role": "user", "content": "Hello there"}]
LONG_TEXT = "a b " * 2_000_000
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def bystander(mock_server):
    """A long stream that runs during all mistakes of this module and must complete."""
    body = {"prompt": "Hello there", "max_tokens": 900, "stream": True, "ignore_eos": True}
    answers = []

    def read():
        answers.append(httpx2.post(mock_server.url + TEXT, json=body, timeout=120).text)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield
    thread.join(120)
    assert answers
    assert "data: [DONE]" in answers[0]


def refused(server, path, body, status=400):
    """The error of an answer, which must have all its fields."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx2.post(server.url + path, content=content, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, {"prompt": ""}, "empty"),
        (NATIVE, {"text": ""}, "empty"),
        ("/detokenize", {"tokens": [5, 10**6]}, "no token"),
        (TEXT, {"prompt": []}, "empty"),
        (TEXT, {"prompt": [[]]}, "empty"),
        (NATIVE, {"input_ids": []}, "empty"),
        (CHAT, {"messages": []}, "empty"),
        (TEXT, {"prompt": "word " * 5000}, "tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "tokens"),
        (NATIVE, {"input_ids": [5] * 5000}, "tokens"),
        (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -5}, "max_completion_tokens"),
        (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 10**6}, "tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        (TEXT, {"prompt": "x", "temperature": float("nan")}, "JSON"),
        (TEXT, b'{"prompt": "x", "temperature": 1e999}', "JSON"),
        (TEXT, {"prompt": "x", "temperature": -0.1}, "temperature"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "x", "n": 0}, "n "),
        (TEXT, {"prompt": "x", "n": 10**9}, "n "),
        (TEXT, b'{"prompt": "x"', "JSON"),
        (TEXT, b'{"prompt": "\xff\xfe"}', "JSON"),
        (TEXT, b'{"prompt": "\\ud800"}', "JSON"),
        (TEXT, b"[" * 100_000, "JSON"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "vocabulary"),
        (TEXT, {"prompt": [2**40]}, "prompt"),
        (TEXT, {"prompt": [1.5]}, "prompt"),
        (NATIVE, {"input_ids": [2**31]}, "input_ids"),
        (TEXT, {"prompt": "x", "stop": 5}, "stop"),
        (TEXT, {"prompt": "x", "stop": {"a": "b"}}, "stop"),
        (TEXT, {"prompt": "x", "stop": [1]}, "stop"),
        (TEXT, {"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**9 * 10]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_mistakes_in_a_body(mock_server, path, body, words):
    assert words in refused(mock_server, path, body)["message"]


FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("stream", "stream_options", "ignore_eos", "min_tokens", "max_tokens", "stop_token_ids", "logprobs"),
)


@pytest.mark.part(4)
@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_wrong_types_name_their_field(mock_server, path, field):
    content = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    for value in ("x", [{}], {"x": []}):
        assert refused(mock_server, path, {**content, field: value})["param"] == field


@pytest.mark.usefixtures("bystander")
def test_an_unknown_model(mock_server):
    assert refused(mock_server, TEXT, {"prompt": "x", "model": "other"}, 404)["code"] == "model_not_found"


@pytest.mark.part(4)
@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/tokenize"])
def test_a_body_of_50_megabytes(mock_server, path):
    assert refused(mock_server, path, b'{"prompt": "' + b"x" * 50_000_000 + b'"}', 413)["code"] == "body_too_large"


@pytest.mark.part(9)
@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": LONG_TEXT}),
        (TEXT, {"prompt": [LONG_TEXT, "x"]}),
        (TEXT, {"prompt": [5] * 9_000_000}),
        (TEXT, {"prompt": LONG_TEXT, "echo": True, "logprobs": 1}),
        (NATIVE, {"text": LONG_TEXT}),
        (NATIVE, {"input_ids": [[5] * 9_000_000]}),
        (CHAT, {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 20_000}),
        ("/tokenize", {"prompt": LONG_TEXT}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/detokenize", {"tokens": [5] * 9_000_000}),
    ],
)
def test_a_prompt_of_many_megabytes_is_refused_at_once(mock_server, path, body):
    assert refused(mock_server, path, body)["code"] == "context_length_exceeded"


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias", "tools"])
def test_fields_with_too_many_entries_are_named(mock_server, field):
    value = {str(token): 1 for token in range(30_000)} if field == "logit_bias" else ["x"] * 30_000
    error = refused(mock_server, CHAT, {"messages": HELLO, field: value})
    assert (error["param"], "at most" in error["message"]) == (field, True)
    assert refused(mock_server, NATIVE, {"text": "x", "sampling_params": {"stop": ["x"] * 1000}})["param"] == "stop"


@pytest.mark.usefixtures("bystander")
def test_values_nested_too_deeply_are_refused(mock_server):
    for depth in (900, 100_000):
        body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": %b}}'
        nested = b"[" * depth + b"]" * depth
        answer = httpx2.post(mock_server.url + CHAT, content=body % nested, timeout=60)
        assert answer.status_code == (200 if depth == 900 else 400)
    arguments = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
    answer = httpx2.post(mock_server.url + CHAT, json={"messages": [*HELLO, arguments], "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, "arguments that are no JSON stay text"


@pytest.mark.slow
def test_silent_connections_leave_probes_an_answer():
    """More connections than the process may open files; other requests get a clear refusal, and work afterwards."""
    with closing(Server("--executor", "mock", prefix=("sh", "-c", 'ulimit -n 128; exec "$0" "$@"'))) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with ExitStack() as silent:
            for _ in range(160):
                silent.enter_context(socket.create_connection((host, int(port)), timeout=20))
            assert httpx2.get(server.url + "/health", timeout=20).status_code == 200
            error = httpx2.get(server.url + "/v1/models", timeout=20)
            assert (error.status_code, error.json()["error"]["code"]) == (503, "too_many_connections")
            assert httpx2.get(server.url + "/metrics", timeout=20).status_code == 200
        deadline = time.monotonic() + 20
        while httpx2.get(server.url + "/v1/models", timeout=20).status_code != 200:
            assert time.monotonic() < deadline


@pytest.mark.usefixtures("bystander")
def test_a_client_that_sends_all_of_a_large_body_first_reads_the_refusal(mock_server):
    host, port = mock_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        connection.sendall(b"x" * 50_000_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_a_template_that_raises_or_loops_fails_no_other_request(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% set text = messages[0].content %}{% if text == 'raise' %}{{ raise_exception('not like this') }}"
        "{% elif text == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% else %}{{ text }}{% endif %}"
    )
    server = Server("--executor", "mock", "--mock-step-ms", "1", "--chat-template", str(template))
    try:
        loops = [{"role": "user", "content": "loop"}]
        found = []
        looping = threading.Thread(target=lambda: found.append(refused(server, CHAT, {"messages": loops})))
        looping.start()
        raising = [{"role": "user", "content": "raise"}]
        assert "not like this" in refused(server, CHAT, {"messages": raising})["message"]
        assert httpx2.get(server.url + "/health").status_code == 200
        good = httpx2.post(server.url + TEXT, json={"prompt": "x", "max_tokens": 3}, timeout=60)
        assert good.status_code == 200
        looping.join(60)
        assert "template" in found[0]["message"]
        fine = httpx2.post(server.url + CHAT, json={"messages": HELLO, "max_tokens": 3}, timeout=60)
        assert fine.status_code == 200
    finally:
        assert server.close() == 0


def cut_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def nest_config(folder):
    (folder / "config.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(nest_config, "config.json cannot be read as JSON", marks=pytest.mark.slow),
        pytest.param(cut_weights, "model.safetensors is damaged", marks=pytest.mark.slow),
        pytest.param(break_tokenizer, "tokenizer.json is not a tokenizer", marks=pytest.mark.slow),
        pytest.param(drop_tokenizer, "there is no tokenizer", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_ends_the_server_with_a_reason(tmp_path, damage, says):
    pytest.importorskip("torch")
    if not (DEMO_MODEL / "model.safetensors").is_file():
        pytest.skip("the demo model has no weights")
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    damage(folder)
    server = Server("--device", "cpu", "--model", str(folder), ready=False)
    assert server.wait(60) == 2
    *progress, reason = server.log.splitlines()
    assert all(" loading " in line or " memory" in line for line in progress)
    assert reason.startswith("tokenyard: ")
    assert says in reason
