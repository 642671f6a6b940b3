"""The messages between the engine's processes, one tagged union per direction.

API process -> scheduler: the events of `base` and the control messages here. Scheduler -> text side: one `TokenBatch`
a step, heartbeats and replies. Text side -> API: one `TextBatch` a step, and whatever else passes through. Text side
-> scheduler: `StopFound`.
"""

from typing import Any

import msgspec

from tokenyard.base import (
    Cancel,
    Explanation,
    Finish,
    Flush,
    Int32Array,
    Int64Array,
    OpenGate,
    Pause,
    Resume,
    SetPolicy,
    StopFound,
    Submit,
    TokenBatch,
    TokenLogprobs,
    Update,
)


class FlushCache(msgspec.Struct):
    """Empty the prefix cache and say in a `FlushReply` with the same id whether it was done."""

    reply_id: int


class GetSnapshot(msgspec.Struct):
    """Answer the scheduler's counters in a `SnapshotReply` with the same id."""

    reply_id: int


class ChoosePolicy(msgspec.Struct):
    """Order the queue by another policy and say in a `PolicyReply` with the same id whether it was done."""

    reply_id: int
    name: str
    options: dict[str, float | int | str | bool] = {}


class Explain(msgspec.Struct):
    """Say in an `ExplainReply` with the same id where the time of request `number` went."""

    reply_id: int
    number: int


class Profile(msgspec.Struct):
    """Begin or end a timeline of the event loop and answer in a `ProfileReply` with the same id."""

    reply_id: int
    start: bool


class FlushReply(msgspec.Struct):
    """The cache was emptied, or was not because requests run or wait."""

    reply_id: int
    done: bool


class PolicyReply(msgspec.Struct):
    """The policy was changed, or was not, and `refusal` says why."""

    reply_id: int
    refusal: str = ""


class ExplainReply(msgspec.Struct):
    """Where the time of a request went; None for one that is not known any more."""

    reply_id: int
    explanation: Explanation | None


class ProfileReply(msgspec.Struct):
    """Whether a timeline was begun or ended; `events` are those of one that ended, as a JSON list."""

    reply_id: int
    done: bool
    events: bytes = b""


class SnapshotReply(msgspec.Struct):
    """The scheduler's counters by name."""

    reply_id: int
    counters: dict[str, Any]


class Heartbeat(msgspec.Struct):
    """Sign of life of the scheduler process, sent about every half second by a thread of its own.

    `doing` is "idle" (waiting for messages), "step" (waiting for the device) or "host" (everything else);
    `doing_ns` is for how long already, so a loop that hangs on the host shows as a growing "host". `counters` are the
    scheduler's, as they were a moment ago.
    """

    sent_ns: int
    doing: str
    doing_ns: int
    steps: int
    counters: dict[str, Any]


class TextBatch(msgspec.Struct, array_like=True):
    """What one step says to the API process, in columns with one entry per answer that has news.

    numbers: int64[n]; texts: n pieces; token_counts: int32[n], how many of `tokens` (int32[sum]) are each one's;
    completion_tokens, cached_tokens: int32[n] totals so far. `finished` may name answers without an entry.
    """

    numbers: Int64Array
    texts: list[str]
    token_counts: Int32Array
    tokens: Int32Array
    completion_tokens: Int32Array
    cached_tokens: Int32Array
    finished: list[Finish] = []
    logprobs: list[TokenLogprobs] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (len(self.numbers) or self.finished)


ToScheduler = (
    Submit
    | Cancel
    | Update
    | Pause
    | Resume
    | StopFound
    | OpenGate
    | SetPolicy
    | Flush
    | FlushCache
    | GetSnapshot
    | ChoosePolicy
    | Explain
    | Profile
)
Reply = FlushReply | SnapshotReply | PolicyReply | ExplainReply | ProfileReply
FromScheduler = TokenBatch | Heartbeat | Reply
ToApi = TextBatch | TokenBatch | Heartbeat | Reply
