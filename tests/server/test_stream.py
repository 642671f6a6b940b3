"""Chunk bytes and body reading, without a server."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.engine.frontend.io_struct import OutputDelta
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.generate import CompletionOutput, usage_of, usage_so_far
from tokenyard.server.http.streaming import ChunkWriter, ClientGoneError, closing_event, read_body, while_connected

HEAD = {"id": "x", "object": "o", "created": 1, "model": 'quo"te'}


def payload(chunk):
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return orjson.loads(chunk[6:])


@given(st.text(), st.integers(0, 500), st.booleans(), st.booleans())
def test_every_chunk_is_one_event_with_its_text(text, index, chat, null_usage):
    writer = ChunkWriter(HEAD, index, chat=chat, null_usage=null_usage)
    full = writer.full(text, finish_reason="stop", matched="x", logprobs={"a": 1}, token_ids=[1, 2])
    for chunk in (writer.plain(text), full):
        content = payload(chunk)
        choice = content["choices"][0]
        assert (choice["delta"]["content"] if chat else choice["text"]) == text
        assert choice["index"] == index
        assert {name: content[name] for name in HEAD} == HEAD
        assert ("usage" in content) == null_usage
    last = payload(full)["choices"][0]
    assert (last["finish_reason"], last["matched_stop"], last["token_ids"]) == ("stop", "x", [1, 2])


def test_plain_and_full_agree():
    writer = ChunkWriter(HEAD, 3, chat=True, null_usage=False)
    assert payload(writer.plain("a")) == payload(writer.full("a"))
    assert payload(writer.full("a", usage={"n": 1}))["usage"] == {"n": 1}
    delta = OutputDelta(0, "a", [5, 6], prompt_tokens=7, completion_tokens=9, cached_tokens=4)
    answer = CompletionOutput()
    answer.add(delta, keep=False)
    assert payload(writer.counted("a", usage_so_far(delta))) == payload(writer.full("a", usage=usage_of([answer], 1)))
    assert payload(writer.role())["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert payload(closing_event(HEAD, {"usage": {"n": 1}})) == {**HEAD, "choices": [], "usage": {"n": 1}}


def receiver(*messages):
    queue = list(messages)

    async def receive():
        return queue.pop(0)

    return receive


def body(content, more=False):
    return {"type": "http.request", "body": content, "more_body": more}


def test_body_in_parts():
    assert asyncio.run(read_body(receiver(body(b"ab", True), body(b"c")), 3)) == b"abc"


def test_a_body_beyond_the_limit_is_read_on_and_refused():
    with pytest.raises(HttpError) as error:
        asyncio.run(read_body(receiver(body(b"ab", True), body(b"cd", True), body(b"ef")), 3))
    assert error.value.code == "body_too_large"


def test_a_body_without_end_is_not_read_for_ever():
    part = body(b"a" * 30, True)
    with pytest.raises(HttpError) as error:
        asyncio.run(read_body(receiver(part, part), 3))
    assert error.value.code == "body_too_large"


def test_disconnect_before_the_body():
    with pytest.raises(ClientGoneError):
        asyncio.run(read_body(receiver({"type": "http.disconnect"}), 3))


def test_work_is_cancelled_when_the_client_goes():
    log = []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def run():
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_later(0.01, gone.set)
        await while_connected(receive, work())

    asyncio.run(run())
    assert log == ["cancelled"]
