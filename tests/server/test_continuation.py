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
    """A kind of stream: its request, and what a client has after some of its events."""

    path: str
    body: dict[str, Any]
    client: Callable[[list[Any]], Any]
    answer: str = ANSWER


def chat_client(events: list[Any]) -> Any:
    """Content, reasoning, calls, finish reason and usage."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish": [], "usage": None}
    for event in events:
        found["usage"] = event.get("usage") or found["usage"]
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            for name in ("content", "reasoning_content"):
                found[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                has = found["calls"].setdefault(call["index"], {"name": "", "arguments": "", "ids": 0})
                has["name"] += call["function"].get("name", "")
                has["arguments"] += call["function"].get("arguments", "")
                has["ids"] += "id" in call
            found["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: dict[str, Any] = {"messages": HELLO, "stream_options": {"include_usage": True}}
PROMPT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 60, "stream_options": {"include_usage": True}}
FORMS = {
    "chat": Form(CHAT, MESSAGES, chat_client, PLAIN),
    "chat with reasoning": Form(CHAT, MESSAGES, chat_client),
    "chat with tools": Form(CHAT, {**MESSAGES, "tools": FUNCTIONS}, chat_client),
    "chat with one call at most": Form(
        CHAT, {**MESSAGES, "tools": FUNCTIONS, "parallel_tool_calls": False}, chat_client
    ),
    "chat with unseparated reasoning": Form(
        CHAT, {**MESSAGES, "tools": FUNCTIONS, "separate_reasoning": False}, chat_client
    ),
    "completion": Form(COMPLETIONS, PROMPT, chat_client, PLAIN),
    "completion with echo": Form(COMPLETIONS, {**PROMPT, "echo": True}, chat_client, PLAIN),
}


def sent(server: Any, form: Form, **more: Any) -> list[tuple[list[int], Any]]:
    """The events of a stream, each with the tokens that it adds."""
    answer = server.client.post(form.path, json={**form.body, "stream": True, "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line.partition("data: ")[2] or line)
        for line in answer.text.splitlines()
        if line.startswith(("data: {", "{"))
    ]
    return [(token_ids(event), event) for event in events]


def token_ids(event: Any) -> list[int]:
    return [token for choice in event.get("choices", [event]) for token in choice.get("token_ids") or []]


@pytest.mark.parametrize("name", FORMS)
def test_a_stream_cut_anywhere_is_completed(start, name):
    form = FORMS[name]
    manager = FakeManager()
    manager.template_sources = {"default": HERMES}
    manager.answer = [form.answer[at : at + 3] for at in range(0, len(form.answer), 3)]
    server = start(manager)
    whole = sent(server, form)
    expected = form.client([event for _, event in whole])
    tokens: list[int] = []
    for place, (ids, _) in enumerate(whole):
        tokens += ids
        if not ids or len(tokens) == len(manager.answer):
            continue
        first = [event for _, event in whole[: place + 1]]
        rest = [event for _, event in sent(server, form, output_ids=tokens)]
        assert form.client(first + rest) == expected, f"cut after {len(tokens)} tokens"
    assert len(tokens) == len(manager.answer)
