"""The format of a tape: every input of a scheduler with its time, and a digest of every plan.

A file begins with the line `tokenyard tape 2`, then the header, then records. Header and records are msgpack, each
after its length (uint32, little-endian); a record's length is followed by its kind (one byte) and its time (int64 ns).
A tape that is cut off within its last record is valid up to that record.

Version 2 has no HTTP status in `Cancel` any more; that of version 1 is ignored, as the cause has the same information.
Version 3 has `KvAvailable`, `KvLoaded` and `PagesReleased`; since version 4 a `KvAvailable` may have a token. Version 8
has sessions (`Request.session`, `TurnEnded`, `SessionEnded`), `Request.age_ns` and `WeightsUpdated`. A plan's digest
covers its `state_copies`, `state_saves` and `state_pages` if it has any.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import (
    Cancel,
    ConfigError,
    CostModel,
    Event,
    ExecutorInfo,
    Flush,
    Int32Array,
    KvAvailable,
    KvLoaded,
    LogprobOptions,
    OpenGate,
    PagesReleased,
    Pause,
    RanksRemaining,
    Resume,
    SchedulerSettings,
    SessionEnded,
    SetPolicy,
    StepPlan,
    StepResult,
    StopFound,
    Submit,
    TenantUsage,
    TurnEnded,
    UnloadAdapter,
    Update,
    WeightsUpdated,
)
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.cost import LinearCost, OnlineCost, StepTable, TableCost
from tokenyard.scheduler.scheduler import Scheduler
from tokenyard.tape.anonymizer import Anonymizer

VERSION = 8
READABLE = (1, 2, 3, 4, 5, 6, 7, 8)
MAGIC = re.compile(rb"tokenyard tape (\d{1,9})\n")
DIGEST_BYTES = 16
_FRAME = struct.Struct("<IBq")
_LENGTH = struct.Struct("<I")
_PLAN_HEAD = struct.Struct("<qqqq?")


class Planned(msgspec.Struct, array_like=True, frozen=True):
    """`plan` was called. All fields but the digest are empty if there was nothing to do.

    digest: of the plan's bytes; empty if the call raised.
    """

    digest: bytes = b""
    step: int = -1
    rows: int = 0
    decode_rows: int = 0
    tokens: int = 0


class Committed(msgspec.Struct, array_like=True, frozen=True):
    """`commit` was called with this result; columns are raw int32, `ended` raw bool."""

    step: int
    seconds: float
    tokens: bytes
    accepted: bytes | None = None
    drafted: bytes | None = None
    ended: bytes | None = None
    chances: bytes | None = None

    def result(self) -> StepResult:
        """The result as the scheduler takes it."""
        return StepResult(
            self.step,
            np.frombuffer(self.tokens, np.int32),
            self.seconds,
            accepted=None if self.accepted is None else np.frombuffer(self.accepted, np.int32),
            drafted=None if self.drafted is None else np.frombuffer(self.drafted, np.int32),
            chances=None if self.chances is None else np.frombuffer(self.chances, np.int32),
            ended=None if self.ended is None else np.frombuffer(self.ended, np.bool_),
        )


class Idled(msgspec.Struct, array_like=True, frozen=True):
    """`idle` was called."""


class Raised(msgspec.Struct, array_like=True, frozen=True):
    """The previous call raised an exception."""

    error: str


NO_PLAN = b"none"
"""The digest of a call of `plan` that found nothing to do."""

Body = Event | Planned | Committed | Idled | Raised
KINDS: tuple[type, ...] = (
    Submit,
    Cancel,
    Update,
    Pause,
    Resume,
    StopFound,
    OpenGate,
    SetPolicy,
    Flush,
    Planned,
    Committed,
    Idled,
    Raised,
    KvAvailable,
    KvLoaded,
    PagesReleased,
    TenantUsage,
    UnloadAdapter,
    RanksRemaining,
    TurnEnded,
    SessionEnded,
    WeightsUpdated,
)
"""The kind of a record is its place here; new kinds go to the end and raise VERSION."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a scheduler starts from.

    prior: its first cost model, which it corrects if it `learns`.
    table: on a tape, the tables of a prior that is a `TableCost`; `prior` has the rest of it.
    """

    settings: SchedulerSettings
    info: ExecutorInfo
    prior: LinearCost | None = None
    learns: bool = True
    table: StepTable | None = None

    def recorded(self, settings: SchedulerSettings, info: ExecutorInfo) -> "Origin":
        """The same as data for a tape, with anonymized `settings` and `info`."""
        if not isinstance(self.prior, TableCost):
            return Origin(settings, info, self.prior, self.learns)
        rest = LinearCost(self.prior.terms, self.prior.links)
        return Origin(settings, info, rest, self.learns, self.prior.table)

    def scheduler(self) -> Scheduler:
        """A fresh scheduler. Raises ConfigError for settings that contradict each other or an unknown policy."""
        cost: CostModel | None = self.prior
        if self.prior is not None and self.table is not None:
            cost = TableCost(terms=self.prior.terms, links=self.prior.links, table=self.table)
        if self.prior is not None and self.learns:
            cost = OnlineCost(self.prior)
        return Scheduler(self.settings, self.info, cost)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a tape.

    origin: what the scheduler starts from, anonymized like everything else.
    written_by: the version of Tokenyard.
    anonymized: whether ids and names are anonymized.
    """

    origin: Origin
    written_by: str
    anonymized: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One call of the scheduler at time `now` (ns), or the error of the call before."""

    now: int
    body: Body


class TapeEncoder:
    """Turns calls into the bytes of a tape."""

    def __init__(self, anonymizer: Anonymizer) -> None:
        self._anonymizer = anonymizer
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._kinds = {cls: kind for kind, cls in enumerate(KINDS)}

    def header(self, header: Header) -> bytes:
        """The beginning of a tape."""
        body = self._encoder.encode(header)
        return b"tokenyard tape %d\n" % VERSION + _LENGTH.pack(len(body)) + body

    def record(self, now: int, body: Body) -> bytes:
        """One record whose body is anonymized already."""
        data = self._encoder.encode(body)
        return _FRAME.pack(len(data), self._kinds[type(body)], now) + data

    def event(self, now: int, event: Event) -> bytes:
        """An event that the scheduler is about to apply."""
        return self.record(now, self._anonymizer.event(event))

    def planned(self, now: int, plan: StepPlan | None) -> bytes:
        """A plan that was made, None for nothing to do."""
        return self.record(now, plan_summary(plan, self._anonymizer))

    def committed(self, now: int, result: StepResult) -> bytes:
        """A result that the scheduler is about to commit."""
        tokens = self._anonymizer.ids(result.tokens).tobytes()
        columns = (result.accepted, result.drafted, result.ended, result.chances)
        optional = [None if column is None else column.tobytes() for column in columns]
        return self.record(now, Committed(result.step, result.seconds, tokens, *optional))


def plan_summary(plan: StepPlan | None, anonymizer: Anonymizer) -> Planned:
    """The record of a plan: a digest of its columns and row starts, ids anonymized, and a few sizes."""
    if plan is None:
        return Planned(NO_PLAN)
    digest, sizes = blake2b(digest_size=DIGEST_BYTES), (plan.decode_rows, len(plan.pool_rows), len(plan.page_ids))
    digest.update(_PLAN_HEAD.pack(plan.step, *sizes, plan.delay_sampling))
    columns = (plan.pool_rows, plan.epochs, plan.starts, plan.counts, plan.sampled, anonymizer.ids(plan.tokens))
    for column in (*columns, plan.page_rows, plan.page_columns, plan.page_ids):
        digest.update(np.ascontiguousarray(column).data)
    if plan.verify_rows:
        digest.update(np.int64(plan.verify_rows).tobytes())
        digest.update(np.ascontiguousarray(plan.samples).data)
    if len(plan.window_ids):
        digest.update(np.ascontiguousarray(plan.window_ids).data)
    if len(plan.state_copies):
        digest.update(np.ascontiguousarray(plan.state_copies).data)
    if len(plan.state_saves):
        digest.update(np.ascontiguousarray(plan.state_saves).data)
    if len(plan.state_pages):
        digest.update(np.ascontiguousarray(plan.state_pages).data)
    for start in plan.row_starts:
        logprobs = _shown_logprobs(start.logprobs)
        facts = (start.pool_row, start.prompt_tokens, anonymizer.sampling(start.sampling), logprobs)
        digest.update(msgspec.msgpack.encode(facts))
        digest.update(np.ascontiguousarray(anonymizer.ids(start.known_ids)).data)
    return Planned(digest.digest(), plan.step, len(plan.pool_rows), plan.decode_rows, len(plan.tokens))


def _shown_logprobs(options: LogprobOptions | None) -> dict[str, int] | None:
    """What a plan's digest holds of log-probabilities: all but the tokens that a client names."""
    if options is None:
        return None
    return {"output": options.output, "top": options.top, "prompt_from": options.prompt_from}


class Tape:
    """A tape to read. `name` is for error messages."""

    def __init__(self, data: bytes, name: str) -> None:
        """Read the header. Raises ConfigError for a file that is no tape, another version, or a truncated header."""
        self.name = name
        self._data = data
        match = MAGIC.match(data)
        if match is None:
            raise ConfigError(f"{name} is not a tape: it does not begin with `tokenyard tape`")
        if int(match[1]) not in READABLE:
            versions = f"versions {READABLE[0]} to {READABLE[-1]}"
            raise ConfigError(f"{name} is a tape of version {int(match[1])}; this Tokenyard reads {versions}")
        body = self._header_bytes(match.end())
        try:
            self.header = msgspec.msgpack.decode(body, type=Header)
            unknown = unknown_fields(msgspec.msgpack.decode(body), msgspec.to_builtins(self.header))
        except (*DECODE_ERRORS, ConfigError) as error:
            raise ConfigError(f"{name}: the tape's header does not decode: {error}") from None
        if unknown:
            names = ", ".join(unknown)
            raise ConfigError(f"{name}: this Tokenyard does not know the tape's {names}; another version wrote it")
        self.truncated_bytes = len(data) - self._end_of_last_record()

    def _header_bytes(self, begin: int) -> bytes:
        length_end = begin + _LENGTH.size
        if length_end <= len(self._data):
            self._begin: int = length_end + _LENGTH.unpack_from(self._data, begin)[0]
            if self._begin <= len(self._data):
                return self._data[length_end : self._begin]
        raise ConfigError(f"{self.name} is cut off within the header; there is nothing to replay")

    def _end_of_last_record(self) -> int:
        end = self._begin
        for frame in self._frames():
            end = frame[3]
        return end

    def _frames(self) -> Iterator[tuple[int, int, int, int]]:
        """Kind, time, begin and end of the body of each whole record."""
        place, size = self._begin, len(self._data)
        while place + _FRAME.size <= size:
            length, kind, now = _FRAME.unpack_from(self._data, place)
            begin = place + _FRAME.size
            place = begin + length
            if place > size:
                return
            yield kind, now, begin, place

    def records(self) -> Iterator[Record]:
        """All whole records. Raises ConfigError, with the byte offset, for one that does not decode."""
        decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(cls, dec_hook=_decode_array) for cls in KINDS
        ]
        view = memoryview(self._data)
        for kind, now, begin, end in self._frames():
            try:
                body = decoders[kind].decode(view[begin:end])
            except (*DECODE_ERRORS, IndexError, ValueError) as error:
                raise ConfigError(f"{self.name}: the record at byte {begin} does not decode: {error}") from None
            yield Record(now, body)


def unknown_fields(found: Any, known: Any, path: str = "") -> list[str]:
    """The paths of fields in `found` (the decoded file) that `known` (the object made from it) does not have."""
    if isinstance(found, dict) and isinstance(known, dict):
        lost = [f"{path}{name}" for name in found if name not in known]
        for name in found.keys() & known.keys():
            lost += unknown_fields(found[name], known[name], f"{path}{name}.")
        return sorted(lost)
    if isinstance(found, list) and isinstance(known, list | tuple):
        return [deeper for one, other in zip(found, known, strict=False) for deeper in unknown_fields(one, other, path)]
    return []


def _encode_array(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.int32, copy=False).tobytes()
    raise NotImplementedError(f"a tape cannot hold a {type(value).__name__}")


def _decode_array(wanted: Any, value: Any) -> Int32Array:
    return np.frombuffer(value, np.int32)
