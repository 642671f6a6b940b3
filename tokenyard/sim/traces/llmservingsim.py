"""LLMServingSim's sessions with tool calls (github casys-kaist/LLMServingSim): one JSON line per session.

`session_id`, `arrival_time_ns` and `sub_requests`, each with `input_toks`, `output_toks` and `tool_duration_ns`, the
time between its end and the next one. A line without `sub_requests` is a session of one turn. Detected by
`arrival_time_ns` with `sub_requests`; other fields, also token ids, are not read.
"""

from pathlib import Path
from typing import Any

from tokenyard.base import NS_PER_S, ConfigError
from tokenyard.sim.traces.read_options import BadLines, ReadOptions
from tokenyard.sim.traces.recorded_calls import GUESSED_PREFIXES, GrowingPrompts
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionRecord, Turn, check_turn
from tokenyard.sim.traces.trace_files import number, read_json_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload


def read_llmservingsim(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says. Contents are guessed from the lengths."""
    bad, prompts, records = BadLines(options), GrowingPrompts(), list[SessionRecord]()
    for place, (where, record) in enumerate(read_json_lines(path)):
        name = str(record.get("session_id", f"line {place + 1}"))
        bad.take(lambda where=where, record=record, name=name: records.append(_record(record, where, name, prompts)))  # type: ignore[misc]
    if not records:
        raise ConfigError("; ".join([f"{path.name}: the trace holds no session", *bad.remarks()]))
    trace = SessionTrace(path.name, records, 1, remarks=(*bad.remarks(), GUESSED_PREFIXES))
    return session_workload(trace, options.sessions)


def _record(record: dict[str, Any], where: str, name: str, prompts: GrowingPrompts) -> SessionRecord:
    calls = record.get("sub_requests", [record])
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}: sub_requests must be a list of objects")
    turns: list[Turn] = []
    gap_s = 0.0
    for call in calls:
        tokens = whole(call, "input_toks", where)
        turn = Turn(tokens, max(whole(call, "output_toks", where), 1), gap_s=gap_s, runs=prompts.runs(name, tokens))
        turn.after = (len(turns) - 1,) if turns else ()
        check_turn(turn, where, MAX_TOKENS)
        tool_ns = number(call, "tool_duration_ns", where) if call.get("tool_duration_ns") is not None else 0.0
        turn.tool, gap_s = tool_ns > 0, tool_ns / NS_PER_S
        turns.append(turn)
    return SessionRecord(name, turns, number(record, "arrival_time_ns", where) / NS_PER_S)


LLMSERVINGSIM = TraceFormat(
    "llmservingsim", read_llmservingsim, fields=(frozenset({"arrival_time_ns", "sub_requests"}),)
)
