"""Which session a request is a turn of."""

import itertools
import json

import pytest

from tokenyard.base.sessions import (
    DERIVED,
    MAX_SESSION_CHARS,
    SESSION_HEADERS,
    derived_session,
    named_session,
    split_user,
    turn_of,
)

CLAUDE_CODE = "user_0a1b_account__session_22ee-31"
IN_ORDER = [
    ({"session_id": "field"}, {}, "field"),
    *(({}, {name: f"of {name}"}, f"of {name}") for name in SESSION_HEADERS),
    ({"nvext": {"agent_context": {"session_id": "context"}}}, {}, "context"),
    ({"nvext": {"agent_hints": {"session_id": "hints"}}}, {}, "hints"),
    ({"conversation": {"id": "conv"}}, {}, "conv"),
    ({"previous_response_id": "resp"}, {}, "first of resp"),
    ({"prompt_cache_key": "key"}, {}, "key"),
    ({"metadata": {"user_id": CLAUDE_CODE}}, {}, "22ee-31"),
]


def name(fields, headers=()):
    return named_session(fields, dict(headers).get, lambda response: f"first of {response}")


@pytest.mark.parametrize(("earlier", "later"), list(itertools.combinations(IN_ORDER, 2)))
def test_the_first_in_the_order_names_the_session(earlier, later):
    fields = {**later[0], **earlier[0]}
    if "nvext" in later[0] and "nvext" in earlier[0]:
        fields["nvext"] = {**later[0]["nvext"], **earlier[0]["nvext"]}
    assert name(fields, {**later[1], **earlier[1]}) == earlier[2]
    assert name(*later[:2]) == later[2]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"session_id": 3, "conversation": ["x"], "prompt_cache_key": None, "nvext": "x", "metadata": []},
        {"session_id": "", "metadata": {"user_id": "someone"}, "nvext": {"agent_hints": {"priority": 3}}},
        {"metadata": {"user_id": "{not json"}},
    ],
)
def test_a_request_without_a_session_has_none(fields):
    assert name(fields) == ""


def test_a_user_is_the_same_in_all_sessions():
    assert split_user("user_ab_account__session_22ee-31") == ("user_ab_account", "22ee-31")
    for session in ("s", "t"):
        user = json.dumps({"session_id": session, "device_id": "d"})
        assert split_user(user) == ('{"device_id":"d"}', session)
    for whole in ("someone", "{not json", "{}", '{"session_id": 3}'):
        assert split_user(whole) == (whole, "")


def test_a_user_id_in_json_may_hold_a_session():
    assert name({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}}) == "s"


def test_a_long_id_is_kept_as_its_digest():
    first, second = (name({"session_id": "x" * 10_000 + end}) for end in "ab")
    assert first != second
    assert len(first) == len(second) == MAX_SESSION_CHARS


USER, ANSWER = {"role": "user", "content": "fix it"}, {"role": "assistant", "content": "which file?"}


def test_a_conversation_with_an_answer_keeps_its_name():
    begun = [{"role": "system", "content": "today is Monday"}, USER]
    later = [{"role": "system", "content": "today is Tuesday"}, USER, ANSWER, {"role": "user", "content": "a.py"}]
    assert derived_session(begun) == ""
    derived = derived_session([*begun, ANSWER])
    assert derived.startswith(DERIVED)
    assert derived_session(later) == derived
    assert derived_session([*later, ANSWER, USER]) == derived


@pytest.mark.parametrize("change", [{"content": "which one?"}, {"tool_calls": [{"function": {"name": "ls"}}]}])
def test_another_first_answer_is_another_conversation(change):
    assert derived_session([USER, {**ANSWER, **change}]) != derived_session([USER, ANSWER])


def test_cache_markers_that_move_change_no_name():
    parts = [{"type": "text", "text": "fix it"}]
    marked = [{**parts[0], "cache_control": {"type": "ephemeral"}}]
    names = {derived_session([{"role": "user", "content": content}, ANSWER]) for content in (parts, marked, "fix it")}
    assert len(names) == 1


def test_items_of_responses_are_messages_too():
    call = {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "c1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "a.py"}
    assert derived_session([USER, call, output]) == derived_session([USER, call, output, ANSWER, USER]) != ""


@pytest.mark.parametrize("messages", [[], ["text"], [None, USER], [{"role": 3}], [{"content": [1, {"text": 2}]}]])
def test_what_is_no_conversation_has_no_name(messages):
    assert derived_session(messages) == ""
    assert turn_of(messages) == 0


def test_a_turn_ends_with_what_is_not_the_models():
    call = {"type": "function_call", "name": "ls"}
    output = {"type": "function_call_output", "output": "a"}
    reasoning = {"type": "reasoning", "summary": []}
    assert turn_of([USER]) == 0
    assert turn_of([USER, ANSWER, USER]) == 1
    assert turn_of([USER, reasoning, call, call, output, ANSWER, USER]) == 2
