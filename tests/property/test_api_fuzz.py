"""Whatever a client sends, it gets an answer or a clear 4xx, never a 5xx and never a 422."""

import asyncio
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.fake import FakeManager
from tokenyard.server.http.app import HOT_ROUTES, create_app
from tokenyard.server.state import ServerOptions, ServerState

scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
plausible = st.sampled_from(
    [
        *("hello world", ["hello", "dog"], [1, 2], [[1], [2, 3]], [{"role": "user", "content": "hello"}]),
        *(0, 1, 2, 16, 0.5, True, {"include_usage": True}, {"max_new_tokens": 3, "n": 2}, {"type": "text"}, "high"),
    ]
)


def bodies(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=4), plausible | values, max_size=6)
    good = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "text": "hello", "input": "hello"}
    good |= {"query": "hello", "items": ["dog"], "label_token_ids": [1], "max_tokens": 3}
    good = {name: value for name, value in good.items() if name in names}
    return fields | fields.map(lambda body: good | body)


async def post(app, path, body):
    """Call the application without sockets; returns the status and the body."""
    sent = []
    asked = False

    async def receive():
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def check_error(path, error):
    """Each API writes errors in its own way."""
    if path.startswith("/api/"):
        assert error
        assert isinstance(error, str)
        return
    assert error["message"]
    own = path.startswith("/v1/messages")
    assert set(error) == ({"message", "type"} if own else {"message", "type", "param", "code"})


@pytest.mark.part(4)
@pytest.mark.parametrize("path", HOT_ROUTES)
def test_no_body_breaks_the_server(path):
    app = create_app(ServerState(ServerOptions(model_name="fake"), FakeManager()))
    kind = HOT_ROUTES[path][1]

    @settings(max_examples=examples(80), deadline=None)
    @given(bodies(kind))
    def check(body):
        status, answer = asyncio.run(post(app, path, json.dumps(body, allow_nan=True).encode()))
        assert status in (200, 400, 404), (status, answer)
        if status == 200:
            assert b'"internal_error"' not in answer
        else:
            check_error(path, json.loads(answer)["error"])

    check()


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=64))
def test_no_bytes_break_the_server(body):
    app = create_app(ServerState(ServerOptions(model_name="fake"), FakeManager()))
    status, _ = asyncio.run(post(app, "/v1/completions", body))
    assert status == 400


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALLED = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": CALLED}
SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
SUMMED = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "the"}], "content": None}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "dog"}
GOOD = {
    "/v1/responses": {
        "input": [SAID, SUMMED, {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}, RESULT],
        "tools": [{"type": "function", **CALLED}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
    },
    "/v1/responses#form": {"input": "hello", "text": {"format": FORM}},
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "the"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "dog"}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        ],
        "tools": [TOOL],
        "format": SCHEMA,
        "options": {"num_predict": 3, "stop": ["dog"]},
        "stream": False,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "tool_calls": [{"id": "i", "type": "function", "function": {"name": "f"}}]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "hello"}]},
    },
    "/v1/chat/completions#form": {
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_schema", "json_schema": FORM},
    },
    "/v1/completions": {
        "prompt": "hello",
        "structural_tag": {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]},
    },
}
WRONG = (None, 7, "hello", [], [7], {}, {"a": 7})


def places(value, path=()):
    """The path of each part of a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in inner:
        yield (*path, step)
        yield from places(part, (*path, step))


def with_part(value, path, part):
    """A body with another part at a path."""
    if not path:
        return part
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_part(copied[path[0]], path[1:], part)
    return copied


@pytest.mark.parametrize("name", GOOD)
def test_no_wrong_part_of_a_good_body_breaks_the_server(name):
    path = name.partition("#")[0]
    app = create_app(ServerState(ServerOptions(model_name="fake"), FakeManager()))

    async def ask(body):
        return await post(app, path, json.dumps(body).encode())

    async def check():
        assert (await ask(GOOD[name]))[0] == 200
        for place in places(GOOD[name]):
            for part in WRONG:
                status, answer = await ask(with_part(GOOD[name], place, part))
                assert status in (200, 400, 404), (place, part, answer)

    asyncio.run(check())
