"""Sessions over HTTP: from every API to the engine, and the end of their turns."""

import logging
from dataclasses import replace

import pytest

from tests.server.fake import FakeManager
from tests.server.test_explain import EXPLAINED
from tests.server.test_tool_calls import ANSWER, HERMES
from tokenyard.base import NS_PER_S, SessionEnded, TurnEnded
from tokenyard.cli.explain import cache_line

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/generate": {"text": "hello"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


def serve(start, answer="", **options):
    manager = FakeManager()
    manager.template_sources = {"default": HERMES}
    if answer:
        manager.answer = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    return start(manager, **options)


def turns(server):
    return [event for event in server.manager.ends if isinstance(event, TurnEnded)]


def post(server, path, headers=None, **fields):
    response = server.client.post(path, json={**BODIES[path], **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_api_has_the_session(start, path, strict):
    server = serve(start, strict_api=strict)
    post(server, path, {"x-session-id": "s-1", "x-tenant": "acme"})
    assert server.manager.specs[-1].session == "s-1"
    if path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        post(server, path, session_id="s-2", prompt_cache_key="k", nvext={"agent_hints": {"priority": 1}})
        assert server.manager.specs[-1].session == "s-2"
    ended = turns(server)
    assert [event.session for event in ended] == [spec.session for spec in server.manager.specs]
    assert [event.tenant for event in ended] == [spec.tenant for spec in server.manager.specs]
    post(server, path)
    assert server.manager.specs[-1].session == ""
    assert len(turns(server)) == len(ended)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_kind_of_stop_is_told(start, path, stream):
    tools = TOOLS
    if path != "/v1/chat/completions":
        tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    if path == "/v1/responses":
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    calls, says = serve(start, ANSWER), serve(start)
    for server in (calls, says):
        headers = {"x-claude-code-session-id": "s"}
        assert post(
            server, path, headers, tools=tools, stream=stream, **{"max_tokens": 60} if "mess" in path else {}
        ).text
    assert turns(calls) == [TurnEnded("s", "tool")]
    assert turns(says) == [TurnEnded("s", "user")]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "}"}}, None),
        ({"messages": [{"role": "user", "content": 'say "cache_control": {"ttl": "1h"}'}]}, None),
    ],
)
def test_the_time_to_keep_kv(start, fields, seconds):
    server = serve(start)
    post(server, "/v1/chat/completions", session_id="s", **fields)
    assert turns(server)[0].ttl_ns == (-1 if seconds is None else seconds * NS_PER_S)


def test_the_longest_marker_of_a_message_counts(start):
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "b", "cache_control": {"ttl": "5m", "type": "ephemeral"}},
    ]
    server = serve(start)
    post(server, "/v1/messages", {"x-session-id": "s"}, messages=[{"role": "user", "content": parts}])
    assert turns(server)[0].ttl_ns == 3600 * NS_PER_S


def test_a_response_belongs_to_the_session_of_the_first(start):
    server = serve(start)
    first = post(server, "/v1/responses", max_output_tokens=3).json()["id"]
    second = post(server, "/v1/responses", previous_response_id=first, max_output_tokens=3).json()["id"]
    post(server, "/v1/responses", previous_response_id=second, max_output_tokens=3)
    assert [spec.session for spec in server.manager.specs] == ["", first, first]
    assert [spec.turn for spec in server.manager.specs] == [0, 1, 2]


def test_a_conversation_that_goes_on_is_a_session(start):
    server = serve(start)
    for turns_before in range(4):
        said = [{"role": "assistant", "content": "hello world"}, {"role": "user", "content": "the quick"}]
        post(server, "/v1/chat/completions", messages=MESSAGES + said * turns_before)
    sessions = [spec.session for spec in server.manager.specs]
    assert sessions[0] == ""
    assert sessions[1].startswith("auto-")
    assert len(set(sessions[1:])) == 1
    assert [spec.turn for spec in server.manager.specs] == [0, 1, 2, 3]


def test_a_refused_answer_ends_no_turn(start):
    server = serve(start)
    server.manager.failure, server.manager.fail_after = RuntimeError("a fault"), 0
    response = server.client.post("/v1/chat/completions", json={"messages": MESSAGES, "session_id": "s"})
    assert response.status_code == 500
    assert turns(server) == []


def test_close_session(start):
    server = serve(start)
    assert server.client.post("/close_session", json={"session_id": "s", "tenant": "acme"}).json() == {"success": True}
    assert server.manager.ends == [SessionEnded("s", "acme")]
    for body in ({}, {"session_id": ""}, {"session_id": 3}):
        response = server.client.post("/close_session", json=body)
        assert response.status_code == 400
        assert "session_id" in response.json()["error"]["message"]


def test_a_key_closes_sessions_of_its_own_tenant(start):
    server = serve(start, tenant_keys={"acme": "k"})
    body = {"session_id": "s", "tenant": "other"}
    assert server.client.post("/close_session", json=body).status_code == 401
    headers = {"Authorization": "Bearer k"}
    assert server.client.post("/close_session", json=body, headers=headers).status_code == 200
    assert server.manager.ends == [SessionEnded("s", "acme")]


def test_a_router_closes_sessions_of_the_tenant_whose_key_it_has_seen(start):
    server = serve(start)
    body, headers = {"session_id": "s", "tenant": "other"}, {"x-tokenyard-tenant": "acme"}
    assert server.client.post("/close_session", json=body, headers=headers).status_code == 200
    assert server.manager.ends == [SessionEnded("s", "acme")]


def test_the_log_has_session_and_turn(start, caplog):
    server = serve(start, log_requests=True)
    with caplog.at_level(logging.INFO, "tokenyard.requests"):
        post(server, "/v1/chat/completions", session_id="s")
        post(server, "/v1/chat/completions")
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (fields[0]["session"], fields[0]["turn"]) == ("s", 0)
    assert "session" not in fields[1]


def test_explain_has_session_and_turn(start):
    server = serve(start)
    server.manager.explanations = {"r-1": [EXPLAINED], "r-2": [EXPLAINED]}
    post(server, "/v1/chat/completions", session_id="s", rid="r-1")
    post(server, "/v1/chat/completions", rid="r-2")
    first, second = (server.client.get(f"/v1/requests/r-{which}/explain").json() for which in (1, 2))
    assert (first["session"], first["turn"]) == ("s", 0)
    assert "session" not in second


def test_explain_says_which_request_evicted_the_turn_before(start):
    server = serve(start)
    timings = replace(EXPLAINED.timings, evicted_tokens=300, evicted_ns=1, pool_short_tokens=500)
    for rid in ("r-1", "r-2"):
        server.manager.explanations[rid] = [replace(EXPLAINED, timings=timings, evicted_for=[7])]
        post(server, "/v1/chat/completions", session_id="s", rid=rid)
    report = server.state.prompts.report("r-2")
    report.before_tokens, report.cause = 400, "lost"
    cache = server.client.get("/v1/requests/r-2/explain").json()["cache"]
    assert (cache["cause"], cache["evicted_tokens"], cache["evicted_for"]) == ("evicted", 300, ["#7"])
    sentence = cache_line({"session": "s", "cache": cache})
    assert "300 of 400 tokens of the turn before were evicted" in sentence
    assert "#7" in sentence
    assert "a KV pool of 500 more tokens" in sentence
    assert sentence == f"turn 0 of session s: {cache['summary']}"
