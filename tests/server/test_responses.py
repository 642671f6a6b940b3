"""OpenAI's Responses API over the fake engine."""

import json

import pytest

from tests.server.fake import FakeManager
from tests.server.test_messages import stream_of
from tests.server.test_tool_calls import ANSWER, HERMES

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}


def serve(start, answer: str | None = None):
    manager = FakeManager()
    manager.template_sources = {"default": HERMES}
    if answer is not None:
        manager.answer = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    return start(manager)


def post(server, **body):
    return server.client.post("/v1/responses", json={"input": "hello", **body})


def test_a_whole_response(start):
    response = post(serve(start), max_output_tokens=3).json()
    assert response["object"] == "response"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "hello world the"
    assert response["usage"]["output_tokens"] == 3


def test_reasoning_text_and_calls_are_items(start):
    response = post(serve(start, ANSWER), tools=[TOOL, NOW]).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "the quick"
    assert json.loads(response["output"][2]["arguments"]) == {"city": "Paris", "days": 2}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_a_stream_tells_of_the_same_items(start):
    events = stream_of(post(serve(start, ANSWER), tools=[TOOL, NOW], stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [events[0]["type"], events[1]["type"]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in output]
    assert all(event["item"]["status"] == "in_progress" for event in added)
    assert done == output
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == output[1]["content"][0]["text"] == "hello"
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == output[2]["arguments"] + output[3]["arguments"]


def test_the_input_reaches_the_template(start):
    server = serve(start)
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "lazy"}]},
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "world"}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "fox"},
    ]
    assert post(server, input=items, instructions="the").status_code == 200
    seen = server.manager.calls[0][1]
    assert [message["role"] for message in seen] == ["system", "developer", "user", "assistant", "tool"]
    assert seen[3]["reasoning_content"] == "hm"
    assert seen[3]["content"] == "world"
    assert seen[3]["tool_calls"][0]["id"] == "c1"
    assert seen[4]["content"] == "fox"


def test_tools_that_are_no_functions_are_left_out(start):
    server = serve(start)
    assert post(server, tools=[{"type": "web_search"}, TOOL]).status_code == 200
    assert len(server.manager.calls[0][2]["tools"]) == 1


def test_a_format_becomes_a_grammar(start):
    server = serve(start)
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert post(server, text={"format": form}).status_code == 200
    assert "%json" in server.manager.specs[0].grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tool_choice": "required", "tools": [{**TOOL, "name": ""}]}, "tools"),
    ],
)
def test_wrong_requests_get_a_clear_400(start, body, param):
    answer = post(serve(start), **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
