"""From the sessions of a trace to a workload: columns, and prompts that share what the trace says they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokenyard.base import ConfigError, Int32Array, Int64Array
from tokenyard.sim.traces.conversations import Conversations, common_tokens
from tokenyard.sim.traces.prompt_ids import STREAM_TOKENS, UNIQUE_STREAM, Content, SlicedContent, TokenContent
from tokenyard.sim.traces.sessions import (
    SessionOptions,
    SessionRecord,
    Sessions,
    Turn,
    choose_sessions,
    common_blocks,
)
from tokenyard.sim.traces.workload import Workload, uniform_columns

MAX_SPREAD_TOKENS = STREAM_TOKENS << 10
"""Block ids are renumbered if they are spread over more tokens than these."""


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """The sessions that a reader found."""

    name: str
    """Of the file."""
    records: list[SessionRecord]
    """In the order of the trace."""
    block_tokens: int = 0
    """Tokens of a block of `Turn.runs`; 0 if prompts are given as `Turn.ids`."""
    shared_ids: bool = False
    """Whether equal block ids in different sessions mean equal content."""
    remarks: tuple[str, ...] = ()
    """What was left out or guessed, one sentence each."""


def session_workload(trace: SessionTrace, options: SessionOptions) -> Workload:
    """The workload of the sessions that `options` choose.

    Raises ConfigError if none is left, their start is not known, or blocks cannot be shrunk as asked for.
    """
    if options.shrink > 1:
        trace = _shrunk(trace, options.shrink)
    chosen = choose_sessions(trace.name, trace.records, options)
    columns = _Columns()
    for place, record in enumerate(chosen.records):
        columns.add(place, record, trace.block_tokens, options)
    turns = [turn for record in chosen.records for turn in record.turns]
    count = len(turns)
    base = uniform_columns(
        trace.name,
        np.zeros(count),
        np.array([turn.prompt_tokens for turn in turns], np.int32),
        np.array([turn.output_tokens for turn in turns], np.int32),
        _content(trace, chosen.records),
    )
    tenants = tuple(dict.fromkeys(["", *(record.tenant for record in chosen.records)]))
    owners = np.array([tenants.index(record.tenant) for record in chosen.records], np.int32)
    sessions = columns.sessions(chosen.start_s, options.close)
    return replace(
        base,
        tenants=tenants,
        tenant=owners[sessions.session],
        remarks=(*trace.remarks, *chosen.remarks),
        sessions=sessions,
    )


def _shrunk(trace: SessionTrace, factor: int) -> SessionTrace:
    """The same sessions with all lengths divided by `factor`. Raises ConfigError if blocks are not a multiple of it."""
    if not trace.block_tokens or trace.block_tokens % factor:
        size = f"blocks of {trace.block_tokens} tokens" if trace.block_tokens else "texts"
        raise ConfigError(f"--shrink {factor}: {trace.name} has {size}; give a factor that divides the size of blocks")
    records = [
        replace(
            record,
            turns=[
                replace(
                    turn,
                    prompt_tokens=max(turn.prompt_tokens // factor, 1),
                    output_tokens=max(turn.output_tokens // factor, 1),
                    shared=tuple((name, tokens // factor) for name, tokens in turn.shared),
                )
                for turn in record.turns
            ],
        )
        for record in trace.records
    ]
    remarks = (*trace.remarks, f"all lengths and gaps are divided by {factor}")
    return replace(trace, records=records, block_tokens=trace.block_tokens // factor, remarks=remarks)


@dataclass(slots=True)
class _Columns:
    """Collects the columns of `Sessions`, session by session."""

    names: dict[str, int] = field(default_factory=dict)
    conversation: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    tool: list[bool] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    reusable: list[int] = field(default_factory=list)

    def add(self, place: int, record: SessionRecord, block_tokens: int, options: SessionOptions) -> None:
        """Add session number `place`."""
        first, latest, turns = len(self.turn), dict[str, int](), dict[str, int]()
        for index, turn in enumerate(record.turns):
            name = f"{record.name}/{turn.agent}" if turn.agent else record.name
            earlier = [
                record.turns[one] for one in dict.fromkeys((*turn.after, latest.get(turn.agent, -1))) if one >= 0
            ]
            self.reusable.append(max((_reusable(turn, one, block_tokens) for one in earlier), default=0))
            self.conversation.append(self.names.setdefault(name, len(self.names)))
            self.turn.append(turns.get(turn.agent, 0))
            self.session.append(place)
            self.tool.append(turn.tool)
            gap_s = min(turn.gap_s, options.think_cap_s) if turn.after else turn.gap_s
            self.gap_s.append(gap_s / options.shrink)
            self.after += [first + one for one in turn.after]
            self.offsets.append(len(self.after))
            turns[turn.agent], latest[turn.agent] = self.turn[-1] + 1, index

    def sessions(self, start_s: np.ndarray, closed: bool) -> Sessions:
        """The columns so far."""
        return Sessions(
            names=tuple(self.names),
            conversation=np.array(self.conversation, np.int32),
            turn=np.array(self.turn, np.int32),
            session=np.array(self.session, np.int32),
            tool=np.array(self.tool, np.bool_),
            gap_s=np.array(self.gap_s, np.float64),
            after=np.array(self.after, np.int32),
            offsets=np.array(self.offsets, np.int64),
            reusable=np.array(self.reusable, np.int32),
            start_s=start_s,
            closed=closed,
        )


def _reusable(turn: Turn, earlier: Turn, block_tokens: int) -> int:
    """Leading tokens of a prompt that `earlier` had too, in whole blocks if both are given in blocks.

    The last token of a prompt is always computed.
    """
    longest = turn.prompt_tokens - 1
    if turn.ids is not None and earlier.ids is not None:
        # The last token of an answer is never an input, so its KV does not exist.
        before = earlier.ids if earlier.answer is None else np.concatenate((earlier.ids, earlier.answer[:-1]))
        return min(common_tokens(turn.ids, before), longest)
    if turn.runs is None or earlier.runs is None:
        return 0
    return min(common_blocks(turn.runs, earlier.runs), longest // block_tokens) * block_tokens


def _content(trace: SessionTrace, records: Sequence[SessionRecord]) -> Content:
    """The token ids of all prompts."""
    if not trace.block_tokens:
        conversations, none = Conversations(), np.zeros(0, np.int32)
        turns = [turn for record in records for turn in record.turns]
        known = [
            (none if turn.ids is None else turn.ids, none if turn.answer is None else turn.answer) for turn in turns
        ]
        return TokenContent([conversations.add(index, *texts) for index, texts in enumerate(known)])
    slices, block = _Slices(), trace.block_tokens
    if trace.shared_ids:
        slices.number_blocks([turn for record in records for turn in record.turns], block)
    for record in records:
        if not trace.shared_ids:
            slices.number_blocks(record.turns, block)
        for turn in record.turns:
            slices.add(turn, block)
    return slices.content()


class _Slices:
    """Collects the slices of `SlicedContent`, one request after the other. Streams are taken in sequence from 0."""

    def __init__(self) -> None:
        self._next_stream = 0
        self._shared: dict[str, int] = {}
        self._known: Int64Array | None = None
        self._base = 0
        self._streams: list[int] = []
        self._begins: list[int] = []
        self._lengths: list[int] = []
        self._offsets = [0]

    def number_blocks(self, turns: Sequence[Turn], block_tokens: int) -> None:
        """Give the blocks of `turns` separate numbers among the streams."""
        runs = np.concatenate([turn.runs for turn in turns if turn.runs is not None] or [np.zeros((0, 2), np.int64)])
        if not len(runs):
            return
        low, high = int(runs[:, 0].min()), int((runs[:, 0] + runs[:, 1]).max())
        self._known = None
        if (high - low) * block_tokens > MAX_SPREAD_TOKENS:
            self._known = np.unique(np.concatenate([np.arange(first, first + count) for first, count in runs]))
            low, high = 0, len(self._known)
        self._base = self._next_stream * STREAM_TOKENS - low * block_tokens
        self._next_stream += (high - low) * block_tokens // STREAM_TOKENS + 1

    def add(self, turn: Turn, block_tokens: int) -> None:
        """Add the prompt of one request: what all share, its blocks, and the rest."""
        covered = 0
        for name, tokens in turn.shared:
            if name not in self._shared:
                self._shared[name] = self._next_stream
                self._next_stream += tokens // STREAM_TOKENS + 1
            self._put(self._shared[name], 0, tokens)
            covered += tokens
        skipped, own = covered, turn.prompt_tokens
        for first, count in () if turn.runs is None else turn.runs.tolist():
            place = first if self._known is None else int(np.searchsorted(self._known, first))
            cut = min(skipped, count * block_tokens)
            skipped -= cut
            length = count * block_tokens - cut
            if length > 0:
                self._put(0, self._base + place * block_tokens + cut, length)
                covered += length
        if covered < own:
            self._put(UNIQUE_STREAM + len(self._offsets) - 1, 0, own - covered)
        self._offsets.append(len(self._streams))

    def _put(self, stream: int, begin: int, length: int) -> None:
        self._streams.append(stream)
        self._begins.append(begin)
        self._lengths.append(length)

    def content(self) -> SlicedContent:
        """The prompts so far."""
        streams, begins = np.array(self._streams, np.int64), np.array(self._begins, np.int64)
        return SlicedContent(streams, begins, _lengths(self._lengths), np.array(self._offsets, np.int64))


def _lengths(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)
