"""The messages between the engine's processes, one tagged union per direction.

API process -> scheduler: the events of `base`, and calls. Scheduler -> text side: one `TokenBatch` a step, heartbeats
and replies, and where there are several ranks `TenantUsage`, which the API process passes on to the others. API process
-> text side: `Fence`. Text side -> API process: one `TextBatch` a step, `Fenced`, its own heartbeats and all else as it
is. Text side -> scheduler: `StopFound`.
"""

from typing import Any

import msgspec

from tokenyard.base import Event, Finish, Int32Array, Int64Array, TenantUsage, TokenBatch, TokenLogprobs

NO_REPLY = 0
"""The id of a call that expects no reply."""


class RpcRequest(msgspec.Struct):
    """Do `verb` with `arguments`, and answer in a `RpcReply` with the same id.

    `scheduler_process/driver.py` and the attachments list the verbs.
    """

    call_id: int
    verb: str
    arguments: dict[str, Any] = {}


class RpcReply(msgspec.Struct):
    """What a call returned, as plain data; `refusal` says why it was not done, "" if it was."""

    call_id: int
    value: Any = None
    refusal: str = ""


class Heartbeat(msgspec.Struct):
    """Liveness of a process, sent about every half second; in a scheduler process by a separate thread.

    sent_ns: when it was sent, by the monotonic clock. The detokenizer sets only this field.
    doing: "idle" (waiting for messages), "step" (waiting for the device), "policy" or "priority function" (running user
        code), the name of an attachment (in one of its hooks) or "host" (everything else).
    doing_ns: for how long, so that a loop that hangs on the host shows as a growing "host".
    steps: steps launched so far.
    counters: the scheduler's counters at its last refresh.
    """

    sent_ns: int
    doing: str
    doing_ns: int
    steps: int
    counters: dict[str, Any]


class TextBatch(msgspec.Struct, array_like=True):
    """The output of one step for the API process, in columns with one entry per answer with new output.

    numbers: int64[n], the answers.
    texts: n pieces of text.
    token_counts: int32[n], how many of `tokens` belong to each answer.
    tokens: int32[sum], new output tokens.
    completion_tokens: int32[n], output tokens so far.
    cached_tokens: int32[n], cached prompt tokens.
    finished: the answers that ended; some may have no entry in the columns.
    logprobs: log-probabilities of the new tokens.
    said: answers that were begun elsewhere, with their first output: the text that their clients already have.
    """

    numbers: Int64Array
    texts: list[str]
    token_counts: Int32Array
    tokens: Int32Array
    completion_tokens: Int32Array
    cached_tokens: Int32Array
    finished: list[Finish] = []
    logprobs: list[TokenLogprobs] = []
    said: list[tuple[int, str]] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (len(self.numbers) or self.finished)


class Fence(msgspec.Struct):
    """The scheduler `source` has ended: drop its further messages and report in `Fenced` how far `numbers` are."""

    source: int
    numbers: list[int]


class Fenced(msgspec.Struct):
    """No more output of the scheduler `source` follows.

    source: the number of the scheduler process.
    numbers: int64[n], those answers of the `Fence` that have begun.
    token_counts: int32[n], how many of `tokens` belong to each answer.
    tokens: int32[sum], all output tokens of these answers that the detokenizer has received.
    """

    source: int
    numbers: Int64Array
    token_counts: Int32Array
    tokens: Int32Array


ToScheduler = Event | RpcRequest
FromScheduler = TokenBatch | Heartbeat | RpcReply | TenantUsage
ToDetokenizer = FromScheduler | Fence
ToApi = TextBatch | TokenBatch | Heartbeat | RpcReply | TenantUsage | Fenced
