"""Sessions from the log of `tokenyard serve --log-requests --log-format json`.

Lines of the logger `REQUEST_LOGGER` with a `session` are calls; read are `session`, `arrival_s`, `e2e_ms`,
`prompt_tokens`, `output_tokens` and `index`. The log does not say what answers ended with, nor the contents of prompts.
The format is not detected: such a log is a `tokenyard-log` unless `--trace-format` says otherwise.
"""

from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import REJECTED_REASONS, BadLines, ReadOptions
from tokenyard.sim.traces.recorded_calls import GUESSED_PREFIXES, GrowingPrompts, RecordedCall, sessions_of
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import Turn
from tokenyard.sim.traces.tokenyard_form import REQUEST_LOGGER
from tokenyard.sim.traces.trace_files import json_object, name_of, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload

MS_PER_S = 1000.0


def read_log_sessions(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says.

    The log has the begin and the end of each call, so the gaps are exact, and calls at the same time fork and join.
    Contents are guessed from the lengths. Requests without a session, and those that were refused, are left out and
    counted.
    """
    bad, calls, others = BadLines(options), list[RecordedCall](), 0

    def take(where: str, record: dict[str, Any]) -> None:
        nonlocal others
        if not record.get("session") or record.get("cause") in REJECTED_REASONS:
            others += 1
        elif not record.get("index"):
            calls.append(_call(where, record))

    for where, line in read_lines(path):
        record = json_object(line, where) if line.startswith("{") else {}
        if record.get("logger") == REQUEST_LOGGER:
            bad.take(lambda where=where, record=record: take(where, record))  # type: ignore[misc]
    if not calls:
        raise ConfigError("; ".join([f"{path.name} holds no logged request with a session", *bad.remarks()]))
    prompts = GrowingPrompts()
    for call in sorted(calls, key=lambda call: call.begin_s):
        call.turn.runs = prompts.runs(call.session, call.turn.prompt_tokens)
    left_out = [f"{others} requests without a session, or refused, are left out"] if others else []
    remarks = (*bad.remarks(), *left_out, GUESSED_PREFIXES)
    return session_workload(SessionTrace(path.name, sessions_of(calls), 1, remarks=remarks), options.sessions)


def _call(where: str, record: dict[str, Any]) -> RecordedCall:
    begin_s, took_s = number(record, "arrival_s", where), number(record, "e2e_ms", where) / MS_PER_S
    turn = Turn(whole(record, "prompt_tokens", where), max(whole(record, "output_tokens", where), 1))
    tenant = name_of(record, "tenant", where)
    session = name_of(record, "session", where)
    return RecordedCall(where, f"{tenant}/{session}" if tenant else session, begin_s, begin_s + took_s, turn, tenant)


TOKENYARD_LOG_SESSIONS = TraceFormat("tokenyard-log-sessions", read_log_sessions)
