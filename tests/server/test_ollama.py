"""Ollama's API over the fake engine, and what is said where nothing is."""

import json

import pytest

from tests.server.fake import FakeManager
from tests.server.test_tool_calls import ANSWER, FUNCTIONS, HERMES

HELLO = [{"role": "user", "content": "hello"}]


def serve(start, answer: str | None = None, source: str = HERMES):
    manager = FakeManager()
    manager.template_sources = {"default": source} if source else {}
    if answer is not None:
        manager.answer = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    return start(manager)


def lines(answer) -> list[dict]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chat_streams_by_default(start):
    server = serve(start)
    *pieces, last = lines(server.client.post("/api/chat", json={"messages": HELLO, "options": {"num_predict": 3}}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "hello world the"
    assert not any(piece["done"] for piece in pieces)
    assert last["done"]
    assert last["done_reason"] == "length"
    assert last["eval_count"] == 3
    whole = server.client.post("/api/chat", json={"messages": HELLO, "stream": False, "options": {"num_predict": 3}})
    assert whole.json()["message"] == {"role": "assistant", "content": "hello world the"}


def test_thinking_and_tools(start):
    body = {"messages": HELLO, "tools": FUNCTIONS, "think": True, "stream": False}
    message = serve(start, ANSWER).client.post("/api/chat", json=body).json()["message"]
    assert message["thinking"] == "the quick"
    assert message["content"] == "hello"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"city": "Paris", "days": 2}, {}]
    body["stream"] = True
    *_, last = lines(serve(start, ANSWER).client.post("/api/chat", json=body))
    assert len(last["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("source", [HERMES, ""])
def test_generate_with_and_without_a_template(start, source):
    server = serve(start, source=source)
    body = {"model": "fake:latest", "prompt": "hello", "stream": False, "options": {"num_predict": 2, "seed": 4}}
    answer = server.client.post("/api/generate", json=body).json()
    assert answer["response"] == "hello world"
    assert server.manager.specs[0].seed == 4
    assert bool(server.manager.calls) == bool(source)


def test_a_request_without_a_prompt_loads(start):
    server = serve(start)
    assert server.client.post("/api/generate", json={"model": "fake"}).json()["done_reason"] == "load"
    assert server.client.post("/api/chat", json={"model": "fake", "messages": []}).json()["done_reason"] == "load"


def test_format_becomes_a_grammar(start):
    server = serve(start)
    for form in ("json", {"type": "object"}):
        server.client.post("/api/chat", json={"messages": HELLO, "format": form})
        assert "%json" in server.manager.specs[-1].grammar


def test_lists_and_facts_of_the_model(start):
    server = serve(start)
    assert server.client.get("/api/tags").json()["models"][0]["name"] == "fake"
    assert server.client.get("/api/ps").json()["models"][0]["model"] == "fake"
    assert server.client.get("/api/version").json()["version"]
    shown = server.client.post("/api/show", json={"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["tokenyard.context_length"] == 64
    assert server.client.post("/api/show", json={"model": "other"}).status_code == 404


@pytest.mark.parametrize(
    "body", [{"options": {"seed": "x"}}, {"options": {"num_predict": "x"}}, {"format": "yaml"}, {"messages": [{}]}]
)
def test_wrong_requests_get_a_sentence(start, body):
    answer = serve(start).client.post("/api/chat", json={"messages": HELLO, **body})
    assert answer.status_code == 400
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/audio/speech", "audio"),
        ("/v1/responses/resp_1/cancel", "in the background"),
        ("/api/pull", "downloading models"),
        ("/nowhere", "nothing at this path"),
    ],
)
def test_what_is_not_offered_says_so_and_names_what_is(start, path, words):
    answer = serve(start).client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert words in message
    assert "/v1/chat/completions" in message
