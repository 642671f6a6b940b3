"""Sessions of coding agents as kv-cache-tester (callanjfox/kv-cache-tester, also Weka's) records them.

A folder or tar archive of JSON files, one session each: `id`, `block_size`, `hash_id_scope`, `tool_tokens`,
`system_tokens` and `requests`. A request has `in` and `out` (tokens), `hash_ids` (one per whole block of the prompt),
`think_time` (seconds that the client took since the answer before), `stop`, `model`, `t` and `api_time`. An entry of
type `subagent` has `duration_ms` and its own `requests`; it runs between the request before it and the one after it.
Detected by `hash_id_scope` at the beginning of the first file of a folder or archive. Other fields, such as `models`,
are not read.
"""

from pathlib import Path

import msgspec

from tokenyard.base import ConfigError
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.sim.traces.read_options import BadLines, ReadOptions
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionRecord, Turn, as_runs, check_turn
from tokenyard.sim.traces.trace_files import read_members
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload

BLOCK_TOKENS = 64
SCOPES = ("local", "global")
TOOL_STOPS = ("tool_use", "tool_calls")


class _Request(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """One entry of `requests`; times in seconds."""

    type: str
    t: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hash_ids: list[int] = []
    stop: str | None = None
    model: str = ""
    think_time: float | None = None
    api_time: float | None = None
    agent_id: str = ""
    duration_ms: float | None = None
    tool_tokens: int = 0
    system_tokens: int = 0
    requests: list["_Request"] = []


class _Session(msgspec.Struct):
    """One file."""

    id: str
    requests: list[_Request]
    block_size: int = BLOCK_TOKENS
    hash_id_scope: str = "local"
    tool_tokens: int = 0
    system_tokens: int = 0


def read_kv_cache_tester(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says.

    With `share_system_prompt` the tools and the system prompt of all sessions of a model with as many tokens of tools
    are the same; the ids of the files say nothing about that.
    """
    decoder, bad = msgspec.json.Decoder(_Session), BadLines(options, "sessions")
    records: list[SessionRecord] = []
    forms: set[tuple[int, str]] = set()

    def take(where: str, raw: bytes) -> None:
        try:
            session = decoder.decode(raw)
        except DECODE_ERRORS as error:
            raise ConfigError(f"{where}: no session of kv-cache-tester: {error}") from None
        record = _record(session, where, options.share_system_prompt)
        if not session.block_size > 0 or session.hash_id_scope not in SCOPES:
            raise ConfigError(f"{where}: block_size must be above 0, and hash_id_scope one of {', '.join(SCOPES)}")
        if forms and forms != {(session.block_size, session.hash_id_scope)}:
            raise ConfigError(f"{where}: block_size and hash_id_scope differ from those of the files before")
        forms.add((session.block_size, session.hash_id_scope))
        records.append(record)

    for where, raw in read_members(path, ".json"):
        bad.take(lambda where=where, raw=raw: take(where, raw))  # type: ignore[misc]
    if not records:
        raise ConfigError("; ".join([f"{path.name} holds no session (*.json)", *bad.remarks()]))
    ((block_tokens, scope),) = forms
    trace = SessionTrace(path.name, records, block_tokens, scope == "global", tuple(bad.remarks()))
    return session_workload(trace, options.sessions)


def _record(session: _Session, where: str, share: bool) -> SessionRecord:
    """The turns of a session. Sub-agents fork from the turn before them; the turn after them waits for their ends."""
    turns: list[Turn] = []
    latest: int | None = None
    ended_s = 0.0
    running: list[int] = []
    took_s = 0.0
    prefix = (session.tool_tokens, session.system_tokens)
    for number, entry in enumerate(session.requests):
        if entry.type == "subagent":
            duration_s = (entry.duration_ms or 0.0) / 1e3
            # `t` is the time of its end; where it is that of its start, the pause before it is taken as none.
            pause_s = max(entry.t - duration_s - ended_s, 0.0)
            forked = () if latest is None else (latest,)
            agent = entry.agent_id or f"subagent_{number}"
            last = _add_agent(turns, entry, agent, forked, pause_s, where, share)
            if last is not None:
                running.append(last)
                took_s = max(took_s, pause_s + duration_s)
            continue
        after = () if latest is None else (latest, *running)
        turn = _turn(entry, after, max((entry.think_time or 0.0) - took_s, 0.0), prefix, share)
        check_turn(turn, f"{where}, request {number}", MAX_TOKENS)
        latest, ended_s = len(turns), entry.t + (entry.api_time or 0.0)
        turns.append(turn)
        running, took_s = [], 0.0
    if not turns:
        raise ConfigError(f"{where}: the session holds no request")
    return SessionRecord(session.id, turns)


def _add_agent(
    turns: list[Turn],
    entry: _Request,
    agent: str,
    forked: tuple[int, ...],
    pause_s: float,
    where: str,
    share: bool,
) -> int | None:
    """Add the turns of a sub-agent, and return the index of its last one; None if it has none."""
    after, gap_s = forked, pause_s
    for number, request in enumerate(entry.requests):
        gap_s = gap_s if number == 0 else request.think_time or 0.0
        turn = _turn(request, after, gap_s, (entry.tool_tokens, entry.system_tokens), share)
        turn.agent = agent
        check_turn(turn, f"{where}, {agent}, request {number}", MAX_TOKENS)
        after = (len(turns),)
        turns.append(turn)
    return after[0] if entry.requests else None


def _turn(request: _Request, after: tuple[int, ...], gap_s: float, prefix: tuple[int, int], share: bool) -> Turn:
    tools, system = prefix
    shared: tuple[tuple[str, int], ...] = ()
    if share and tools + system < request.prompt_tokens:
        names = (f"tools of {request.model}", f"system prompt of {request.model} after {tools}")
        shared = tuple((name, tokens) for name, tokens in zip(names, prefix, strict=True) if tokens > 0)
    return Turn(
        prompt_tokens=request.prompt_tokens,
        output_tokens=max(request.output_tokens, 1),
        after=after,
        gap_s=gap_s,
        tool=request.stop in TOOL_STOPS,
        runs=as_runs(request.hash_ids),
        shared=shared,
    )


KV_CACHE_TESTER = TraceFormat("kv-cache-tester", read_kv_cache_tester, members=".json", member_head=b'"hash_id_scope"')
"""The fields of a session come before its requests, so the head of a file has them."""
