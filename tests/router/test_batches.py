"""Files and batches that the router keeps: uploads, lines over several workers, and what they cost others."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.router.fakes import FakeWorker, answer, parse_answer, routing
from tests.router.test_tenant_keys import bearer, entry, write
from tokenyard.base import ConfigError
from tokenyard.batch import batch_runner
from tokenyard.router.batches import READ_BYTES, FileSender
from tokenyard.router.router_settings import RouterSettings

USAGE = {"usage": {"prompt_tokens": 12, "completion_tokens": 30}}


def run(coroutine):
    asyncio.run(coroutine)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "POLL_S", 0.005)
    monkeypatch.setattr(batch_runner, "NO_ROOM_S", 0.01)
    monkeypatch.setattr(batch_runner, "FIRST_RETRY_S", 0.01)


def line(number, **body):
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": f"text {number}", **body},
    }


def form(lines, purpose="batch"):
    data = b"\n".join(json.dumps(one).encode() for one in lines)
    return (
        b'--q\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode() + b"\r\n"
        b'--q\r\nContent-Disposition: form-data; name="file"; filename="l.jsonl"\r\n\r\n' + data + b"\r\n--q--\r\n"
    )


FORM = "Content-Type: multipart/form-data; boundary=q"


async def upload(client, lines, headers=()):
    return await client.ask("POST", "/v1/files", form(lines), [FORM, *headers])


async def begin(client, lines, headers=(), window="24h"):
    file = (await upload(client, lines, headers)).json
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": window}
    got = await client.ask("POST", "/v1/batches", fields, headers)
    assert got.status == 200, got.body
    return got.json


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(client, batch, headers=()):
    async with asyncio.timeout(20):
        while True:
            batch = (await client.ask("GET", f"/v1/batches/{batch['id']}", headers=headers)).json
            if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.01)


async def output(client, name, headers=()):
    got = await client.ask("GET", f"/v1/files/{name}/content", headers=headers)
    return [json.loads(text) for text in got.body.splitlines()]


class Slow:
    """Answers lines of a batch when told, and other requests at once."""

    def __init__(self):
        self.go = asyncio.Event()
        self.lines, self.others = [], []

    async def __call__(self, asked, writer):
        is_line = "x-tokenyard-batch-line" in asked.headers
        (self.lines if is_line else self.others).append(asked)
        if is_line:
            await self.go.wait()
        writer.write(answer({"text": asked.json["prompt"], **USAGE}))


def keeping(*workers, folder, **settings):
    return routing(*workers, file_storage_path=str(folder), **settings)


def test_lines_are_answered_by_all_workers_with_half_of_their_rows(tmp_path):
    async def main():
        slow = Slow()
        info = {"max_running_requests": 8}
        async with (
            FakeWorker(on_request=slow, info=info) as a,
            FakeWorker(on_request=slow, info=info) as b,
            keeping(a, b, folder=tmp_path) as (router, client),
        ):
            router.batches.start()
            batch = await begin(client, [line(number) for number in range(20)])
            await until(lambda: len(slow.lines) == 8)
            await asyncio.sleep(0.05)
            assert len(slow.lines) == 8
            assert {sum(one in slow.lines for one in worker.asked) for worker in (a, b)} == {4}
            assert (await client.complete("a person")).status == 200
            slow.go.set()
            batch = await ended(client, batch)
            assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
            answers = await output(client, batch["output_file_id"])
            assert [one["response"]["body"]["text"] for one in answers] == [f"text {number}" for number in range(20)]
            assert {one.headers["x-priority"] for one in slow.lines} == {"batch"}
            assert "x-tokenyard-batch-line" not in slow.others[0].headers
            await router.batches.close()

    run(main())


def test_a_line_starts_only_while_no_request_waits_at_the_router(tmp_path):
    async def main():
        slow, rest = Slow(), asyncio.Event()

        async def busy(asked, writer):
            if "x-tokenyard-batch-line" not in asked.headers:
                await rest.wait()
            return await slow(asked, writer)

        async with (
            FakeWorker(on_request=busy) as worker,
            keeping(worker, folder=tmp_path, max_worker_requests=2) as (router, client),
        ):
            router.batches.start()
            slow.go.set()
            people = [asyncio.ensure_future(client.complete(f"person {number}")) for number in range(4)]
            await until(lambda: len(router.queue) == 2)
            batch = await begin(client, [line(1)])
            await asyncio.sleep(0.1)
            assert slow.lines == []
            rest.set()
            assert (await ended(client, batch))["status"] == "completed"
            assert [one.status for one in await asyncio.gather(*people)] == [200] * 4
            await router.batches.close()

    run(main())


def test_a_line_goes_to_another_worker_when_its_own_dies(tmp_path):
    async def main():
        slow = Slow()
        async with (
            FakeWorker(on_request=slow) as a,
            FakeWorker() as b,
            keeping(a, b, folder=tmp_path, policy="round_robin") as (router, client),
        ):
            router.batches.start()
            batch = await begin(client, [line(number) for number in range(6)])
            await until(lambda: slow.lines)
            await a.stop()
            batch = await ended(client, batch)
            assert batch["request_counts"]["completed"] == 6
            assert len(await output(client, batch["output_file_id"])) == 6
            await router.batches.close()

    run(main())


def test_a_batch_of_a_model_that_is_down_blocks_no_other(tmp_path):
    async def main():
        async with (
            FakeWorker(models=("a",)) as a,
            FakeWorker(models=("b",)) as b,
            keeping(a, b, folder=tmp_path) as (router, client),
        ):
            router.batches.start()
            await a.stop()
            await until(lambda: any(worker.healthy is False for worker in router.workers))
            down = await begin(client, [line(number, model="a") for number in range(40)])
            up = await begin(client, [line(number, model="b") for number in range(40)])
            none = await begin(client, [line(1, model="c")])
            assert (await ended(client, up))["request_counts"]["completed"] == 40
            error = (await output(client, (await ended(client, none))["error_file_id"]))[0]["response"]
            assert (error["status_code"], error["body"]["error"]["param"]) == (404, "model")
            assert (await client.ask("POST", f"/v1/batches/{down['id']}/cancel")).json["status"] == "cancelling"
            assert (await ended(client, down))["status"] == "cancelled"
            await router.batches.close()

    run(main())


def test_files_batches_and_usage_are_the_tenants(tmp_path):
    keys = write(tmp_path / "keys.yaml", entry("ka", "acme", models=["m"]), entry("kb", "other"))
    settings = {"keys_file": keys, "admin_api_key": "boss"}
    own, other = bearer("ka"), bearer("kb")

    async def main():
        slow = Slow()
        slow.go.set()
        async with (
            FakeWorker(on_request=slow) as worker,
            keeping(worker, folder=tmp_path / "kept", **settings) as (router, client),
        ):
            router.batches.start()
            assert (await upload(client, [line(1)])).error == "invalid_api_key"
            batch = await begin(client, [line(1), line(2, model="secret"), line(3, lora_path="x")], own)
            batch = await ended(client, batch, own)
            assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
            errors = await output(client, batch["error_file_id"], own)
            assert {one["response"]["body"]["error"]["code"] for one in errors} == {"not_allowed"}
            for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}/content"):
                assert (await client.ask("GET", path, headers=other)).status == 404
                assert (await client.ask("GET", path, headers=own)).status == 200
            assert (await client.ask("GET", "/v1/files", headers=other)).json["data"] == []
            assert slow.lines[0].headers["x-tokenyard-tenant"] == "acme"
            used = router.metrics.usage_rows()[0]
            assert (used["requests"], used["prompt_tokens"], used["answer_tokens"]) == (1, 12, 30)
            await router.batches.close()

    run(main())


def test_uploads_in_small_pieces_and_those_that_break_off(tmp_path):
    async def main():
        async with FakeWorker() as worker, keeping(worker, folder=tmp_path) as (_, client):
            data = client.head("POST", "/v1/files", [FORM], form([line(1)]))
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            for at in range(0, len(data), 7):
                writer.write(data[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
            got = parse_answer(await reader.read())
            assert (got.status, got.json["filename"]) == (200, "l.jsonl")
            writer.close()
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            long = form([line(1, prompt="x" * 1_200_000)])
            writer.write(client.head("POST", "/v1/files", [FORM], long)[:-9])
            await until(lambda: list(tmp_path.glob("files/*.part")))
            writer.close()
            await until(lambda: not list(tmp_path.glob("files/*.part")))
            assert len((await client.ask("GET", "/v1/files")).json["data"]) == 1

    run(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/files", {}, 400, None),
        ("POST", "/v1/batches", b"no", 400, None),
        ("POST", "/v1/batches", {"endpoint": 3, "input_file_id": "f"}, 400, "endpoint"),
        ("POST", "/v1/batches", {"endpoint": "/v1/completions", "input_file_id": "f"}, 400, "completion_window"),
        ("GET", "/v1/files?limit=x", None, 400, "limit"),
        ("GET", "/v1/files?limit=0", None, 400, "limit"),
        ("GET", "/v1/files?order=up", None, 400, "order"),
        ("GET", "/v1/batches?after=none", None, 400, "after"),
        ("GET", "/v1/files/none", None, 404, "file_id"),
        ("GET", "/v1/batches/none", None, 404, "batch_id"),
        ("POST", "/v1/batches/none/cancel", None, 404, "batch_id"),
        ("PUT", "/v1/files", None, 404, None),
        ("GET", "/v1/files/a/b", None, 404, None),
    ],
)
def test_bad_input(tmp_path, method, path, body, status, param):
    async def main():
        async with FakeWorker() as worker, keeping(worker, folder=tmp_path) as (_, client):
            got = await client.ask(method, path, body)
            assert (got.status, got.json["error"]["param"]) == (status, param)
            assert worker.asked == []

    run(main())


def test_several_processes_share_no_folder():
    with pytest.raises(ConfigError, match="--processes 1"):
        RouterSettings(file_storage_path="x", processes=2)


class Front:
    """A client's connection; `said` is what was done with it."""

    def __init__(self):
        self.current, self.said = SimpleNamespace(method=b"GET"), []

    def begin(self, first_line, headers, more=b""):
        self.said.append("begin")

    def write(self, data):
        self.said.append(len(data))

    def end(self, *, keep=True):
        self.said.append("end")

    def abort(self):
        self.said.append("abort")

    def fail(self, error, path=""):
        self.said.append(error.code)


def test_a_file_is_sent_as_fast_as_its_client_reads(tmp_path):
    path = tmp_path / "answers"
    path.write_bytes(bytes(3 * READ_BYTES))

    def is_open():
        return any(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())

    async def until(condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def main():
        front = Front()
        sender = FileSender(front, path)
        sender.pause()
        await until(lambda: front.said)
        await asyncio.sleep(0.02)
        assert front.said == ["begin"]
        sender.resume()
        await until(lambda: "end" in front.said)
        assert front.said[1:-1] == [READ_BYTES] * 3
        # A client that reads nothing, and leaves.
        front = Front()
        sender = FileSender(front, path)
        sender.pause()
        await until(lambda: front.said)
        assert is_open()
        sender.client_gone()
        await until(lambda: not is_open())
        assert front.said == ["begin"]
        for unreadable, said in ((tmp_path, ["not_found"]), (Path("/proc/self/mem"), ["begin", "abort"])):
            front = Front()
            FileSender(front, unreadable)
            await until(lambda front=front, said=said: front.said == said)

    run(main())
