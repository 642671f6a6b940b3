"""Formats of a checkpoint's own response_template, with transformers' parser as second opinion."""

import json

import pytest
from transformers.utils.chat_parsing.response_parser import parse_response

from tests.server.parse.test_machine import facts, parse
from tests.server.parse.texts import TOOLS
from tokenyard.server.parse.output_parser import OutputParser
from tokenyard.server.parse.output_style import OutputStyle
from tokenyard.server.parse.response_template import format_of

CALL = {"type": "function", "function": "{content}"}
TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": CALL,
        },
        "content": {"content": "text"},
    },
}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    "Hello there.",
    "<think>\nHm.\n</think>\n\nHello.",
    'See.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    '<think>a</think>b<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("opened", [False, True])
def test_the_same_message_as_transformers(text, opened):
    prompt = PROMPT
    if opened:
        if "<think>" not in text:
            pytest.skip("the prompt opens reasoning")
        text, prompt = text.removeprefix("<think>"), PROMPT + "<think>"
    form = format_of(TEMPLATE)
    content, reasoning, calls = facts(parse(form, list(text), prompt))
    theirs = parse_response(text, TEMPLATE, prefix=prompt)
    assert content == theirs.get("content", "")
    assert reasoning == theirs.get("thinking", "")
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.get("tool_calls", [])]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected


def test_it_overrides_the_chat_template():
    style = OutputStyle({"default": "[TOOL_CALLS]"}, response_template=TEMPLATE)
    assert style.form.name == "checkpoint"
    assert style.tool_call_format.shape is not None
    assert OutputStyle({"default": "[TOOL_CALLS]"}, name="hermes", response_template=TEMPLATE).form.name == "hermes"


@pytest.mark.parametrize(
    "template",
    [
        3,
        {},
        {"fields": {}},
        {"fields": {"content": {}}},
        {"version": 2, "fields": TEMPLATE["fields"]},
        {"fields": {"tool_calls": {"open_pattern": "<f=(?P<name>.*)>", "close": "</f>", "content": "json"}}},
        {"fields": {"tool_calls": {"open": "<f>", "close": "</f>", "content": "xml-inline"}}},
        {"fields": {"tool_calls": {"open": "<f>", "close": "</f>", "content": "json", "content_args": {"a": 1}}}},
        {"fields": {"thinking": {"open": ["<t", "<t>"], "close": "</t>"}}},
        {"fields": {"thinking": 3}},
    ],
)
def test_what_cannot_be_followed_is_left_to_the_chat_template(template, caplog):
    assert format_of(template) is None
    style = OutputStyle({"default": "[TOOL_CALLS]"}, response_template=template)
    assert style.form.name == "mistral"
    assert "response_template" in caplog.text


def test_its_calls_can_be_forced_and_are_read_back():
    form = format_of(TEMPLATE)
    text = f"{form.shape.before}now{form.shape.middle}{{}}{form.shape.after}"
    parser = OutputParser(form, tools=TOOLS)
    assert [type(event).__name__ for event in parser.feed(text)][:1] == ["ToolCallStart"]
