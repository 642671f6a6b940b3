"""The messages between prefill and decode engines, and the actions of `DecodePeer` and `PrefillPeer`.

Token and page ids are sent as raw little-endian int32. Times are nanoseconds of each engine's monotonic clock; engines
exchange durations only.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from tokenyard.base import Event, Int32Array, Load, SamplingParams

VERSION = 2
"""Version of the protocol. Engines of different versions reject each other."""

NS_PER_S = 1_000_000_000
MAX_KEY_CHARS = 128


class Want(msgspec.Struct, tag=True, array_like=True):
    """Asks the prefill engine to compute the KV of a prompt and keep it under `key`.

    prompt: token ids as int32 bytes.
    boot_id: of the engine that is asked; "" for any. A restarted engine has none of its earlier KV.
    attach: whether the prefill engine receives the prompt as a client's request with the same key, so that this
        message computes nothing.
    weights: those that the KV must be computed by (`Request.weights`).
    """

    key: str
    prompt: bytes
    sampling: SamplingParams
    boot_id: str = ""
    attach: bool = False
    cache_salt: str = ""
    lora: str = ""
    priority: int | None = None
    service_class: str | None = None
    tenant: str = ""
    weights: str = ""


class Offer(msgspec.Struct, tag=True, array_like=True):
    """Reports that the prefill engine holds the KV of a prompt.

    tokens: how many tokens the KV covers, from the first; with 0 nothing is held.
    token: the first token of the answer.
    pages: the pages of the KV, as int32 bytes.
    ticket: authorizes reads of the pages over TCP.
    lease_ns: how long the pages are held without a heartbeat.
    weights: those that computed the KV and the token.
    state_slot: the slot with the recurrent states after those tokens; -1 for a model without.
    """

    key: str
    boot_id: str
    tokens: int
    token: int
    pages: bytes
    ticket: bytes
    lease_ns: int
    weights: str = ""
    state_slot: int = -1


class Done(msgspec.Struct, tag=True, array_like=True):
    """From the decode side: the read has ended, and asks whether the pages are still valid. From the prefill side: the
    pages were valid.
    """

    key: str


class Drop(msgspec.Struct, tag=True, array_like=True):
    """The decode side no longer needs this key."""

    key: str


class Beat(msgspec.Struct, tag=True, array_like=True):
    """A heartbeat.

    keys: from the decode side, its open keys, whose leases it renews; from the prefill side, those of them that it has.
    load_s: seconds of queued prompts at the prefill side.
    slowdown: seconds that one second of prefill takes there, together with decode rows.
    """

    keys: list[str]
    load_s: float = 0.0
    slowdown: float = 1.0


class Gone(msgspec.Struct, tag=True, array_like=True):
    """The prefill side has nothing under this key; `why` is the reason."""

    key: str
    why: str


Message = Want | Offer | Done | Drop | Beat | Gone


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of the protocol, in ns.

    lease_ns: how long pages are kept without a heartbeat from their reader.
    beat_ns: time between heartbeats.
    silence_ns: how long an engine may be silent while a key is open before it counts as dead.
    admission_ns: how long an offer may wait until the decode engine has pages for it.
    max_open: keys that a prefill engine keeps at a time.
    """

    lease_ns: int = 30 * NS_PER_S
    beat_ns: int = 1 * NS_PER_S
    silence_ns: int = 3 * NS_PER_S
    admission_ns: int = 30 * NS_PER_S
    max_open: int = 4096


@dataclass(slots=True)
class Send:
    """Send a message through connection `peer`."""

    peer: int
    message: Message


@dataclass(slots=True)
class Close:
    """Close connection `peer`, which the sender of this action already treats as lost."""

    peer: int
    why: str


@dataclass(slots=True)
class Prefill:
    """Submit a request for `want` under this number, with `handover`."""

    number: int
    want: Want


@dataclass(slots=True)
class Read:
    """Read KV through connection `peer` into the pages of `load`, and recurrent states into its slot if it has one,
    then call `DecodePeer.read_ended`.

    pages: int32[n], pages of the other engine, one for each page of `load`.
    first: index of the first of them in the offer.
    ticket: the ticket of the offer.
    state_slot: that of the other engine.
    """

    key: str
    peer: int
    load: Load
    pages: Int32Array
    first: int
    ticket: bytes
    state_slot: int = -1


@dataclass(slots=True)
class StopRead:
    """Stop the read under this key; its result is no longer needed."""

    key: str


Action = Send | Close | Prefill | Read | StopRead | Event
"""An action of a peer. An `Event` is for the scheduler."""


def pack_ids(ids: Int32Array) -> bytes:
    """Encode ids (int32[n]) as bytes."""
    return np.ascontiguousarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """Decode ids (int32[n]). Raises ValueError for a length that is not a whole number of ids."""
    return np.frombuffer(data, "<i4")
