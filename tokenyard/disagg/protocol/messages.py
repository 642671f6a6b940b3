"""What prefill and decode engines say to each other, and what the two machines want done.

Token and page ids travel as raw little-endian int32. Times are in nanoseconds, of each engine's own monotonic clock;
durations are all that crosses between engines.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from tokenyard.base import Event, Int32Array, Load, SamplingParams

VERSION = 1
"""Engines of different versions do not transfer."""

NS_PER_S = 1_000_000_000
MAX_KEY_CHARS = 128


class Want(msgspec.Struct, tag=True, array_like=True):
    """Compute the KV of `prompt` (int32 bytes) and keep it for me under `key`.

    boot_id: of the engine that is asked, "" for any: a restarted one knows nothing of what it had. attach: the prompt
    comes (or came) to the prefill engine by another way, under the same key; nothing is to be computed for this.
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


class Offer(msgspec.Struct, tag=True, array_like=True):
    """The KV of the first `tokens` tokens lies in `pages` (int32 bytes) until the lease is over.

    token: the first token of the answer. ticket: opens the way to the pages over TCP. With 0 tokens nothing is held.
    """

    key: str
    boot_id: str
    tokens: int
    token: int
    pages: bytes
    ticket: bytes
    lease_ns: int


class Done(msgspec.Struct, tag=True, array_like=True):
    """From the decode side: the pages were read; were they valid until now? From the prefill side: they were."""

    key: str


class Drop(msgspec.Struct, tag=True, array_like=True):
    """The decode side needs nothing under this key any more."""

    key: str


class Beat(msgspec.Struct, tag=True, array_like=True):
    """A heartbeat. From the decode side: its open keys, whose leases it renews. From the prefill side: those of these
    keys that it knows.

    load_s: seconds of prompts that wait at the prefill side.
    slowdown: seconds that one second of prefill takes there, next to decode rows.
    """

    keys: list[str]
    load_s: float = 0.0
    slowdown: float = 1.0


class Gone(msgspec.Struct, tag=True, array_like=True):
    """The prefill side has nothing under this key, and why."""

    key: str
    why: str


Message = Want | Offer | Done | Drop | Beat | Gone


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of the protocol, in ns.

    lease_ns: how long pages are kept without a heartbeat of their reader.
    beat_ns: time between heartbeats.
    silence_ns: an engine that is silent for this long while a key is open counts as dead.
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
    """Send a message to the engine behind connection `peer`."""

    peer: int
    message: Message


@dataclass(slots=True)
class Close:
    """Give up the connection `peer`; the machine counts it as lost already."""

    peer: int
    why: str


@dataclass(slots=True)
class Prefill:
    """Submit a request for `want` under this number, with `handover`."""

    number: int
    want: Want


@dataclass(slots=True)
class Read:
    """Read KV from the engine behind `peer` into the pages of `load`, then say so by `DecodePeer.read_ended`.

    pages: int32[n], those of the other engine, one for each of `load`. first: their place in the offer.
    """

    key: str
    peer: int
    load: Load
    pages: Int32Array
    first: int
    ticket: bytes


@dataclass(slots=True)
class StopRead:
    """The read under this key is of no use any more; it should end soon."""

    key: str


Action = Send | Close | Prefill | Read | StopRead | Event
"""What a machine wants done. An `Event` is for the scheduler."""


def pack_ids(ids: Int32Array) -> bytes:
    """Ids (int32[n]) as they travel."""
    return np.ascontiguousarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """Ids (int32[n]) from what travelled. Raises ValueError for a length that is no whole number of ids."""
    return np.frombuffer(data, "<i4")
