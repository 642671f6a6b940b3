"""Backups and prefetches of the KV store, and their counters."""

from dataclasses import dataclass

from tokenyard.base import NS_PER_S, Load, Store

MIN_BACKOFF_NS, MAX_BACKOFF_NS = NS_PER_S, 30 * NS_PER_S
"""How long nothing is written after a write has failed: the first time, and at most."""
NEVER_NS = 2**63 - 1


@dataclass(slots=True, eq=False)
class BackupOperation:
    """An offer that is being stored; `alive` while its pages may be read."""

    offer: Store
    alive: bool = True


@dataclass(slots=True, eq=False)
class PrefetchOperation:
    """A request with stored KV: blocks `first` .. `first + found` of `digests`, usable up to token `tokens`.

    ready: blocks that were prefetched.
    announced: whether its `KvAvailable` was sent.
    load: set once it has pages, which may be written while `alive`.
    loaded_end: tokens up to which KV is in its pages.
    """

    number: int
    answers: int
    digests: list[bytes]
    first: int
    found: int
    tokens: int
    deadline_ns: int = NEVER_NS
    ready: int = 0
    announced: bool = False
    load: Load | None = None
    alive: bool = False
    loaded_end: int = 0


@dataclass(slots=True)
class KvStoreCounters:
    """Totals since the start."""

    written_bytes: int = 0
    loaded_bytes: int = 0
    loaded_tokens: int = 0
    dropped_blocks: int = 0
    failed_writes: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    hit_requests: int = 0
    recomputed_requests: int = 0
    swapped_in_requests: int = 0


@dataclass(slots=True)
class WriteThrottle:
    """How fast may be written, and when again after a failure."""

    bytes_per_s: float
    next_ns: int = 0
    paused_until_ns: int = 0
    pause_ns: int = 0

    def failed(self, now: int) -> None:
        """A write has failed: pause, longer each time."""
        self.pause_ns = min(2 * self.pause_ns or MIN_BACKOFF_NS, MAX_BACKOFF_NS)
        self.paused_until_ns = now + self.pause_ns
