"""Sessions: turns that are sent when those before them have ended, and the workload made of them.

Replaying a recording of sessions at its own times says nothing about a slower or faster engine: a client sends its next
turn only after the answer, its tools and its user. Readers give `SessionRecord`s; `session_workload` chooses among
them, decides when each starts and makes the columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isinf, nan

import numpy as np

from tokenyard.base import BoolArray, ConfigError, Float64Array, Int32Array, Int64Array

RAMP_S = 120.0
"""The first sessions of a closed loop start within this time, evenly drawn, so that their prefills do not coincide."""

S_PER_HOUR = 3600.0


@dataclass(slots=True)
class Turn:
    """One request of a session.

    Its prompt is given as `ids` or as `runs`. Where neither reaches its end, the rest is shared with no other turn.
    """

    prompt_tokens: int
    """Length of the prompt, at least 1."""
    output_tokens: int
    """Length of the answer, at least 1."""
    after: tuple[int, ...] = ()
    """The turns of the session, by index, after whose end it is sent. Each is before it in the list of turns."""
    gap_s: float = 0.0
    """Seconds between the end of the last of those and the sending: tools, thinking, typing. For a turn after no other
    one, seconds after the session's start."""
    agent: str = ""
    """The sub-agent whose turn it is, "" for the session's own conversation."""
    tool: bool = False
    """Whether the answer calls a tool, whose result is the next turn; otherwise a person writes next."""
    runs: Int64Array | None = None
    """int64[n, 2], the blocks of the prompt as (first id, number of ids in sequence)."""
    ids: Int32Array | None = None
    """int32[n], the token ids of the prompt."""
    answer: Int32Array | None = None
    """int32[n], the token ids of the answer, which later prompts may repeat; known only with `ids`."""
    shared: tuple[tuple[str, int], ...] = ()
    """(name, tokens): beginnings of the prompt that all prompts with that name have in common. They replace as many
    tokens of `runs`."""


@dataclass(slots=True)
class SessionRecord:
    """The turns of one session."""

    name: str
    """Unique in its trace."""
    turns: list[Turn]
    """In an order in which each turn comes after those that it waits for."""
    start_s: float | None = None
    """When it started in the recording; None if that is not known."""
    tenant: str = ""
    """The tenant that all its turns belong to."""

    @property
    def longest(self) -> int:
        """The most tokens of prompt and answer of any turn."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)

    def cut(self, context_length: int) -> "SessionRecord | None":
        """The session without the turns that are too long and those that come after them; None if no turn is left."""
        place: dict[int, int] = {}
        kept: list[Turn] = []
        for index, turn in enumerate(self.turns):
            if turn.prompt_tokens + turn.output_tokens > context_length or not all(one in place for one in turn.after):
                continue
            place[index] = len(kept)
            kept.append(replace(turn, after=tuple(place[one] for one in turn.after)))
        return SessionRecord(self.name, kept, self.start_s, self.tenant) if kept else None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Which sessions of a trace run, and when each starts."""

    concurrent: int = 0
    """So many sessions are active at any time: another one starts when one ends. 0: sessions start by time."""
    per_hour: float = 0.0
    """Sessions start by a Poisson process of this rate; 0: at their recorded times."""
    sessions: int | None = None
    """So many sessions are drawn from the trace, without replacement, in random order. None: all, in its order."""
    think_cap_s: float = inf
    """No gap between two turns is longer."""
    context_length: int | None = None
    """The most tokens of prompt and answer together; None for no limit."""
    cut_long: bool = False
    """Cut a session before its first turn that is longer than that, instead of leaving it out."""
    close: bool = False
    """Clients tell the engine when a session has ended."""
    shrink: int = 1
    """Divide all lengths, gaps and recorded starts by this, for a smaller model than the recorded one. The context
    length is that of the smaller model; `think_cap_s` applies to recorded gaps."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers out of range and for two ways to start sessions."""
        checks = (
            (self.concurrent >= 0, f"--concurrent-sessions is {self.concurrent}; it must be at least 1"),
            (self.per_hour >= 0.0, f"--sessions-per-hour is {self.per_hour}; it must be above 0"),
            (self.sessions is None or self.sessions >= 1, f"--sessions is {self.sessions}; it must be at least 1"),
            (self.shrink >= 1, f"--shrink is {self.shrink}; it must be at least 1"),
            (self.think_cap_s >= 0.0, f"--think-cap-s is {self.think_cap_s}; it must be at least 0"),
            (
                not (self.concurrent and self.per_hour),
                "sessions start by --concurrent-sessions or by --sessions-per-hour, not both",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of a workload, as columns by request or by session.

    A session's requests have consecutive numbers, in an order in which each comes after those that it waits for. A
    *conversation* is a session or one of its sub-agents: what an engine takes for a session.
    """

    names: tuple[str, ...]
    """Names of the conversations."""
    conversation: Int32Array
    """int32[n], the conversation of each request."""
    turn: Int32Array
    """int32[n], its index in the conversation."""
    session: Int32Array
    """int32[n], the session of each request, from 0, ascending."""
    tool: BoolArray
    """bool[n], whether its answer calls a tool."""
    gap_s: Float64Array
    """float64[n], see `Turn.gap_s`."""
    after: Int32Array
    """int32[m], the requests that request i waits for are `after[offsets[i] : offsets[i + 1]]`."""
    offsets: Int64Array
    """int64[n + 1]."""
    reusable: Int32Array
    """int32[n], leading prompt tokens that the session has sent before: the hit if all its KV were kept."""
    start_s: Float64Array
    """float64[sessions], when each session starts, NaN for those that start when another one ends."""
    closed: bool = False
    """Whether the engine is told when a session has ended."""

    @property
    def count(self) -> int:
        """Number of sessions."""
        return len(self.start_s)

    def waits_for(self, index: int) -> list[int]:
        """The requests after whose end request `index` is sent."""
        found: list[int] = self.after[self.offsets[index] : self.offsets[index + 1]].tolist()
        return found

    def scaled(self, rate_scale: float) -> "Sessions":
        """The same sessions starting `rate_scale` times as fast. Gaps between turns are the clients', and stay."""
        return self._with(len(self.session), self.start_s / rate_scale)

    def first(self, requests: int) -> "Sessions":
        """The sessions of the first `requests` requests; the last of them may be cut."""
        count = int(self.session[requests - 1]) + 1
        return self._with(requests, self.start_s[:count])

    def _with(self, requests: int, start_s: Float64Array) -> "Sessions":
        conversations = int(self.conversation[:requests].max()) + 1
        return Sessions(
            names=self.names[:conversations],
            conversation=self.conversation[:requests],
            turn=self.turn[:requests],
            session=self.session[:requests],
            tool=self.tool[:requests],
            gap_s=self.gap_s[:requests],
            after=self.after[: int(self.offsets[requests])],
            offsets=self.offsets[: requests + 1],
            reusable=self.reusable[:requests],
            start_s=start_s,
            closed=self.closed,
        )


def as_runs(blocks: Iterable[int]) -> Int64Array:
    """Block ids as runs of ids in sequence: int64[n, 2] of (first id, number of ids)."""
    ids = np.fromiter(blocks, np.int64)
    if not len(ids):
        return np.zeros((0, 2), np.int64)
    begins = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    return np.stack((ids[begins], np.diff(begins, append=len(ids))), axis=1)


def common_blocks(left: Int64Array, right: Int64Array) -> int:
    """How many leading blocks two prompts share, given as runs."""
    shared = place = other = used = taken = 0
    while place < len(left) and other < len(right):
        if left[place, 0] + used != right[other, 0] + taken:
            break
        step = int(min(left[place, 1] - used, right[other, 1] - taken))
        shared, used, taken = shared + step, used + step, taken + step
        if used == left[place, 1]:
            place, used = place + 1, 0
        if taken == right[other, 1]:
            other, taken = other + 1, 0
    return shared


@dataclass(slots=True)
class ChosenSessions:
    """The sessions of a trace that run, in the order in which they start."""

    records: list[SessionRecord]
    start_s: Float64Array
    """float64[sessions], NaN for those that start when another one ends."""
    remarks: list[str] = field(default_factory=list)
    """What was left out, one sentence each."""


def choose_sessions(name: str, records: Sequence[SessionRecord], options: SessionOptions) -> ChosenSessions:
    """Leave out or cut what does not fit the context, draw, and decide when each session starts.

    Raises ConfigError if no session is left, if fewer are left than are to be drawn, and if their start is not known.
    """
    fitting, remarks = _fitting(records, options)
    if not fitting:
        raise ConfigError("; ".join([f"{name}: the trace holds no session", *remarks]))
    rng = np.random.default_rng(options.seed)
    if options.sessions is not None:
        if options.sessions > len(fitting):
            left = "; ".join([f"--sessions is {options.sessions}; {name} has {len(fitting)} sessions", *remarks])
            raise ConfigError(left)
        fitting = [fitting[place] for place in rng.permutation(len(fitting))[: options.sessions].tolist()]
    count = len(fitting)
    if options.concurrent:
        starts = np.full(count, nan)
        first = min(options.concurrent, count)
        starts[:first] = np.sort(rng.uniform(0.0, RAMP_S / options.shrink, first))
        return ChosenSessions(fitting, starts, remarks)
    if options.per_hour:
        times = np.cumsum(rng.exponential(S_PER_HOUR / options.per_hour, count))
        return ChosenSessions(fitting, times - times[0], remarks)
    if any(record.start_s is None for record in fitting):
        raise ConfigError(
            f"{name} does not say when its sessions start; give --concurrent-sessions N or --sessions-per-hour R"
        )
    fitting.sort(key=lambda record: record.start_s or 0.0)
    recorded = np.array([record.start_s for record in fitting], np.float64)
    return ChosenSessions(fitting, (recorded - recorded[0]) / options.shrink, remarks)


def _fitting(records: Sequence[SessionRecord], options: SessionOptions) -> tuple[list[SessionRecord], list[str]]:
    """The sessions that fit the context, cut if that was chosen, and a sentence on the others."""
    limit = options.context_length
    if limit is None:
        return list(records), []
    long = [record for record in records if record.longest > limit]
    if not long:
        return list(records), []
    cut = {id(record): record.cut(limit) for record in long} if options.cut_long else {}
    kept = [found for record in records if (found := cut.get(id(record)) if record.longest > limit else record)]
    turns = sum(len(record.turns) for record in records) - sum(len(record.turns) for record in kept)
    whole = len(records) - len(kept)
    told = [f"{whole} of {len(records)} sessions need a context longer than {limit} tokens and are left out"]
    if options.cut_long:
        told = [
            f"{len(long) - whole} of {len(records)} sessions are cut before the first turn that needs a context longer "
            f"than {limit} tokens: {turns} turns are left out, and {whole} sessions as a whole"
        ]
    return kept, told


def check_turn(turn: Turn, where: str, max_tokens: int) -> None:
    """Raise ConfigError, naming `where`, for a length or a gap out of range."""
    if not 0 < turn.prompt_tokens < max_tokens:
        raise ConfigError(f"{where}: a prompt of {turn.prompt_tokens} tokens; it must be from 1 to {max_tokens - 1}")
    if not 0 < turn.output_tokens < max_tokens:
        raise ConfigError(f"{where}: an answer of {turn.output_tokens} tokens; it must be from 0 to {max_tokens - 1}")
    if not turn.gap_s >= 0.0 or isinf(turn.gap_s):
        raise ConfigError(f"{where}: a gap of {turn.gap_s} s before a turn; it must be at least 0")
