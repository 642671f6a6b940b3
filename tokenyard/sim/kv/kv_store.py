"""The KV store of one simulated scheduler: what is stored and loaded, and when.

It exchanges the events of a server's KV store. The scheduler offers KV (`Store`), receives what can be loaded
(`KvAvailable`), names the pages (`Load`) and is notified when they are loaded (`KvLoaded`). Blocks are digests without
data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Protocol

from tokenyard.base import (
    NS_PER_S,
    Event,
    ExecutorInfo,
    Int32Array,
    KvAvailable,
    KvLoaded,
    KvMove,
    Load,
    PagesReleased,
    Request,
    Store,
)
from tokenyard.base.blocks import block_digests, root_digest, stored_prefix, tokens_per_block
from tokenyard.cost import LinearCost
from tokenyard.disagg.protocol.decisions import prefetch_timeout_s, should_load_kv
from tokenyard.sim.kv.block_store import NEVER_NS, At, ChannelJob, IoChannel, SimBlockStore, block_ns
from tokenyard.sim.kv.disagg_settings import GB, MB, KvStoreSettings
from tokenyard.tape.recorder import Core

LOOKUP_INTERVAL_NS, MAX_LOOKUPS = NS_PER_S // 10, 8


class Apply(Protocol):
    """Applies an event to the scheduler."""

    def __call__(self, event: Event, now: int) -> None:
        """Apply `event` at `now` (ns)."""


@dataclass(slots=True)
class KvStoreCounters:
    """Counters of a KV store, in tokens unless noted.

    hit, recomputed: requests.
    late: loads.
    evicted, blocks: blocks.
    """

    stored: int = 0
    loaded: int = 0
    loaded_from_disk: int = 0
    hit: int = 0
    recomputed: int = 0
    late: int = 0
    evicted: int = 0
    blocks: int = 0
    unstored: int = 0

    def add(self, other: "KvStoreCounters") -> None:
        """Add the counts of another scheduler."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True, eq=False)
class PendingLoad:
    """A request with KV in the store.

    first, found: blocks `first` .. `first + found` are stored.
    tokens: tokens up to which they are useful.
    ready: blocks that can be loaded without a disk read.
    notified: whether its `KvAvailable` was sent.
    """

    number: int
    digests: list[bytes]
    first: int
    found: int
    tokens: int
    ready: int = 0
    notified: bool = False
    load: Load | None = None
    job: ChannelJob | None = field(default=None)


class SimKvStore:
    """The KV store of one scheduler."""

    def __init__(
        self,
        kv_store: KvStoreSettings,
        core: Core,
        info: ExecutorInfo,
        cost: LinearCost,
        apply: Apply,
        at: At,
        disk: SimBlockStore | None,
    ) -> None:
        """cost: the scheduler's prior cost model. disk: blocks already on disk, from an earlier life."""
        self.counters = KvStoreCounters()
        self.alive = True
        self._kv_stores, self._core, self._cost, self._apply, self._at = kv_store, core, cost, apply, at
        self._page = info.page_size
        self._block = tokens_per_block(info.page_size)
        block_bytes = self._block * info.kv_bytes_per_token
        self.disk = disk if disk is not None else SimBlockStore(int(kv_store.disk_gb * GB) // block_bytes)
        self._host = SimBlockStore(int(kv_store.host_gb * GB) // block_bytes)
        read_bytes_s = kv_store.read_gb_s * GB or cost.links["disk"].bytes_per_s
        self._disk_read_ns = block_ns(block_bytes, read_bytes_s)
        self._disk_write_ns = block_ns(block_bytes, min(kv_store.write_mb_s * MB or read_bytes_s, read_bytes_s))
        self._host_ns = block_ns(block_bytes, cost.links["host"].bytes_per_s)
        self._reads, self._writes, self._copies = IoChannel(at), IoChannel(at), IoChannel(at)
        self._wanted: dict[int, PendingLoad] = {}
        self._next_lookup_ns = 0

    @property
    def busy(self) -> bool:
        """Whether requests wait for KV from the store."""
        return bool(self._wanted)

    # ---- calls from the simulation ---------------------------------------------------------------------------------

    def submitted(self, request: Request, now: int) -> Request:
        """Look up the KV of a request; returns the request to submit, which awaits KV if the store loads some."""
        if request.lora or request.awaits_kv:
            return request
        cached = self._core.cached_tokens(request)
        wanted = self._find(request.number, request.namespace, request.known_ids, cached)
        if wanted is None:
            return request
        if not self._should_load_kv(wanted, cached) and not self._cut_to_host(wanted, cached):
            self.counters.recomputed += 1
            return request
        self._take_on(wanted)
        slow = self._slow(wanted)
        until_ns = now + self._prefetch_timeout_ns(wanted.tokens - cached)
        wanted.job = ChannelJob(
            len(slow) * self._disk_read_ns,
            until_ns,
            lambda part, at: self._prefetched(wanted, slow[: int(part * len(slow))], slow, at),
        )
        self._reads.add(wanted.job, now)
        return replace(request, awaits_kv=self._kv_stores.prefetch_policy != "best_effort")

    def take(self, moves: list[KvMove], now: int) -> list[KvMove]:
        """Start the stores and loads among `moves`; returns the other moves."""
        rest: list[KvMove] = []
        for move in moves:
            if isinstance(move, Store):
                self._store(move, now)
            elif isinstance(move, Load) and (wanted := self._wanted.get(move.number)) is not None:
                self._load(wanted, move, now)
            else:
                rest.append(move)
        if now >= self._next_lookup_ns and (len(self.disk) or len(self._host)):
            self._next_lookup_ns = now + LOOKUP_INTERVAL_NS
            self._find_requeued(now)
        return rest

    def ended(self, number: int) -> None:
        """A request has ended."""
        wanted = self._wanted.pop(number, None)
        if wanted is not None and wanted.job is not None:
            wanted.job.dropped = wanted.load is None

    def close(self, unstored: int) -> KvStoreCounters:
        """The final counters; `unstored` tokens were evicted before they were stored."""
        counters = self.counters
        counters.evicted = self.disk.evicted + self._host.evicted
        counters.blocks = len(self.disk) + len(self._host)
        counters.unstored = unstored
        return counters

    # ---- storing ---------------------------------------------------------------------------------------------------

    def _store(self, offer: Store, now: int) -> None:
        digests = block_digests(offer.tokens, root_digest(offer.namespace), self._block)
        if self._kv_stores.host_gb:
            self._put(
                self._copies, self._host, self._host_ns, digests, lambda at: self._on_host(offer, digests, at), now
            )
        else:
            self._write(offer, digests, now)

    def _put(
        self,
        channel: IoChannel,
        tier: SimBlockStore,
        block_ns: int,
        digests: list[bytes],
        done: Callable[[int], None],
        now: int,
    ) -> None:
        """Queue a write of the blocks that the tier lacks when its turn comes."""
        missing: list[bytes] = []

        def begins() -> int:
            missing.extend(digest for digest in digests if digest not in tier)
            return len(missing) * block_ns

        def ended(part: float, at: int) -> None:
            for digest in digests:
                tier.put(digest)
            tier.touch(digests)
            if tier is self.disk or not self._kv_stores.disk_gb:
                self.counters.stored += len(missing) * self._block
            done(at)

        channel.add(ChannelJob(0, NEVER_NS, ended, begins), now)

    def _on_host(self, offer: Store, digests: list[bytes], now: int) -> None:
        self._release_pages(offer, now)
        if self._kv_stores.disk_gb and self.alive:
            self._write(None, digests, now)

    def _write(self, offer: Store | None, digests: list[bytes], now: int) -> None:
        def done(at: int) -> None:
            if offer is not None:
                self._release_pages(offer, at)

        self._put(self._writes, self.disk, self._disk_write_ns, digests, done, now)

    def _release_pages(self, offer: Store, now: int) -> None:
        if self.alive:
            self._apply(PagesReleased(offer.number), now)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _is_slow(self, wanted: PendingLoad, place: int) -> bool:
        """Whether a block has to be read from the disk."""
        return wanted.digests[place] not in self._host

    def _slow(self, wanted: PendingLoad) -> list[int]:
        """The blocks that have to be read from the disk."""
        return [place for place in range(wanted.first, wanted.first + wanted.found) if self._is_slow(wanted, place)]

    def _find(self, number: int, namespace: str, known: Int32Array, cached: int) -> PendingLoad | None:
        """The stored KV of a request's `known` tokens beyond the first `cached`; None for less than a block."""
        below = stored_prefix(known, namespace, cached, self._block, self._count_stored)
        return None if below is None else PendingLoad(number, below.digests, below.first, below.found, below.tokens)

    def _count_stored(self, digests: list[bytes]) -> int:
        there = (digest in self._host or digest in self.disk for digest in digests)
        return sum(1 for _ in takewhile(bool, there))

    def _should_load_kv(self, wanted: PendingLoad, cached: int) -> bool:
        """Whether loading is predicted to be faster than computing."""
        took_ns = len(self._slow(wanted)) * self._disk_read_ns + wanted.found * self._host_ns
        return should_load_kv(self._cost, cached, wanted.tokens, took_ns / NS_PER_S)

    def _cut_to_host(self, wanted: PendingLoad, cached: int) -> bool:
        """Drop the blocks on disk from the load; whether the rest is worth loading."""
        slow = self._slow(wanted)
        wanted.found = (slow[0] if slow else wanted.first + wanted.found) - wanted.first
        wanted.tokens = min((wanted.first + wanted.found) * self._block, wanted.tokens)
        return wanted.tokens - cached >= self._block and self._should_load_kv(wanted, cached)

    def _take_on(self, wanted: PendingLoad) -> None:
        used = wanted.digests[: wanted.first + wanted.found]
        self._host.touch(used)
        self.disk.touch(used)
        self.counters.hit += 1
        self._wanted[wanted.number] = wanted

    def _prefetch_timeout_ns(self, tokens: int) -> int:
        """How long (ns) a request waits for KV of `tokens` tokens: until it is ready, and then until it is in its
        pages.
        """
        kv_store = self._kv_stores
        per_1k_s = kv_store.timeout_per_1k_tokens_s
        return round(prefetch_timeout_s(kv_store.prefetch_policy, kv_store.timeout_s, per_1k_s, tokens) * NS_PER_S)

    def _prefetched(self, wanted: PendingLoad, read: list[int], slow: list[int], now: int) -> None:
        """Record which blocks (`read`) of the `slow` ones were read from disk, and report how far KV is ready."""
        if not self.alive or self._wanted.get(wanted.number) is not wanted:
            return
        reached = slow[len(read)] if len(read) < len(slow) else wanted.first + wanted.found
        wanted.ready = reached - wanted.first
        self.counters.loaded_from_disk += len(read) * self._block
        for place in read:
            self._host.put(wanted.digests[place])
        wanted.notified, wanted.job = True, None
        tokens = min(reached * self._block, wanted.tokens) if wanted.ready else 0
        if not tokens:
            del self._wanted[wanted.number]
        self._apply(KvAvailable(wanted.number, tokens), now)

    def _load(self, wanted: PendingLoad, load: Load, now: int) -> None:
        wanted.load = load
        pages = len(load.pages)
        until_ns = now + self._prefetch_timeout_ns(pages * self._page)
        begin, end = load.start // self._block, -(-(load.start + pages * self._page) // self._block)
        slow = [place for place in range(max(begin, wanted.first + wanted.ready), end) if self._is_slow(wanted, place)]
        took_ns = (end - begin) * self._host_ns + len(slow) * self._disk_read_ns
        wanted.job = ChannelJob(took_ns, until_ns, lambda part, at: self._loaded(wanted, load, int(part * pages), at))
        self._copies.add(wanted.job, now)

    def _loaded(self, wanted: PendingLoad, load: Load, pages: int, now: int) -> None:
        if not self.alive:
            return
        if self._wanted.get(wanted.number) is wanted:
            del self._wanted[wanted.number]
        self.counters.late += pages < len(load.pages)
        self.counters.loaded += pages * self._page
        self._apply(KvLoaded(load.number, load.start + pages * self._page), now)

    def _find_requeued(self, now: int) -> None:
        """Look up preempted requests: the store may have KV that was evicted from the prefix cache meanwhile."""
        for one in self._core.requeued(MAX_LOOKUPS):
            if one.number in self._wanted:
                continue
            wanted = self._find(one.number, one.namespace, one.known_ids, one.cached)
            if wanted is not None and self._should_load_kv(wanted, one.cached):
                wanted.notified = True
                self._take_on(wanted)
                self._apply(KvAvailable(one.number, wanted.tokens), now)
