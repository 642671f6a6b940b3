"""The input of a lookahead forecast: the scheduler's state at one moment as columns, and recent arrivals and ends.

Taking the state costs a few numpy calls, however long the queue is. It is sent to the lookahead process as msgpack,
with arrays as raw bytes.
"""

import zlib
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import ExecutorInfo, Finish, Int64Array, Request, SchedulerSettings, Slo
from tokenyard.cost import LinearCost, LinearTerms, OnlineCost
from tokenyard.policy.adaptive import CandidateScore
from tokenyard.scheduler.row_state import Gate
from tokenyard.scheduler.scheduler_state import SchedulerState, prior_cost_model

MAX_WAITING = 500
"""A longer queue is sampled to this length, spread evenly over the order of arrival."""

LOOKAHEAD_BLOCK_TOKENS = 128
COLUMNS = (
    "number",
    "state",
    "arrival_ns",
    "prompt_tokens",
    "planned",
    "known",
    "limit",
    "first_token_ns",
    "priority",
    "deadline_ns",
    "ttft_ns",
    "tpot_ns",
    "drafts",
    "acceptance_rate",
)


class RequestArrived(msgspec.Struct, array_like=True, frozen=True):
    """A request arrived. Times are in ns.

    answers: how many answers it wants.
    deadline_ns: 0 for none.
    ttft_ns: its target for the first token, 0 for none.
    tpot_ns: its target per output token, 0 for none.
    blocks: int64, a chained checksum for each whole block of `LOOKAHEAD_BLOCK_TOKENS` prompt tokens; prompts share a
        prefix as far as these agree.
    """

    number: int
    answers: int
    arrival_ns: int
    prompt_tokens: int
    max_new_tokens: int
    tenant: str
    service_class: str
    priority: int | None
    deadline_ns: int
    ttft_ns: int
    tpot_ns: int
    blocks: Int64Array

    @classmethod
    def of(cls, request: Request, now: int, *, blocks: bool) -> "RequestArrived":
        """The message for a request that arrives at `now`; without `blocks` it shares no prefix."""
        slo = request.slo or Slo()
        return cls(
            number=request.number,
            answers=request.sampling.n,
            arrival_ns=request.arrival_ns or now,
            prompt_tokens=len(request.prompt_ids),
            max_new_tokens=request.sampling.max_new_tokens,
            tenant=request.tenant,
            service_class=request.service_class or "",
            priority=request.priority,
            deadline_ns=request.deadline_ns or 0,
            ttft_ns=slo.ttft_ns or 0,
            tpot_ns=slo.tpot_ns or 0,
            blocks=block_chain(request) if blocks else np.empty(0, np.int64),
        )


class RequestEnded(msgspec.Struct, array_like=True, frozen=True):
    """A request ended after `output_tokens` output tokens; `whole` if it was not aborted."""

    number: int
    output_tokens: int
    at_ns: int
    whole: bool

    @classmethod
    def of(cls, finish: Finish) -> "RequestEnded":
        """The message for the end of a request."""
        return cls(finish.number, finish.completion_tokens, finish.finished_ns, finish.reason != "abort")


class LookaheadState(msgspec.Struct, array_like=True, frozen=True):
    """The scheduler at `now`; plans in flight count as done.

    rows: the int64[n] columns of `COLUMNS` for all that run, and at most `MAX_WAITING` of those that wait and are not
        held back.
    cached_tokens: KV in the tree that no request holds, in tokens.
    new_token_ratio: the headroom's ratio, 0 if it has none.
    terms: the terms of the cost model.
    """

    now: int
    settings: SchedulerSettings
    info: ExecutorInfo
    terms: LinearTerms
    rows: dict[str, Int64Array]
    cached_tokens: int
    new_token_ratio: float


class LookaheadQuery(msgspec.Struct, array_like=True, frozen=True):
    """Forecast `horizon_s` from `state` under each candidate. Equal numbers draw equal random futures."""

    number: int
    candidates: list[str]
    horizon_s: float
    state: LookaheadState


class LookaheadReply(msgspec.Struct, array_like=True, frozen=True):
    """The requested scores, and the seconds of CPU time since the last reply."""

    number: int
    scores: list[CandidateScore]
    cpu_s: float


Message = RequestArrived | RequestEnded | LookaheadQuery
_MESSAGES: tuple[type, ...] = (RequestArrived, RequestEnded, LookaheadQuery)


def take_lookahead_state(state: SchedulerState, now: int) -> LookaheadState:
    """The state at `now`."""
    table, waiting = state.table, state.waiting.rows
    waiting = waiting[(table.gates[waiting] & ~Gate.GROUP) == 0]
    if len(waiting) > MAX_WAITING:
        waiting = waiting[np.linspace(0, len(waiting) - 1, MAX_WAITING).astype(np.int64)]
    rows = np.concatenate((state.admitted_rows(), waiting))
    return LookaheadState(
        now=now,
        settings=state.settings,
        info=state.info,
        terms=_terms(state),
        rows={name: getattr(table, name)[rows].astype(np.int64) for name in COLUMNS},
        cached_tokens=state.memory.tree.evictable_pages * state.memory.page_size,
        new_token_ratio=state.policy.headroom.ratio,
    )


def _terms(state: SchedulerState) -> LinearTerms:
    cost = state.cost
    return cost.terms if isinstance(cost, LinearCost | OnlineCost) else prior_cost_model(state.info).terms


def block_chain(request: Request) -> Int64Array:
    """Checksums (CRC-32) of the prompt up to the end of each whole block, int64[prompt tokens //
    LOOKAHEAD_BLOCK_TOKENS].
    """
    data, size = memoryview(request.prompt_ids.tobytes()), request.prompt_ids.itemsize * LOOKAHEAD_BLOCK_TOKENS
    chain, checksum = [], zlib.crc32(request.namespace.encode())
    for end in range(size, len(data) + 1, size):
        checksum = zlib.crc32(data[end - size : end], checksum)
        chain.append(checksum)
    return np.array(chain, np.int64)


def encode(message: Message | LookaheadReply) -> bytes:
    """A message as bytes. Messages to the lookahead process begin with a byte for their kind."""
    body = _ENCODER.encode(message)
    return body if isinstance(message, LookaheadReply) else bytes([_MESSAGES.index(type(message))]) + body


def decode(data: bytes) -> Message:
    """The message in `data`. Raises ValueError for anything else."""
    if not data or data[0] >= len(_MESSAGES):
        raise ValueError("not a message to the lookahead process")
    found: Message = _read(_DECODERS[data[0]], memoryview(data)[1:])
    return found


def decode_reply(data: bytes) -> LookaheadReply:
    """The answer in `data`. Raises ValueError for anything else."""
    found: LookaheadReply = _read(_REPLIES, data)
    return found


def _read(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise ValueError("the message is nested too deeply") from error


def _encode_array(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"a lookahead message cannot hold a {type(value).__name__}")


def _decode_array(wanted: Any, value: Any) -> Int64Array:
    return np.frombuffer(value, np.int64)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(cls, dec_hook=_decode_array) for cls in _MESSAGES
]
_REPLIES = msgspec.msgpack.Decoder(LookaheadReply)
