"""LMCache's agent sessions (github LMCache/lmcache-agent-trace): JSON lines, one per call, a file per session.

A folder or tar archive of such files, or one of them.

`timestamp` (microseconds), `input` (the whole prompt) and `output`, as texts; `session_id`, or else the file's name.
Detected by `input`, `output` and `session_id` in the first line of the first file; other fields are not read.
"""

from pathlib import Path

import numpy as np

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import BadLines, ReadOptions
from tokenyard.sim.traces.recorded_calls import RecordedCall, sessions_of
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import Turn
from tokenyard.sim.traces.trace_files import json_object, number, read_members
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload

MICROSECONDS = 1e6
GAPS = "the gaps between turns are the times between recorded calls, which have the time of the answers in them"


def read_lmcache_agent(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says. The file's name is the tenant.

    The recording does not say when answers ended; a note says what that means for the gaps.
    """
    tokenize, bad, calls = options.tokenizer(path), BadLines(options), list[RecordedCall]()

    def take(where: str, file: str, line: str) -> None:
        record = json_object(line, where)
        prompt, answer = record.get("input"), record.get("output")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise ConfigError(f"{where}: input and output must be texts; is this the right --trace-format?")
        at_s = number(record, "timestamp", where) / MICROSECONDS
        ids, tokens = tokenize(prompt), tokenize(answer)
        turn = Turn(len(ids), max(len(tokens), 1), ids=ids, answer=tokens.astype(np.int32))
        calls.append(RecordedCall(where, str(record.get("session_id") or file), at_s, at_s, turn, file))

    for name, raw in read_members(path, ".jsonl"):
        for line_number, line in enumerate(raw.decode("utf-8-sig", "replace").split("\n"), start=1):
            if line.strip():
                where, file = f"{name}, line {line_number}", name.removesuffix(".jsonl")
                bad.take(lambda where=where, file=file, line=line: take(where, file, line))  # type: ignore[misc]
    if not calls:
        raise ConfigError("; ".join([f"{path.name}: the trace holds no session", *bad.remarks()]))
    trace = SessionTrace(path.name, sessions_of(calls), remarks=(*bad.remarks(), GAPS))
    return session_workload(trace, options.sessions)


LMCACHE_AGENT = TraceFormat(
    "lmcache-agent", read_lmcache_agent, fields=(frozenset({"input", "output", "session_id"}),), members=".jsonl"
)
