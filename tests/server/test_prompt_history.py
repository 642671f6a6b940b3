"""Why a turn's prompt was cached as far as it was."""

import logging

import pytest

from tests.server.fake import FakeManager
from tests.server.test_explain import EXPLAINED
from tokenyard.base.prompt_parts import compare
from tokenyard.server.http import prompt_history
from tokenyard.server.http.prompt_history import PromptHistory
from tokenyard.server.native.explain import cache_summary

ASK, SAY, MORE = ({"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user"))
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def turn(history, rid, messages, cached, tokens=1000, tenant="a", tools=(), **other):
    history.began(tenant, "s", rid, messages, tools, **other)
    history.answered(tenant, "s", rid, tokens, cached)
    return history.report(rid)


DATED = {"role": "system", "content": "Today is 2026-11-24."}
THOUGHT = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (DATED, {**DATED, "content": "Today is 2026-11-25."}, "changed: a date or time"),
        (DATED, {**DATED, "content": "It was 2026-11-24."}, "changed"),
        (DATED, {"content": DATED["content"], "role": "system"}, "reordered: the keys are the same in another order"),
        (THOUGHT, {"role": "assistant", "content": "Yes"}, "rewritten: its reasoning was dropped or changed"),
        (THOUGHT, {**THOUGHT, "reasoning_content": "ha"}, "rewritten: its reasoning was dropped or changed"),
        ({**DATED, "content": "x" * 17_000 + "2026-11-24"}, DATED, "changed"),
    ],
)
def test_a_changed_part_says_how_as_cache_check_does(before, after, how):
    history = PromptHistory()
    turn(history, "r1", [before, ASK], 0)
    report = turn(history, "r2", [after, ASK], 0)
    assert (report.cause, report.part, report.how) == ("changed", "messages[0]", how)
    assert compare({"messages": [before, ASK]}, {"messages": [after, ASK]}).how == how
    assert cache_summary(report.describe()).endswith(f"({how})")


@pytest.mark.parametrize(
    ("messages", "other", "cached", "cause", "part"),
    [
        ([ASK, SAY, MORE], {}, 990, "hit", ""),
        ([ASK, SAY, MORE], {}, 300, "lost", ""),
        ([{**ASK, "content": "now"}, SAY, MORE], {}, 0, "changed", "messages[0]"),
        ([], {}, 0, "changed", "messages[0]"),
        ([ASK, SAY, MORE], {"tools": []}, 0, "changed", "tools[0]"),
        ([ASK, SAY, MORE], {"tools": [{**TOOL, "strict": True}]}, 0, "changed", "tools[0]"),
        ([ASK, SAY, MORE], {"salt": "x"}, 0, "other_salt", ""),
        ([ASK, SAY, MORE], {"adapter": "x"}, 0, "other_adapter", ""),
        ([ASK, SAY, MORE], {"tenant": "b"}, 0, "first", ""),
    ],
)
def test_causes(messages, other, cached, cause, part):
    history = PromptHistory()
    assert turn(history, "r1", [ASK], 0, tools=[TOOL]).cause == "first"
    report = turn(history, "r2", messages, cached, tokens=1200, **{"tools": [TOOL], **other})
    assert (report.cause, report.part) == (cause, part)
    if cause != "first":
        assert (report.before, report.before_tokens) == ("r1", 1000)
    assert cache_summary(report.describe()).startswith(f"{cached} of 1200 prompt tokens were cached; ")


def test_markers_that_move_change_nothing():
    parts = [{"type": "text", "text": "hello"}]
    marked = [{**parts[0], "cache_control": {"type": "ephemeral"}}]
    history = PromptHistory()
    turn(history, "r1", [{"role": "user", "content": marked}], 0)
    assert turn(history, "r2", [{"role": "user", "content": parts}, SAY, MORE], 1000).cause == "hit"


def test_it_is_bounded_in_age_number_and_bytes(monkeypatch):
    now = 0.0
    history = PromptHistory(lambda: now)
    turn(history, "r1", [ASK], 0)
    now = prompt_history.MAX_AGE_S + 1
    assert turn(history, "r2", [ASK, SAY], 0).cause == "first"
    monkeypatch.setattr(prompt_history, "MAX_SESSIONS", 3)
    for i in range(9):
        history.began("", f"s{i}", f"r{i}", [ASK], [])
    assert len(history) == 3
    monkeypatch.setattr(prompt_history, "MAX_HISTORY_BYTES", 1000)
    history.began("", "large", "r", [ASK] * 100, [])
    assert len(history) == 0
    history.began("", "small", "r", [ASK], [])
    history.closed("", "small")
    assert len(history) == 0


def test_explain_and_the_log_have_the_cause(start, caplog):
    manager = FakeManager()
    manager.explanations = {"r1": [EXPLAINED], "r2": [EXPLAINED]}
    server = start(manager, log_requests=True)
    with caplog.at_level(logging.INFO, "tokenyard.requests"):
        for rid, first in (("r1", "It is 12:30"), ("r2", "It is 12:31")):
            messages = [{"role": "user", "content": first}]
            body = {"messages": messages, "session_id": "s", "rid": rid}
            assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    cache = server.client.get("/v1/requests/r2/explain").json()["cache"]
    assert (cache["cause"], cache["part"], cache["before"]) == ("changed", "messages[0]", "r1")
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    told = [(entry["cache"], entry["changed"], entry["how"]) for entry in fields]
    assert told == [("first", "", ""), ("changed", "messages[0]", "changed: a date or time")]


LONG = "x" * 4000


@pytest.mark.parametrize(
    ("text", "cached", "cause"),
    [
        (LONG + "<assistant>" + "answer", 300, "lost"),
        (LONG[:1000] + "y" * 4000, 300, "template"),
        (LONG[:1000] + "y" * 4000, 1000, "hit"),
        # The end of a prompt is the begin of an answer, which the template may write otherwise later.
        (LONG[:3600] + "y" * 900, 300, "lost"),
        (LONG[:500], 300, "template"),
    ],
)
def test_a_template_that_rewrites_history_is_named(text, cached, cause):
    history = PromptHistory()
    turn(history, "r1", [ASK], 0, text=LONG + "<assistant>")
    report = turn(history, "r2", [ASK, SAY, MORE], cached, text=text, turn=1)
    assert (report.cause, report.part) == (cause, "")


def test_what_the_template_does_not_write_has_not_changed():
    """Tools may come with a request that forces no call, under a template that has no place for them."""
    history = PromptHistory()
    turn(history, "r1", [ASK], 0, text=LONG, tools=[TOOL])
    assert turn(history, "r2", [ASK], 1000, text=LONG).cause == "hit"
    report = turn(history, "r3", [ASK], 300, text="y" + LONG, tools=[TOOL])
    assert (report.cause, report.part) == ("changed", "messages[0]")


def test_a_session_that_went_on_elsewhere():
    report = turn(PromptHistory(), "r1", [ASK, SAY, MORE], 0, turn=1)
    assert report.cause == "elsewhere"


@pytest.mark.parametrize("how", ["field", "header", ""])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/generate"]
)
def test_usage_says_why_if_asked(start, path, stream, how):
    server = start(FakeManager(), strict_api=True)
    body = {
        "/v1/responses": {"input": [ASK]},
        "/v1/completions": {"prompt": "hello"},
        "/generate": {"text": "hello"},
    }.get(path, {"messages": [ASK]})
    body |= {"/v1/messages": {"max_tokens": 4}}.get(path, {}) | {"stream": stream}
    if stream and path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    headers = {"x-session-id": "s"}
    if how == "header":
        headers["x-return-cached-tokens-details"] = "1"
    elif how == "field":
        body["return_cached_tokens_details"] = True
    found = []
    for _ in range(2):
        answer = server.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found.append(answer.text)
    assert all(("cached_tokens_details" in text) == bool(how) for text in found), found
    if how and path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert '"cause":"first"' in found[0]
        assert '"cause":"first"' not in found[1]
