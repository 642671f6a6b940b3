"""Mooncake's form with sessions, as AIPerf and Dynamo write it: one JSON line per turn.

`session_id`, `input_length` (the whole prompt), `output_length`, `hash_ids` (one per 512 tokens, the same in all
sessions), `timestamp` (ms, needed on the first turn) and `delay` (ms between the end of the turn before and this one).
Detected by `session_id` in addition to Mooncake's fields; other fields are not read.
"""

from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.traces.mooncake import HASHED_FIELDS, MS_PER_S
from tokenyard.sim.traces.prompt_fields import HASH_BLOCK_TOKENS
from tokenyard.sim.traces.read_options import BadLines, ReadOptions
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionRecord, Turn, as_runs, check_turn
from tokenyard.sim.traces.trace_files import json_object, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload


def read_mooncake_sessions(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says.

    A turn without `delay` follows the one before it after the time between their time stamps, which has the time of
    the recorded answer in it; a note says so.
    """
    bad, records = BadLines(options), dict[str, SessionRecord]()
    stamps: dict[str, float] = {}
    guessed = 0

    def take(where: str, line: str) -> None:
        nonlocal guessed
        record = json_object(line, where)
        name = _name(record, where)
        turn = _turn(record, where)
        stamp_s = number(record, "timestamp", where) / MS_PER_S if record.get("timestamp") is not None else None
        session = records.get(name)
        if session is None:
            records[name] = SessionRecord(name, [turn], stamp_s)
        else:
            turn.after = (len(session.turns) - 1,)
            if record.get("delay") is not None:
                turn.gap_s = number(record, "delay", where) / MS_PER_S
            elif stamp_s is not None and name in stamps:
                turn.gap_s, guessed = max(stamp_s - stamps[name], 0.0), guessed + 1
            else:
                raise ConfigError(f"{where}: a later turn needs delay, or a timestamp like the one before it")
            check_turn(turn, where, MAX_TOKENS)
            session.turns.append(turn)
        if stamp_s is not None:
            stamps[name] = stamp_s

    for where, line in read_lines(path):
        bad.take(lambda where=where, line=line: take(where, line))  # type: ignore[misc]
    if not records:
        raise ConfigError("; ".join([f"{path.name}: the trace holds no session", *bad.remarks()]))
    told = (
        [f"{guessed} turns have no delay: the gap before them is the time between their time stamps"] if guessed else []
    )
    remarks = (*bad.remarks(), *told)
    trace = SessionTrace(path.name, list(records.values()), HASH_BLOCK_TOKENS, True, remarks)
    return session_workload(trace, options.sessions)


def _name(record: dict[str, Any], where: str) -> str:
    name = record.get("session_id")
    if not isinstance(name, str | int) or name == "":
        raise ConfigError(f"{where}: session_id is missing; is this the right --trace-format?")
    return str(name)


def _turn(record: dict[str, Any], where: str) -> Turn:
    tokens, blocks = whole(record, "input_length", where), record.get("hash_ids")
    if not isinstance(blocks, list) or not all(isinstance(one, int) and 0 <= one < 1 << 40 for one in blocks):
        raise ConfigError(f"{where}: hash_ids must be whole numbers from 0 to 2**40 - 1")
    turn = Turn(tokens, max(whole(record, "output_length", where), 1), runs=as_runs(blocks))
    check_turn(turn, where, MAX_TOKENS)
    if len(blocks) < -(-tokens // HASH_BLOCK_TOKENS):
        raise ConfigError(f"{where}: hash_ids must hold one id per {HASH_BLOCK_TOKENS} tokens of the prompt")
    return turn


MOONCAKE_SESSIONS = TraceFormat("mooncake-sessions", read_mooncake_sessions, fields=(HASHED_FIELDS | {"session_id"},))
