"""Whatever a client sends, it gets an answer or a clear 4xx, never a 5xx and never a 422."""

import asyncio
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.fake import FakeManager
from tokenyard.server.app import HOT_ROUTES, create_app
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


@pytest.mark.parametrize("path", HOT_ROUTES)
def test_no_body_breaks_the_server(path):
    app = create_app(ServerState(ServerOptions(model_name="fake"), FakeManager()))
    kind = HOT_ROUTES[path][1]

    @settings(max_examples=examples(200), deadline=None)
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
