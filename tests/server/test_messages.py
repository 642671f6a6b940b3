"""Anthropic's Messages API over the fake engine."""

import json

import pytest

from tests.server.fake import FakeManager
from tests.server.test_tool_calls import ANSWER, HERMES

TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
TOOLS.append({"name": "now", "input_schema": {"type": "object"}})


def serve(start, answer: str | None = None, **options):
    manager = FakeManager()
    manager.template_sources = {"default": HERMES}
    if answer is not None:
        manager.answer = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    return start(manager, **options)


def post(server, **body):
    fields = {"max_tokens": 3, "messages": [{"role": "user", "content": "hello"}], **body}
    return server.client.post("/v1/messages?beta=true", json=fields)


def stream_of(answer) -> list[dict]:
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_whole_message(start):
    message = post(serve(start)).json()
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["content"] == [{"type": "text", "text": "hello world the"}]
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 3
    assert message["usage"]["cache_read_input_tokens"] == 2


def test_thinking_text_and_tools_are_blocks(start):
    message = post(serve(start, ANSWER), tools=TOOLS).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][0]["thinking"] == "the quick"
    assert message["content"][2]["input"] == {"city": "Paris", "days": 2}
    assert message["content"][3]["input"] == {}
    assert message["stop_reason"] == "tool_use"


def test_a_stream_adds_up_to_the_message(start):
    events = stream_of(post(serve(start, ANSWER), tools=TOOLS, stream=True))
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[-1][name] += delta[name]
            blocks[-1]["json"] += delta.get("partial_json", "")
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "the quick"
    assert blocks[1]["text"] == "hello"
    assert json.loads(blocks[2]["json"]) == {"city": "Paris", "days": 2}
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] > 0


def test_the_conversation_reaches_the_template(start):
    server = serve(start)
    messages = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "world"},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "fox"}],
                    "is_error": True,
                },
                {"type": "text", "text": "quick"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=9"}, {"type": "text", "text": "lazy"}]
    assert post(server, messages=messages, system=system, thinking={"type": "disabled"}).status_code == 200
    _, seen, options = server.manager.calls[0]
    assert seen[0] == {"role": "system", "content": "lazy"}
    assert seen[2]["reasoning_content"] == "hm"
    assert seen[2]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    assert seen[3] == {"role": "tool", "tool_call_id": "t1", "content": "Error: fox"}
    assert seen[4] == {"role": "user", "content": "quick"}
    assert options["chat_template_kwargs"] == {"enable_thinking": False}


FOUND = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "fox"}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (FOUND, "t\nu\nfox"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "fox"}}, "fox"),
        ({"type": "document", "title": "t", "source": {"type": "content", "content": FOUND["content"]}}, "t\nfox"),
        ({"type": "document", "context": "c", "source": {"type": "content", "content": "fox"}}, "c\nfox"),
    ],
)
def test_documents_and_search_results_of_text_are_text(start, block, text):
    server = serve(start)
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    use = {"type": "tool_use", "id": "t1", "name": "now", "input": {}}
    messages = [
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert post(server, messages=messages).status_code == 200
    _, seen, _ = server.manager.calls[0]
    assert (seen[0]["content"], seen[2]["content"]) == (text, text)


def test_a_last_message_of_the_assistant_is_continued(start):
    server = serve(start)
    post(server, messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}])
    assert server.manager.calls[0][2]["continue_final_message"]


def test_a_stop_sequence_is_named(start):
    server = serve(start, "hello world")
    post(server, stop_sequences=["fox"])
    assert server.manager.specs[0].sampling.stop == ["fox"]


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "now"}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
def test_tool_choices(start, choice, grammar):
    server = serve(start)
    assert post(server, tools=TOOLS, tool_choice=choice).status_code == 200
    assert bool(server.manager.specs[0].grammar) == grammar


def test_tokens_are_counted_with_system_text(start):
    server = serve(start)
    body = {"messages": [{"role": "user", "content": "hello world"}], "system": "the quick"}
    assert server.client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 4}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{**FOUND, "citations": {"enabled": True}}]}]}, "citations"),
        ({"messages": [{"role": "user", "content": [{**FOUND, "content": [FOUND]}]}]}, "only text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
    ],
)
def test_wrong_requests_get_a_clear_400_in_anthropics_form(start, body, words):
    answer = post(serve(start), **body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


def test_the_key_may_come_as_anthropics_clients_send_it(start):
    server = serve(start, api_key="secret")
    assert post(server).json()["error"]["type"] == "authentication_error"
    server.client.headers["x-api-key"] = "secret"
    assert post(server).status_code == 200


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_an_output_format_becomes_a_grammar(start, name):
    server = serve(start)
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    fields = {name: form if name == "output_format" else {"format": form, "effort": "low"}}
    assert post(server, **fields).status_code == 200
    assert '"a":{"type":"integer"}' in server.manager.specs[0].grammar
    assert server.manager.calls[0][2]["chat_template_kwargs"].get("reasoning_effort") == (
        "low" if name == "output_config" else None
    )


def test_system_messages_within_a_conversation_leave_turns_that_alternate(start):
    server = serve(start)
    messages = [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "hello"},
        {"role": "system", "content": [{"type": "text", "text": "the date"}]},
        {"role": "user", "content": "world"},
        {"role": "assistant", "content": "fox"},
        {"role": "system", "content": "lazy"},
    ]
    assert post(server, messages=messages, system="top").status_code == 200
    assert server.manager.calls[0][1] == [
        {"role": "system", "content": "top\n\nfirst"},
        {"role": "user", "content": "hello\n\n<system>\nthe date\n</system>\n\nworld"},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "<system>\nlazy\n</system>"},
    ]


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
def test_tools_that_anthropic_defines_and_the_client_runs_have_their_schema(start, kind, name, field):
    server = serve(start)
    assert post(server, tools=[{"type": kind, "name": name}]).status_code == 200
    function = server.manager.calls[0][2]["tools"][0]["function"]
    assert function["name"] == name
    assert field in function["parameters"]["properties"]
    assert function["description"]
