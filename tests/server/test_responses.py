"""OpenAI's Responses API over the fake engine."""

import json

import pytest

from tests.server.fake import FakeManager
from tests.server.test_messages import stream_of
from tests.server.test_tool_calls import ANSWER, HERMES
from tokenyard.server.http.errors import HttpError
from tokenyard.server.openai.response_store import ResponseStore

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


def test_a_stream_has_the_same_items(start):
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
    answer = post(server, tools=[{"type": "web_search"}, TOOL])
    assert answer.status_code == 200
    assert answer.json()["warnings"] == ["tools[0] is left out: this server runs no 'web_search'"]
    assert len(server.manager.calls[0][2]["tools"]) == 1
    assert "warnings" not in post(server, tools=[TOOL]).json()


def test_a_format_becomes_a_grammar(start):
    server = serve(start)
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert post(server, text={"format": form}).status_code == 200
    assert "%json" in server.manager.specs[0].grammar


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tool_choice": "required", "tools": [{**TOOL, "name": ""}]}, "tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}, TOOL]}, "tool_choice"),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://example.com"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
    ],
)
def test_wrong_requests_get_a_clear_400(start, body, param):
    answer = post(serve(start), **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_a_stored_one(start, stream):
    server = serve(start, ANSWER)
    first = post(server, tools=[TOOL, NOW], stream=stream, instructions="the")
    first = stream_of(first)[-1]["response"] if stream else first.json()
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "fox"}
    second = post(server, input=[output], previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    seen = [call[1] for call in server.manager.calls][-1]
    # Instructions are those of one request alone.
    assert [message["role"] for message in seen] == ["user", "assistant", "tool"]
    assert seen[1]["reasoning_content"] == "the quick"
    assert len(seen[1]["tool_calls"]) == 2
    third = post(server, input="world", previous_response_id=second["id"]).json()
    assert len([call[1] for call in server.manager.calls][-1]) == 5
    assert third["status"] == "completed"


def test_a_kept_response_can_be_got_and_deleted(start):
    server = serve(start)
    made = post(server, max_output_tokens=2, input="hello").json()
    path = f"/v1/responses/{made['id']}"
    assert server.client.get(path).json() == made
    items = server.client.get(path + "/input_items").json()["data"]
    assert [item["content"] for item in items] == ["hello"]
    assert server.client.delete(path).json()["deleted"]
    assert server.client.get(path).status_code == 404
    lost = post(server, previous_response_id=made["id"])
    assert lost.status_code == 400
    error = lost.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_chain_of_responses_cannot_grow_beyond_any_prompt(start):
    # Reasoning may be long and never reach a prompt; each response keeps all that came before it.
    server = serve(start)
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 600_000}]}
    asked = [{"role": "user", "content": "hello"}, thought]
    first = post(server, input=asked, max_output_tokens=2)
    assert first.status_code == 200
    second = post(server, input=asked, max_output_tokens=2, previous_response_id=first.json()["id"])
    assert second.status_code == 400
    assert second.json()["error"]["param"] == "previous_response_id"
    assert post(server, max_output_tokens=2, previous_response_id=first.json()["id"]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"text": {"format": 7}}, "text"), ({"input": [{"type": "reasoning", "content": 7}]}, "input")],
)
def test_wrong_parts_are_refused(start, fields, param):
    answer = post(serve(start), **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_response_is_not_stored_if_the_client_says_so(start):
    server = serve(start)
    made = post(server, store=False, max_output_tokens=2).json()
    assert not made["store"]
    assert server.client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_the_store_is_bounded_in_number_bytes_and_time_and_by_tenant():
    now = [0.0]
    store = ResponseStore(max_responses=3, max_bytes=200, max_age_s=10.0, clock=lambda: now[0])

    def kept(name, tenant=""):
        try:
            return bool(store.get(name, tenant))
        except HttpError:
            return False

    for number in range(5):
        store.put({"id": f"r{number}"}, [], "")
    assert [kept(f"r{number}") for number in range(5)] == [False, False, True, True, True]
    store.put({"id": "big", "text": "x" * 150}, [], "a")
    assert not kept("r2")
    assert kept("big", "a")
    assert not kept("big", "b")
    # The same id once more: it counts once, and never takes another tenant's place.
    for _ in range(9):
        store.put({"id": "big", "text": "x" * 90}, [], "a")
    store.put({"id": "big"}, [], "b")
    store.put({"id": "r5"}, [], "")
    assert kept("big", "a")
    assert kept("r5")
    assert not kept("big", "b")
    now[0] = 11.0
    assert not kept("big", "a")


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_text_and_its_calls_come_back(start, stream):
    text = '*** Begin "Patch"\n+x'
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    server = serve(start, f"<tool_call>{call}</tool_call>")
    answer = post(server, tools=[PATCH], stream=stream)
    events = stream_of(answer) if stream else []
    response = events[-1]["response"] if stream else answer.json()
    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "apply_patch",
        text,
        "completed",
    )
    assert "start: /.+/" in server.manager.calls[0][2]["tools"][0]["function"]["description"]
    if stream:
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text
    back = [
        {"role": "user", "content": "hello"},
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"},
    ]
    assert post(server, input=back, tools=[PATCH]).status_code == 200
    seen = [call[1] for call in server.manager.calls][-1]
    assert json.loads(seen[1]["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert seen[2] == {"role": "tool", "tool_call_id": item["call_id"], "content": "done"}


def test_functions_of_a_namespace_keep_it(start):
    call = json.dumps({"name": "files__now", "arguments": {}})
    server = serve(start, f"<tool_call>{call}</tool_call>")
    space = {"type": "namespace", "name": "files", "tools": [NOW]}
    (item,) = post(server, tools=[space]).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "files", "now")
    assert post(server, input=[{"role": "user", "content": "hello"}, item], tools=[space]).status_code == 200
    seen = [call[1] for call in server.manager.calls][-1]
    assert seen[1]["tool_calls"][0]["function"]["name"] == "files__now"
    named = {"type": "function", "namespace": "files", "name": "now"}
    assert post(server, tools=[space], tool_choice=named).status_code == 200
    assert "files__now" in server.manager.specs[-1].grammar


def test_a_forced_custom_tool_has_a_grammar(start):
    server = serve(start)
    assert post(server, tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).status_code == 200
    assert "apply_patch" in server.manager.specs[0].grammar


def test_input_tokens_are_counted(start):
    body = {"input": "hello world", "instructions": "the quick", "tools": [TOOL]}
    answer = serve(start).client.post("/v1/responses/input_tokens", json=body)
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 4}


def test_truncation_auto_drops_the_oldest_turns(start):
    server = serve(start)
    words = "hello world the quick brown fox jumps over".split()  # noqa: SIM905
    turns = [{"role": role, "content": f"{word} " * 4} for word in words for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "dog"})
    # 64 tokens fit, and the conversation has 67.
    fields = {"input": turns, "instructions": "lazy answer", "max_output_tokens": 2}
    assert post(server, **fields).json()["error"]["code"] == "context_length_exceeded"
    response = post(server, **fields, truncation="auto").json()
    assert response["status"] == "incomplete"
    assert response["truncation"] == "auto"
    seen = [call[1] for call in server.manager.calls][-1]
    assert seen[0] == {"role": "system", "content": "lazy answer"}
    assert seen[1] == {"role": "user", "content": "world " * 4}
    assert seen[-1] == turns[-1]
    # In the last turn the oldest calls go, with their results.
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "now", "arguments": "{}"} for i in range(6)]
    results = [{"type": "function_call_output", "call_id": f"c{i}", "output": "world " * 12} for i in range(6)]
    steps = [item for pair in zip(calls, results, strict=True) for item in pair]
    long = {"input": [*turns, *steps], "instructions": "lazy", "max_output_tokens": 2, "truncation": "auto"}
    assert post(server, **long).json()["status"] == "incomplete"
    seen = [call[1] for call in server.manager.calls][-1]
    assert [message["role"] for message in seen] == ["system", "user", *["assistant", "tool"] * 5]
    assert seen[1] == turns[-1]
    assert seen[-1]["tool_call_id"] == "c5"


def test_a_compacted_conversation_continues(start):
    server = serve(start, "<think>what was it</think>the fox ran")
    server.manager.context_length = 200
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world"},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "the"},
        {"role": "user", "content": [{"type": "input_text", "text": "quick"}]},
    ]
    fields = {"instructions": "lazy", "tools": [NOW]}
    made = server.client.post("/v1/responses/compact", json={"model": "fake", "input": turns, **fields}).json()
    asked = [call[1] for call in server.manager.calls][-1]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool", "user", "user"]
    assert "Summarize" in asked[-1]["content"]
    assert made["object"] == "response.compaction"
    assert made["usage"]["output_tokens"] > 0
    *kept, item = made["output"]
    assert [message["content"][0]["text"] for message in kept] == ["hello", "quick"]
    assert item["type"] == "compaction"
    post(server, input=[*made["output"], {"role": "user", "content": "brown"}], **fields)
    seen = [call[1] for call in server.manager.calls][-1]
    assert [message["role"] for message in seen] == ["system", *["user"] * 4]
    assert seen[3]["content"].endswith("summary:\nthe fox ran")
    # A stored response can be compacted too, and one that does not fit loses its oldest turns.
    stored = post(server, input="world " * 30, max_output_tokens=2).json()
    fields = {"previous_response_id": stored["id"], "max_output_tokens": 2}
    again = server.client.post("/v1/responses/compact", json=fields).json()
    assert [item["type"] for item in again["output"]] == ["message", "compaction"]


def test_a_compaction_without_a_summary_is_refused(start):
    """The client would replace its conversation by nothing."""
    server = serve(start, "<think>what was it")
    answer = server.client.post("/v1/responses/compact", json={"input": "hello"})
    assert answer.status_code == 400
    assert "raise max_output_tokens" in answer.json()["error"]["message"]


def test_an_empty_input_is_a_turn_of_the_user(start):
    server = serve(start)
    first = post(server, max_output_tokens=2).json()["id"]
    assert post(server, input="", previous_response_id=first).status_code == 200
    seen = [call[1] for call in server.manager.calls][-1]
    assert [message["role"] for message in seen] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "hello", "stream": True}, "stream"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAAA"}]}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": 7}]}, "input"),
        ({"input": [{"type": "compaction"}]}, "input"),
    ],
)
def test_what_cannot_be_compacted_is_a_400(start, body, param):
    answer = serve(start).client.post("/v1/responses/compact", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
