"""Readers of sessions in the forms of others: what each turn waits for, its gap, and what its prompt shares."""

import json
from itertools import pairwise

import numpy as np
import pytest

from tests.sim.small_workloads import setup
from tests.sim.test_traces import shared, words, write_lines
from tokenyard.base import ConfigError
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.formats import detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions

CACHED = {"disable_radix_cache": False, "page_size": 16}


def read(path, name, **options):
    assert detect_format(path) == name
    return read_trace(path, name, ReadOptions(**options))


def waits(workload):
    return [workload.sessions.waits_for(index) for index in range(len(workload))]


def test_mooncake_with_sessions(tmp_path):
    lines = [
        {"session_id": "a", "timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 5000, "input_length": 1024, "output_length": 3, "hash_ids": [1, 9]},
        {"session_id": "a", "delay": 2500, "input_length": 1100, "output_length": 3, "hash_ids": [1, 3, 4]},
        {"session_id": "b", "timestamp": 9000, "input_length": 1030, "output_length": 3, "hash_ids": [1, 9, 8]},
    ]
    workload = read(write_lines(tmp_path / "t.jsonl", *lines), "mooncake-sessions")
    sessions = workload.sessions
    assert workload.prompt_tokens.tolist() == [600, 1100, 1024, 1030]
    assert sessions.start_s.tolist() == [0.0, 1.0]
    assert sessions.gap_s.tolist() == [0.0, 2.5, 0.0, 4.0]
    assert waits(workload) == [[], [0], [], [2]]
    assert sessions.reusable.tolist() == [0, 512, 0, 1024]
    assert "1 turns have no delay" in workload.notes[0]
    first, _, other, _ = (workload.content.prompt_ids(i, int(workload.prompt_tokens[i])) for i in range(4))
    assert (first[:512] == other[:512]).all(), "ids are the same in all sessions"
    assert simulate(workload, setup(settings=CACHED)).served.all()


def test_llmservingsim_with_tool_times(tmp_path):
    calls = [
        {"input_toks": 100, "output_toks": 5, "tool_duration_ns": 3 * 10**9},
        {"input_toks": 180, "output_toks": 7, "tool_duration_ns": 0},
        {"input_toks": 90, "output_toks": 0, "tool_duration_ns": 0},
    ]
    lines = [
        {"session_id": "s", "arrival_time_ns": 10**9, "sub_requests": calls},
        {"input_toks": 70, "output_toks": 2, "arrival_time_ns": 4 * 10**9},
    ]
    workload = read(write_lines(tmp_path / "t.jsonl", *lines), "llmservingsim")
    assert workload.sessions.gap_s.tolist() == [0.0, 3.0, 0.0, 0.0]
    assert workload.sessions.tool.tolist() == [True, False, False, False]
    assert workload.sessions.reusable.tolist() == [0, 100, 0, 0], "a shorter prompt is a compacted context"
    assert workload.sessions.start_s.tolist() == [0.0, 3.0]
    assert workload.output_tokens.tolist() == [5, 7, 1, 2]
    assert "taken to begin with the prompt before" in workload.notes[0]


def span(begin_s, end_s, tokens, *, session="c", agent="", stop="stop"):
    return {
        "traceId": "t",
        "startTimeUnixNano": str(begin_s * 10**9),
        "endTimeUnixNano": str(end_s * 10**9),
        "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": str(tokens)}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "4"}},
            {"key": "gen_ai.conversation.id", "value": {"stringValue": session}},
            {"key": "gen_ai.agent.id", "value": {"stringValue": agent}},
            {"key": "gen_ai.response.finish_reasons", "value": {"arrayValue": {"values": [{"stringValue": stop}]}}},
        ],
    }


def test_spans_of_genai_fork_and_join_by_their_times(tmp_path):
    spans = [
        span(100, 104, 500, stop="tool_calls"),
        span(105, 120, 200, agent="x"),
        span(106, 110, 300, agent="y"),
        {"traceId": "t", "name": "execute_tool read", "attributes": []},
        span(123, 125, 800),
    ]
    line = {"resourceSpans": [{"scopeSpans": [{"spans": list(reversed(spans))}]}]}
    workload = read(write_lines(tmp_path / "t.jsonl", line), "genai-spans")
    assert waits(workload) == [[], [0], [0], [1, 2]]
    assert workload.sessions.gap_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert workload.sessions.names == ("c", "c/x", "c/y")
    assert workload.sessions.tool.tolist() == [True, False, False, False]
    assert workload.sessions.reusable.tolist() == [0, 0, 0, 500]


def test_spans_as_an_sdk_prints_them(tmp_path):
    line = {
        "context": {"trace_id": "0xab"},
        "start_time": "2026-11-20T10:00:00.5Z",
        "end_time": "2026-11-20T10:00:02Z",
        "attributes": {"gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 2},
    }
    later = {**line, "start_time": "2026-11-20T10:00:05Z", "end_time": "2026-11-20T10:00:06Z"}
    workload = read_trace(write_lines(tmp_path / "t.jsonl", line, later), "genai-spans")
    assert workload.sessions.gap_s.tolist() == [0.0, 3.0]
    assert workload.sessions.names == ("0xab",)


def logged(session, begin_s, took_s, tokens, **more):
    fields = {"session": session, "arrival_s": begin_s, "e2e_ms": 1e3 * took_s, "prompt_tokens": tokens}
    return {"logger": "tokenyard.requests", "message": "Finish", "output_tokens": 4, "index": 0, **fields, **more}


def test_the_log_of_a_server_as_sessions(tmp_path):
    """Lines are written as answers end; two calls at the same time fork."""
    lines = [
        logged("a", 100.0, 4.0, 500),
        logged("a", 105.0, 2.0, 700),
        {"logger": "tokenyard.server", "message": "Listening"},
        logged("b", 101.0, 8.0, 60),
        logged("b", 101.0, 8.0, 60, index=1),
        logged("a", 105.5, 3.0, 720),
        logged("", 106.0, 3.0, 720),
        logged("a", 109.0, 0.0, 9_000, cause="too_long"),
        logged("a", 110.0, 1.0, 900),
    ]
    workload = read_trace(write_lines(tmp_path / "t.jsonl", *lines), "tokenyard-log-sessions")
    assert workload.sessions.names == ("a", "b")
    assert waits(workload) == [[], [0], [0], [1, 2], []]
    assert workload.sessions.gap_s.tolist() == [0.0, 1.0, 1.5, 1.5, 0.0]
    assert workload.sessions.reusable.tolist() == [0, 500, 700, 720, 0]
    assert workload.sessions.start_s.tolist() == [0.0, 1.0]
    assert any(note.startswith("2 requests without a session") for note in workload.notes)


def test_agent_folders_repeat_the_answers_that_the_engine_gave(tmp_path):
    texts = ["you are an agent solve this", "fine then look", "result is seven now continue please go on"]
    for name in ("s1", "s2"):
        first, second = texts[0], f"{texts[0]} {texts[1]} {texts[2]}"
        lines = [
            {"timestamp": 1_000_000, "input": first, "output": texts[1]},
            {"timestamp": 9_000_000, "input": second, "output": "done"},
        ]
        write_lines(tmp_path / f"{name}.jsonl", *({**line, "session_id": name} for line in lines))
    workload = read_trace(tmp_path, "lmcache-agent", ReadOptions(tokenize=words))
    assert workload.sessions.gap_s.tolist() == [0.0, 8.0, 0.0, 8.0]
    known = [len(texts[0].split()), len(texts[1].split())]
    assert workload.sessions.reusable[1] == sum(known) - 1, "the last token of an answer is never an input"
    outcome = simulate(workload, setup(settings={"disable_radix_cache": False, "page_size": 1}))
    assert outcome.cached_tokens[1] == sum(known) - 1
    assert summary(outcome)["sessions"]["recomputed_tokens"] == 0


def test_the_published_agent_folder_as_closed_loops():
    pytest.importorskip("zstandard")
    path = shared("lmcache-agent/miniswe.tar.zst")
    workload = read_trace(path, "lmcache-agent", ReadOptions(tokenize=words))
    assert (len(workload), workload.sessions.count) == (402, 20)
    assert workload.sessions.reusable.sum() / workload.prompt_tokens.sum() > 0.85


def test_the_published_sessions_of_coding_agents():
    pytest.importorskip("zstandard")
    path = shared("agentic/sessions.tar.zst")
    assert detect_format(path) == "kv-cache-tester"


@pytest.mark.parametrize(
    ("name", "lines", "complaint"),
    [
        (
            "mooncake-sessions",
            [{"session_id": "a", "input_length": 600, "output_length": 1, "hash_ids": [1]}],
            "one id per",
        ),
        ("mooncake-sessions", [{"input_length": 6, "output_length": 1, "hash_ids": [1]}], "session_id is missing"),
        ("llmservingsim", [{"session_id": 1, "arrival_time_ns": 0, "sub_requests": []}], "sub_requests must be"),
        ("llmservingsim", [{"session_id": 1, "sub_requests": [{"input_toks": 0, "output_toks": 1}]}], "prompt of 0"),
        (
            "genai-spans",
            [{"attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 5}}],
            "trace id",
        ),
        ("genai-spans", [{"attributes": {}}], "holds no span"),
        ("tokenyard-log-sessions", [{"logger": "tokenyard.requests"}], "holds no logged request"),
        ("tokenyard-log-sessions", [{"logger": "tokenyard.requests", "session": "a"}], "arrival_s"),
    ],
)
def test_a_line_that_is_wrong_is_one_clear_line(tmp_path, name, lines, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_trace(write_lines(tmp_path / "bad.jsonl", *lines), name)
    assert "bad.jsonl" in caught.value.message
    assert "\n" not in caught.value.message


def test_growing_prompts_share_all_of_the_shorter_one(tmp_path):
    calls = [{"input_toks": tokens, "output_toks": 1} for tokens in (50, 90, 90, 40, 60)]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"session_id": "a", "arrival_time_ns": 0, "sub_requests": calls}) + "\n")
    workload = read_trace(path, "llmservingsim")
    prompts = [workload.content.prompt_ids(i, int(workload.prompt_tokens[i])) for i in range(5)]
    common = [int((a[: len(b)] == b[: len(a)]).sum()) for a, b in pairwise(prompts)]
    assert common == [50, 90, 0, 40]
    assert len(np.unique(np.concatenate((prompts[2], prompts[4])))) == 150
