"""Chat answers that hold tool calls and reasoning, over the fake engine."""

import json

import pytest

from tests.server.fake import FakeManager
from tests.server.parse.texts import TOOLS
from tests.server.sse import events
from tokenyard.base import ConfigError
from tokenyard.server.parse.detect import named

HELLO = [{"role": "user", "content": "hello world"}]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in TOOLS.items()
]
HERMES = '{% if tools %}{{ tools }}{% endif %} <tool_call> {"name": } <think> developer'
ANSWER = (
    "<think>\nthe quick\n</think>\n\nhello \n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def asked(start, answer: str, source: str = HERMES, **body):
    manager = FakeManager()
    manager.template_sources = {"default": source}
    manager.answer = [answer[at : at + 3] for at in range(0, len(answer), 3)]
    server = start(manager)
    return server.client.post("/v1/chat/completions", json={"messages": HELLO, "tools": FUNCTIONS, **body})


def joined(chunks) -> dict:
    """The message of a stream, put together as the openai client does."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    assert "id" not in call
                    assert call["index"] == len(message["tool_calls"]) - 1
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_whole_answer_with_reasoning_content_and_calls(start):
    choice = asked(start, ANSWER).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "hello"
    assert message["reasoning_content"] == "the quick"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'},
        {"name": "now", "arguments": "{}"},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


def test_a_stream_gives_the_same_message_with_one_finish(start):
    answer = asked(start, ANSWER, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    message = joined(chunks)
    assert message["content"] == "hello"
    assert message["reasoning_content"] == "the quick"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'},
        {"name": "now", "arguments": "{}"},
    ]
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert sum(call["index"] == 0 for call in pieces) > 3, "arguments come as they are written"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_usage_counts_the_tokens_of_reasoning(start):
    assert asked(start, ANSWER).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_prediction_reaches_the_engine_only_where_it_drafts_and_usage_counts_its_tokens(start):
    predicted = {"type": "content", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]}
    for algorithm, text in (("none", ""), ("NGRAM", "hello world")):
        server = start(speculative_algorithm=algorithm)
        body = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 3, "prediction": predicted}
        usage = server.client.post("/v1/chat/completions", json=body).json()["usage"]
        expected = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert usage["completion_tokens_details"] == expected
        assert server.manager.specs[-1].prediction == text
        for wrong in ({}, {"type": "content"}, {"type": "content", "content": [{"type": "image"}]}):
            answer = server.client.post("/v1/chat/completions", json={**body, "prediction": wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prediction"


@pytest.mark.parametrize("source", [HERMES, "<|tool_call_start|> tools"])
def test_arguments_that_json_cannot_hold_reach_every_api(start, source):
    """Numbers beyond 64 bits, and half a character."""
    large = "1" + "0" * 30
    answer = '<tool_call>{"name": "now", "arguments": {"n": ' + large + ', "s": "\\ud800"}}</tool_call>'
    if source != HERMES:
        answer = f"<|tool_call_start|>[now(n={large}, s='\\ud800')]<|tool_call_end|>"
    function = FUNCTIONS[1]["function"]
    tool = {"name": "now", "input_schema": function["parameters"]}
    for path, tools in (
        ("/v1/chat/completions", FUNCTIONS),
        ("/v1/messages", [tool]),
        ("/v1/responses", [{"type": "function", **function}]),
        ("/api/chat", FUNCTIONS),
    ):
        manager = FakeManager()
        manager.template_sources = {"default": source}
        manager.answer = [answer]
        body = {"model": "fake", "messages": HELLO, "input": "hello", "max_tokens": 9, "tools": tools, "stream": False}
        found = start(manager).client.post(path, json=body)
        assert found.status_code == 200, (path, found.text)
        assert "now" in found.text


def test_only_calls_leave_content_null(start):
    message = asked(start, '<tool_call>{"name": "now"}</tool_call>').json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_without_tools_calls_stay_text_and_reasoning_is_taken_out(start):
    message = asked(start, "<think>a</think><tool_call>x", tools=None).json()["choices"][0]["message"]
    assert message["content"] == "<tool_call>x"
    assert message["reasoning_content"] == "a"
    assert "tool_calls" not in message


def test_tool_choice_none_leaves_text(start):
    choice = asked(start, '<tool_call>{"name": "now"}</tool_call>', tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"].startswith("<tool_call>")
    assert choice["finish_reason"] == "stop"


def test_separate_reasoning_off_leaves_the_text_whole(start):
    message = asked(start, "<think>a</think>b", tools=None, separate_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"


def test_a_template_that_drops_tools_is_reported(start, caplog):
    content = asked(start, "hello", source="{{ messages }}").json()
    assert "shows no tools" in content["warnings"][0]
    assert "shows no tools" in caplog.text


def test_developer_becomes_system_where_the_template_does_not_know_it(start):
    for source, role in (("{{ messages }}", "system"), (HERMES, "developer")):
        manager = FakeManager()
        manager.template_sources = {"default": source}
        server = start(manager)
        messages = [{"role": "developer", "content": "hello"}, *HELLO]
        server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert manager.calls[0][1][0]["role"] == role


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function", "function": {}}], "name"),
        ([{"type": "function", "function": {"name": "a", "parameters": 3}}], "parameters"),
        ([*FUNCTIONS, *FUNCTIONS], "twice"),
    ],
)
def test_wrong_tools_are_refused_with_their_place(start, tools, word):
    answer = asked(start, "hello", tools=tools)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert word in answer.json()["error"]["message"]


def test_names_of_parsers_elsewhere_are_known():
    assert named("qwen25").name == "hermes"
    assert json.dumps(sorted({named(name).name for name in ("llama3_json", "kimi_k2")}))
    with pytest.raises(ConfigError, match="there is no output format 'parrot'"):
        named("parrot")
