"""Streams that were begun at another engine continue as if they had not moved, wherever they were cut.

The client has what the first engine sent with the first tokens of an answer. The second engine gets these tokens as
`output_ids`; what it sends must complete the stream that one engine sends.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.server.fake import FakeManager
from tests.server.test_tool_calls import ANSWER, FUNCTIONS, HELLO, HERMES

PLAIN = "hello  \n<tool world\n\nthe quick "


@dataclass
class Form:
    """A kind of stream.

    body: its request.
    client: what a client has after some of its events.
    answer: what the model writes, three characters a token.
    answers: how many answers it has.
    """

    path: str
    body: dict[str, Any]
    client: Callable[[list[Any]], Any]
    answer: str = ANSWER
    answers: int = 1


def chat_client(events: list[Any]) -> Any:
    """Content, reasoning, calls and finish reason of each answer, and usage."""
    found: dict[Any, Any] = {"usage": None}
    for event in events:
        found["usage"] = event.get("usage") or found["usage"]
        for choice in event["choices"]:
            has = found.setdefault(choice["index"], {"content": "", "reasoning_content": "", "calls": {}, "finish": []})
            delta = choice.get("delta") or {"content": choice.get("text")}
            for name in ("content", "reasoning_content"):
                has[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                known = has["calls"].setdefault(call["index"], {"name": "", "arguments": "", "ids": 0})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
                known["ids"] += "id" in call
            # The router drops the second finish of an answer.
            has["finish"] = [choice["finish_reason"]] if choice["finish_reason"] else has["finish"]
    return found


def messages_client(events: list[Any]) -> Any:
    """The message that the events add up to; each belongs to the block that is open."""
    blocks: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    open_block = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert not blocks
            case "content_block_start":
                assert not open_block
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                blocks[-1].pop("id", None)
                open_block = True
            case "content_block_delta":
                assert open_block
                assert event["index"] == len(blocks) - 1
                for name, text in event["delta"].items():
                    if name != "type":
                        name = "json" if name == "partial_json" else name
                        blocks[-1][name] += text
            case "content_block_stop":
                assert open_block
                open_block = False
            case "message_delta":
                last = {"delta": event["delta"], "usage": event["usage"]}
            case "message_stop":
                assert not open_block
                assert event is events[-1]
    return blocks, last, sum(event["type"] == "message_start" for event in events)


def responses_client(events: list[Any]) -> Any:
    """The deltas of each item, and the response at the end. No number is missing."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    items = [(event["type"], event["item"]["id"]) for event in events if "item" in event]
    return deltas, items, events[-1]["response"]


def ollama_client(events: list[Any]) -> Any:
    """Texts, calls and counters."""
    messages = [event.get("message") or {"content": event["response"], **event} for event in events]
    texts = ["".join(message.get(name, "") for message in messages) for name in ("content", "thinking")]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    last = {name: events[-1][name] for name in ("done", "done_reason", "eval_count", "prompt_eval_count")}
    return texts, calls, last, sum(event["done"] for event in events)


def native_client(events: list[Any]) -> Any:
    """The last text, tokens and counts of each answer; a text only grows."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        before = found.get(event.get("index", 0))
        assert before is None or event["text"].startswith(before["text"])
        found[event.get("index", 0)] = event
    for event in found.values():
        event["meta_info"].pop("e2e_latency", None)
    return found


CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES: dict[str, Any] = {"messages": HELLO, "stream_options": {"include_usage": True}}
PROMPT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 60, "stream_options": {"include_usage": True}}
WITH_TOOLS: dict[str, Any] = {**MESSAGES, "tools": FUNCTIONS}
ANTHROPIC: dict[str, Any] = {"messages": HELLO, "max_tokens": 60}
ANTHROPIC_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in FUNCTIONS
]
RESPONSES: dict[str, Any] = {"input": "hello world"}
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
OLLAMA: dict[str, Any] = {"messages": HELLO}
FORMS = {
    "chat": Form(CHAT, MESSAGES, chat_client, PLAIN),
    "chat with reasoning": Form(CHAT, MESSAGES, chat_client),
    "chat with tools": Form(CHAT, WITH_TOOLS, chat_client),
    "chat with one call at most": Form(CHAT, {**WITH_TOOLS, "parallel_tool_calls": False}, chat_client),
    "chat with unseparated reasoning": Form(CHAT, {**WITH_TOOLS, "separate_reasoning": False}, chat_client),
    "chat with several answers": Form(CHAT, {**WITH_TOOLS, "n": 3}, chat_client, answers=3),
    "completion": Form(COMPLETIONS, PROMPT, chat_client, PLAIN),
    "completion with echo": Form(COMPLETIONS, {**PROMPT, "echo": True}, chat_client, PLAIN),
    "completion with several answers": Form(COMPLETIONS, {**PROMPT, "n": 2}, chat_client, PLAIN, answers=2),
    "message": Form("/v1/messages", ANTHROPIC, messages_client, PLAIN),
    "message with tools": Form("/v1/messages", {**ANTHROPIC, "tools": ANTHROPIC_TOOLS}, messages_client),
    "response": Form("/v1/responses", RESPONSES, responses_client, PLAIN),
    "response with tools": Form("/v1/responses", {**RESPONSES, "tools": RESPONSES_TOOLS}, responses_client),
    "Ollama's chat": Form("/api/chat", OLLAMA, ollama_client, PLAIN),
    "Ollama's chat with tools": Form("/api/chat", {**OLLAMA, "tools": FUNCTIONS}, ollama_client),
    "Ollama's completion": Form("/api/generate", {"prompt": "hello world", "raw": True}, ollama_client, PLAIN),
    "native": Form(NATIVE, {"text": "hello world", "rid": "one"}, native_client, PLAIN),
    "native with several answers": Form(
        NATIVE, {"text": "hello world", "rid": "one", "sampling_params": {"n": 2}}, native_client, PLAIN, answers=2
    ),
}


def sent(server: Any, form: Form, **more: Any) -> list[Any]:
    """The events of a stream."""
    answer = server.client.post(form.path, json={**form.body, "stream": True, "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def add_tokens(outputs: list[list[int]], event: Any) -> bool:
    """Add the tokens of an event to those of its answer; whether it has any."""
    if "output_ids" in event:
        outputs[event.get("index", 0)] = event["output_ids"]
        return True
    parts = event["choices"] if event.get("choices") else [event]
    for part in parts:
        outputs[part.get("index", 0) if "choices" in event else 0] += part.get("token_ids") or []
    return any("token_ids" in part for part in parts)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FORMS)
def test_a_stream_cut_anywhere_is_completed(start, name):
    form = FORMS[name]
    manager = FakeManager()
    manager.template_sources = {"default": HERMES}
    manager.answer = [form.answer[at : at + 3] for at in range(0, len(form.answer), 3)]
    server = start(manager)
    whole = sent(server, form)
    expected = form.client(whole)
    outputs: list[list[int]] = [[] for _ in range(form.answers)]
    more: dict[str, Any] = {}
    cuts = 0
    for place, event in enumerate(whole):
        if not add_tokens(outputs, event) or all(len(ids) == len(manager.answer) for ids in outputs):
            continue
        cuts += 1
        if form.client is responses_client:
            created = whole[0]["response"]
            names = {"id": created["id"], "created_at": created["created_at"], "sequence_number": place + 1}
            more = {"continued_response": names}
        rest = sent(server, form, output_ids=outputs if form.answers > 1 else outputs[0], **more)
        assert form.client(whole[: place + 1] + rest) == expected, f"cut after {outputs}"
    assert cuts > 5
    assert all(len(ids) == len(manager.answer) for ids in outputs)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        (CHAT, {**MESSAGES, "n": 2}, [1, 2]),
        (CHAT, {**MESSAGES, "n": 2}, [[1]]),
        (CHAT, MESSAGES, [[1]]),
        (CHAT, MESSAGES, "1"),
        (NATIVE, {"text": ["hello", "world"]}, [1]),
        (NATIVE, {"text": "hello", "return_logprob": True}, [1]),
    ],
)
def test_output_ids_that_do_not_fit_are_refused(server, path, body, wrong):
    answer = server.client.post(path, json={**body, "stream": True, "output_ids": wrong})
    assert answer.status_code == 400
    assert "output_ids" in answer.json()["error"]["message"]
