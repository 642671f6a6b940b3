"""A worker that dies in the middle of a stream is replaced, and the client does not notice."""

import asyncio
import json

import pytest

from tests.router.fakes import DONE, LAST, STREAM_HEAD, FakeWorker, answer, event, routing
from tokenyard.router.stream_continuation import (
    BY_OUTPUT_IDS,
    BY_PROMPT_IDS,
    CHAT,
    COMPLETIONS,
    Continuation,
    continuation_mode,
)

OURS = {"continues_output_ids": True}
LENGTH = 12


class Engine:
    """Answers with the tokens 0, 1, 2, ... as engines of ours do, and dies after `dies_after` of them."""

    def __init__(self, created, dies_after=None, how="abort"):
        self.created, self.dies_after, self.how = created, dies_after, how
        self.bodies = []

    async def __call__(self, asked, writer):
        body = asked.json
        self.bodies.append(body)
        if not body.get("stream"):
            return False
        chat = asked.path == CHAT
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": f"x-{asked.headers['x-request-id']}", "object": kind, "created": self.created, "model": "m"}
        tell = body.get("return_token_ids")
        begun = body.get("output_ids", [])
        assert begun == list(range(len(begun)))
        writer.write(STREAM_HEAD)
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            writer.write(event({**head, "choices": [role]}))
        for token in range(len(begun), LENGTH):
            if self.dies_after is not None and token - len(begun) == self.dies_after:
                await writer.drain()
                await asyncio.sleep(0.01)
                await self.break_off(writer)
                return None
            text = {"delta": {"content": f" t{token}"}} if chat else {"text": f" t{token}"}
            choice = {"index": 0, **text, "logprobs": None, "finish_reason": "length" if token == LENGTH - 1 else None}
            if tell:
                choice["token_ids"] = [token]
            writer.write(event({**head, "choices": [choice]}))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(event({**head, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": LENGTH}}))
        writer.write(DONE + LAST)
        return None

    async def break_off(self, writer):
        if self.how == "abort":
            writer.transport.abort()
        elif self.how == "half an event":
            writer.write(b"4c\r\ndata: half")
            await writer.drain()
            writer.close()
        elif self.how == "early end":
            writer.write(LAST)
        elif self.how == "junk":
            writer.write(b"this is no chunk\r\n")
        elif self.how == "silence":
            await asyncio.sleep(30)


class DiesOnce(Engine):
    async def break_off(self, writer):
        self.dies_after = None
        await super().break_off(writer)


def worker(name, engine):
    return FakeWorker(name, info=OURS, on_request=engine)


def ask(path, **fields):
    prompt = {"messages": [{"role": "user", "content": "go"}]} if path == CHAT else {"prompt": "go"}
    return json.dumps({**prompt, "model": "m", "stream": True, **fields}).encode()


async def body_of_stream(client, path, **fields):
    headers = ["X-Request-Id: one"]
    got = await client.ask("POST", path, ask(path, **fields), headers)
    assert got.status == 200
    return got.body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["abort", "half an event", "early end", "junk", "silence"])
@pytest.mark.parametrize("after", [1, 5, LENGTH - 1])
def test_the_stream_continues_byte_for_byte(path, how, after):
    async def main():
        whole = Engine(1)
        async with worker("a", whole) as a, routing(a) as (_, client):
            expected = await body_of_stream(client, path)
        dying, other = Engine(1, after, how), Engine(2)
        patience_s = 0.5 if how == "silence" else 30.0
        async with (
            worker("a", dying) as a,
            worker("b", other) as b,
            routing(a, b, policy="round_robin", stall_timeout_secs=patience_s) as (router, client),
        ):
            assert await body_of_stream(client, path) == expected
            assert other.bodies[0]["output_ids"] == list(range(after))
            assert router.metrics.continued == 1

    asyncio.run(main())


def test_it_survives_several_deaths():
    async def main():
        engines = [Engine(i, 3) for i in range(3)] + [Engine(9)]
        workers = [worker(str(i), engine) for i, engine in enumerate(engines)]
        async with (
            workers[0],
            workers[1],
            workers[2],
            workers[3],
            routing(*workers, policy="round_robin") as (r, client),
        ):
            got = await body_of_stream(client, COMPLETIONS)
            assert b"".join(b" t%d" % i for i in range(LENGTH)) == b"".join(
                part.partition(b'"text":"')[2].partition(b'"')[0] for part in got.split(b"\n\n")
            )
            assert r.metrics.continued == 3

    asyncio.run(main())


def test_a_restarted_worker_can_continue_its_own_stream():
    async def main():
        async with worker("a", DiesOnce(1, 4)) as a, routing(a) as (router, client):
            assert (await body_of_stream(client, COMPLETIONS)).count(b" t") == LENGTH
            assert router.metrics.continued == 1

    asyncio.run(main())


class DiesInACrowd(Engine):
    """Dies once `other` and it have begun `streams`: a worker that fails earlier gets fewer of them."""

    def __init__(self, dies_after, other, streams):
        super().__init__(1, dies_after)
        self.other, self.streams = other, streams

    async def break_off(self, writer):
        while len(self.bodies) + len(self.other.bodies) < self.streams:
            await asyncio.sleep(0.001)
        await super().break_off(writer)


def test_streams_beyond_the_retry_budget_continue():
    async def main():
        other = Engine(2)
        async with (
            worker("a", DiesInACrowd(4, other, 60)) as a,
            worker("b", other) as b,
            routing(a, b, policy="round_robin", retry_share=0.0) as (router, client),
        ):
            got = await asyncio.gather(*(body_of_stream(client, COMPLETIONS) for _ in range(60)))
            assert [body.count(b" t") for body in got] == [LENGTH] * 60
            assert router.metrics.continued >= 30

    asyncio.run(main())


def test_a_stream_that_its_workers_never_survive_ends():
    async def main():
        async with (
            worker("a", Engine(1, 1)) as a,
            worker("b", Engine(2, 1)) as b,
            routing(a, b, policy="round_robin", max_retries=3) as (router, client),
        ):
            got = await body_of_stream(client, COMPLETIONS)
            assert got.count(b'"text":') == 4
            assert b'"code":"worker_failed"' in got
            assert router.metrics.continued == 3

    asyncio.run(main())


class DiesForGood(Engine):
    """Its worker dies with it."""

    async def break_off(self, writer):
        await self.worker.stop()


class BusyAtFirst(Engine):
    """Refuses what was begun elsewhere `refusals` times."""

    def __init__(self, created, refusals, status=503):
        super().__init__(created)
        self.refusals, self.status = refusals, status

    async def __call__(self, asked, writer):
        if asked.json.get("output_ids") and self.refusals:
            self.refusals -= 1
            writer.write(answer({"error": {"message": "busy"}}, self.status))
            return None
        return await super().__call__(asked, writer)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_worker_gets_the_stream_once_it_has_room(status):
    async def main():
        dying = DiesForGood(1, 4)
        async with (
            worker("a", dying) as dying.worker,
            worker("b", BusyAtFirst(2, 9, status)) as b,
            routing(dying.worker, b, policy="round_robin", max_retries=1, cb_failure_threshold=100) as (_, client),
        ):
            assert (await body_of_stream(client, COMPLETIONS)).count(b" t") == LENGTH

    asyncio.run(main())


def test_a_stream_that_no_worker_takes_ends_when_requests_would_leave_the_queue():
    async def main():
        dying, busy = DiesForGood(1, 4), BusyAtFirst(2, 10**9)
        settings = {"policy": "round_robin", "queue_timeout_secs": 0.1, "cb_failure_threshold": 10**6}
        async with (
            worker("a", dying) as dying.worker,
            worker("b", busy) as b,
            routing(dying.worker, b, **settings) as (_, client),
        ):
            assert b'"code":"worker_failed"' in await body_of_stream(client, COMPLETIONS)
            assert busy.refusals < 10**9 - 1

    asyncio.run(main())


def test_a_continuing_stream_goes_to_a_full_worker():
    async def main():
        async with (
            worker("a", Engine(1, 4)) as a,
            worker("b", Engine(2)) as b,
            routing(a, b, policy="round_robin", max_worker_requests=1, queue_size=0) as (_, client),
        ):
            got = await asyncio.gather(*(body_of_stream(client, COMPLETIONS) for _ in range(2)))
            assert [body.count(b" t") for body in got] == [LENGTH] * 2

    asyncio.run(main())


STREAM_ENDS = {
    CHAT: (b"data: ", ("error", "code")),
    "/v1/messages": (b"event: error\ndata: ", ("error", "type")),
    "/v1/responses": (b"event: error\ndata: ", ("code",)),
    "/api/chat": (b"", ("error",)),
}
"""How the error event of each API begins, and where it says what kind of error it is."""


@pytest.mark.parametrize("path", STREAM_ENDS)
@pytest.mark.parametrize("complete", [True, False])
def test_a_cut_stream_ends_with_an_error_event_of_its_api(path, complete):
    begin, where = STREAM_ENDS[path]
    lines = path == "/api/chat"

    async def die(asked, writer):
        head = STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson") if lines else STREAM_HEAD
        piece = b'{"message":{}}\n' if lines else b"data: {}\n\n"
        data = piece if complete else piece[:-2]
        writer.write(head + b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async def main():
        async with FakeWorker(on_request=die) as a, routing(a, continuation=False) as (_, client):
            got = await client.ask("POST", path, {"model": "m", "stream": True})
            last = got.body.strip().split(b"\n" if lines else b"\n\n")[-1]
            assert last.startswith(begin)
            found = json.loads(last.removeprefix(begin))
            assert lines or path == CHAT or found["type"] == "error"
            for name in where:
                found = found[name]
            assert isinstance(found, str)

    asyncio.run(main())


@pytest.mark.parametrize("path", STREAM_ENDS)
def test_errors_before_a_stream_have_the_form_of_its_api(path):
    async def main():
        async with routing() as (_, client):
            got = await client.ask("POST", path, {"model": "m"})
            assert got.status == 503
            if path == "/v1/messages":
                assert got.json["type"] == "error"
                assert got.json["error"]["type"] == "overloaded_error"
            elif path == "/api/chat":
                assert isinstance(got.json["error"], str)
            else:
                assert got.error == "no_worker"

    asyncio.run(main())


def test_token_ids_are_sent_to_clients_that_asked():
    async def main():
        async with worker("a", Engine(1)) as a, routing(a) as (_, client):
            assert b"token_ids" not in await body_of_stream(client, COMPLETIONS)
            assert (await body_of_stream(client, COMPLETIONS, return_token_ids=True)).count(b'"token_ids":[') == LENGTH

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"n": 2}, {"return_token_ids": False}, {"output_ids": [0]}])
def test_where_continuation_cannot_be_exact_the_client_gets_an_error(fields):
    async def main():
        async with (
            worker("a", Engine(1, 3)) as a,
            worker("b", Engine(2)) as b,
            routing(a, b, policy="round_robin") as (router, client),
        ):
            got = await body_of_stream(client, COMPLETIONS, **fields)
            assert b'"code":"worker_failed"' in got
            assert router.metrics.continued == 0

    asyncio.run(main())


def test_it_can_be_switched_off():
    async def main():
        async with (
            worker("a", Engine(1, 3)) as a,
            worker("b", Engine(2)) as b,
            routing(a, b, policy="round_robin", continuation=False) as (_, client),
        ):
            assert b'"code":"worker_failed"' in await body_of_stream(client, COMPLETIONS)
            assert "return_token_ids" not in a.asked[0].json

    asyncio.run(main())


class OtherEngine:
    """Answers as vLLM does, with the ids of the prompt in the first event; the answer depends on its place alone."""

    def __init__(self, dies_after=None):
        self.dies_after = dies_after
        self.bodies = []

    async def __call__(self, asked, writer):
        body = asked.json
        self.bodies.append((asked.path, body))
        chat = asked.path == CHAT
        ids = body["prompt"] if isinstance(body.get("prompt"), list) else [7, 8]
        writer.write(STREAM_HEAD)
        first = len(ids) - 2
        for count, token in enumerate(range(first, first + body["max_tokens"])):
            if count == self.dies_after:
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.transport.abort()
                return
            text = {"delta": {"content": f" t{token}"}} if chat else {"text": f" t{token}"}
            last = token == first + body["max_tokens"] - 1
            choice = {"index": 0, **text, "finish_reason": "length" if last else None, "token_ids": [token + 100]}
            more = {"prompt_token_ids": ids if count == 0 else None}
            writer.write(event({"id": "theirs", "created": 5, "model": "m", "choices": [choice], **more}))
            await writer.drain()
        usage = {"prompt_tokens": len(ids), "completion_tokens": body["max_tokens"], "total_tokens": 99}
        writer.write(event({"id": "theirs", "created": 5, "model": "m", "choices": [], "usage": usage}))
        writer.write(DONE + LAST)


def foreign(name, engine):
    return FakeWorker(name, on_request=engine, owner="vllm")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_another_engine_continues_with_prompt_and_answer_as_its_prompt(path):
    async def main():
        other = OtherEngine()
        async with (
            foreign("a", OtherEngine(3)) as a,
            foreign("b", other) as b,
            routing(a, b, policy="round_robin") as (_, client),
        ):
            got = await client.ask("POST", path, ask(path, max_tokens=8, temperature=0))
            *events, end = got.events
            assert end == "[DONE]"
            said = [choice for sent in events for choice in sent["choices"]]
            texts = [c["delta"]["content"] if path == CHAT else c["text"] for c in said]
            assert texts == [f" t{i}" for i in range(8)]
            assert events[-1]["usage"]["prompt_tokens"] == 2
            assert events[-1]["usage"]["completion_tokens"] == 8
            assert "token_ids" not in got.body.decode()
            where, body = other.bodies[0]
            assert where == COMPLETIONS
            assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([7, 8, 100, 101, 102], 5, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [{"tools": [{}]}, {"response_format": {"type": "json"}}, {"presence_penalty": 1}, {"logprobs": 1}, {"n": 3}],
)
def test_another_engine_is_not_asked_what_it_cannot_do(fields):
    assert continuation_mode(COMPLETIONS, {"prompt": "x", "stream": True, **fields}, BY_PROMPT_IDS) == ""


def test_ways():
    plain = {"prompt": "x", "stream": True}
    assert continuation_mode(COMPLETIONS, plain, BY_OUTPUT_IDS) == BY_OUTPUT_IDS
    assert continuation_mode(COMPLETIONS, plain, BY_PROMPT_IDS) == BY_PROMPT_IDS
    assert continuation_mode(COMPLETIONS, plain, "") == ""
    assert continuation_mode(COMPLETIONS, {**plain, "stream": False}, BY_OUTPUT_IDS) == ""
    assert continuation_mode(COMPLETIONS, {**plain, "prompt": ["a", "b"]}, BY_OUTPUT_IDS) == ""
    assert continuation_mode("/generate", plain, BY_OUTPUT_IDS) == ""


def test_a_text_that_looks_like_token_ids_is_left_alone():
    continuation = Continuation(COMPLETIONS, {"stream": True}, BY_OUTPUT_IDS)
    text = json.dumps({"choices": [{"text": ',"token_ids":[1,2]', "finish_reason": None}]}).encode()
    sent = continuation.feed(b"data: " + text[:-3] + b', "token_ids": [5]}]}\n\n')
    assert continuation.outputs[0] == [5]
    assert json.loads(sent[6:])["choices"][0]["text"] == ',"token_ids":[1,2]'
    assert "token_ids" not in json.loads(sent[6:])["choices"][0]


def test_pieces_of_events_are_put_together():
    stream = b"".join(b'data: {"choices":[{"text":"%d","token_ids":[%d]}]}\n\n' % (i, i) for i in range(20))
    for size in (1, 7, 50, 5000):
        continuation = Continuation(COMPLETIONS, {"stream": True}, BY_OUTPUT_IDS)
        sent = b"".join(continuation.feed(stream[i : i + size]) for i in range(0, len(stream), size))
        assert sent == b"".join(b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(20))
        assert continuation.outputs[0] == list(range(20))


def test_an_answer_that_is_no_stream_goes_by_the_usual_rules():
    async def main():
        async def reply(asked, writer):
            writer.write(answer({"error": {"message": "no"}}, 400))

        async with FakeWorker(info=OURS, on_request=reply) as a, routing(a) as (_, client):
            assert (await client.complete(stream=True)).status == 400

    asyncio.run(main())


def test_offsets_of_log_probabilities_count_from_the_beginning():
    def said(*offsets):
        logprobs = {"tokens": ["abc"] * len(offsets), "text_offset": list(offsets)}
        choice = {"index": 0, "text": "x", "logprobs": logprobs, "token_ids": [1] * len(offsets)}
        return b"data: " + json.dumps({"id": "i", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"

    def offsets_of(event):
        return json.loads(event[6:])["choices"][0]["logprobs"]["text_offset"]

    continuation = Continuation(COMPLETIONS, {"stream": True, "logprobs": 1}, BY_OUTPUT_IDS)
    assert offsets_of(continuation.feed(said(0, 3))) == [0, 3]
    continuation.resume_stream()
    assert offsets_of(continuation.feed(said(0))) == [6]
    assert offsets_of(continuation.feed(said(3, 6))) == [9, 12]
    continuation.resume_stream()
    assert offsets_of(continuation.feed(said(0))) == [15]
    end = b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    assert continuation.feed(end).startswith(b'data: {"id":"i","choices":[]')
