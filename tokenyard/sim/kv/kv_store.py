"""The KV store of one simulated scheduler: the machine of the engine's (`kv_store.machine`) in virtual time.

Blocks are digests without data. Reads and writes of the disk and copies between host memory and the device take their
turns in one channel each.
"""

from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from typing import Protocol

from tokenyard.base import NS_PER_S, Event, ExecutorInfo, Int32Array, KvMove, Load, Request, Store
from tokenyard.base.blocks import (
    StoredPrefix,
    block_digests,
    root_digest,
    state_digests,
    stored_prefix,
    tokens_per_block,
)
from tokenyard.cost import LinearCost
from tokenyard.kv_store.machine import (
    NEVER_NS,
    Apply,
    BlockSizes,
    Cancel,
    Discard,
    Ended,
    Find,
    Gather,
    Gathered,
    KvStoreAction,
    KvStoreEvent,
    KvStoreMachine,
    Prefetch,
    Prefetched,
    Read,
    ReadEnded,
    Requeued,
    Submitted,
    Tick,
    Write,
    Wrote,
)
from tokenyard.scheduler import Gate
from tokenyard.sim.kv.block_store import At, ChannelJob, IoChannel, SimBlockStore, block_ns
from tokenyard.sim.kv.disagg_settings import GB, KvStoreSettings
from tokenyard.tape.recorder import Core


class ApplyEvent(Protocol):
    """Applies an event to the scheduler."""

    def __call__(self, event: Event, now: int) -> None:
        """Apply `event` at `now` (ns)."""


@dataclass(slots=True)
class KvStoreTotals:
    """Totals of a KV store at the end of a simulation."""

    stored: int = 0
    """Tokens that were stored: on disk if there is one, else in host memory. A block of recurrent states counts as one
    of KV."""
    loaded: int = 0
    """Tokens whose KV was loaded."""
    loaded_from_disk: int = 0
    """Tokens that were read from the disk for that."""
    hit: int = 0
    """Requests for which stored KV was found and ready in time."""
    recomputed: int = 0
    """Requests whose stored KV was predicted to be computed faster than loaded."""
    late: int = 0
    """Loads that were cut short by their timeout."""
    evicted: int = 0
    """Blocks that were evicted."""
    blocks: int = 0
    """Blocks that are stored at the end."""
    unstored: int = 0
    """Tokens that the prefix cache evicted before they were stored."""

    def add(self, other: "KvStoreTotals") -> None:
        """Add the totals of another scheduler."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class SimKvStore:
    """The KV store of one scheduler."""

    def __init__(
        self,
        settings: KvStoreSettings,
        core: Core,
        info: ExecutorInfo,
        cost: LinearCost,
        apply: ApplyEvent,
        at: At,
        disk: SimBlockStore | None,
    ) -> None:
        """cost: the scheduler's prior cost model. disk: blocks already on disk, from an earlier life."""
        self.alive = True
        self._core, self._apply, self._at = core, apply, at
        self._block = tokens_per_block(info.page_size)
        self._block_bytes = self._block * info.kv_bytes_per_token
        slot_bytes = 0 if info.states is None else info.states.slot_bytes
        self._state_blocks = -(-slot_bytes // self._block_bytes)
        self.disk = disk if disk is not None else SimBlockStore(int(settings.disk_gb * GB) // self._block_bytes)
        self._host = SimBlockStore(int(settings.host_gb * GB) // self._block_bytes)
        self._lowest = self.disk if settings.disk_gb else self._host
        read_bytes_s = settings.read_gb_s * GB or cost.links["disk"].bytes_per_s
        self._disk_ns = block_ns(self._block_bytes, read_bytes_s) if settings.disk_gb else 0
        self._host_ns = block_ns(self._block_bytes, cost.links["host"].bytes_per_s)
        sizes = BlockSizes(
            block_tokens=self._block,
            page_size=info.page_size,
            block_bytes=self._block_bytes,
            fast_s=self._host_ns / NS_PER_S,
            slow_s=self._disk_ns / NS_PER_S,
            stages_in_store=bool(settings.host_gb and settings.disk_gb),
            state_blocks=self._state_blocks,
        )
        self._stages_in_store = sizes.stages_in_store
        limits = settings.limits if settings.disk_gb else replace(settings.limits, write_mb_s=0.0)
        self.machine = KvStoreMachine(limits, sizes, cost, Gate.KV)
        self._reads, self._writes, self._copies = IoChannel(at), IoChannel(at), IoChannel(at)
        self._jobs: dict[int, tuple[IoChannel, ChannelJob]] = {}
        """Open jobs by op."""
        self._staged: dict[int, tuple[list[bytes], list[bytes]]] = {}
        """Gathered blocks by op, and all blocks of their prefix."""
        self._in_staging: set[bytes] = set()
        self._hashed: tuple[int, list[bytes]] = (0, [])
        """The number and the blocks of the offer that was gathered last."""
        self._ended: list[int] = []
        self._tick_ns = NEVER_NS
        self._disk_blocks_read = 0

    @property
    def busy(self) -> bool:
        """Whether requests wait for KV from the store."""
        return bool(self.machine.loading)

    # ---- calls from the simulation ---------------------------------------------------------------------------------

    def submitted(self, request: Request, now: int) -> Request:
        """Look up the KV of a request; returns the request to submit, which awaits KV if the store loads some."""
        if request.lora or request.awaits_kv:
            return request
        cached = self._core.cached_tokens(request)
        stored = self._look_up(request.namespace, request.known_ids, cached)
        if stored is None:
            return request
        self._handle(Submitted(request.number, stored, cached), now)
        return replace(request, awaits_kv=self.machine.awaits_kv(request.number))

    def take(self, moves: list[KvMove], now: int) -> list[KvMove]:
        """After a turn of the scheduler: start the stores and loads among `moves`; returns the other moves."""
        for number in self._ended:
            self._handle(Ended(number), now)
        self._ended.clear()
        rest: list[KvMove] = []
        for move in moves:
            if isinstance(move, Store) or (isinstance(move, Load) and self.machine.has_stored(move.number)):
                self._handle(move, now)
            else:
                rest.append(move)
        self._handle(Tick(), now)
        return rest

    def ended(self, number: int) -> None:
        """A request has ended. The scheduler may be in the middle of a turn, so `take` handles it."""
        if self.machine.has_stored(number):
            self._ended.append(number)

    def close(self, unstored: int) -> KvStoreTotals:
        """The totals; `unstored` tokens were evicted before they were stored."""
        counters = self.machine.counters
        return KvStoreTotals(
            stored=counters.written_bytes // self._block_bytes * self._block,
            loaded=counters.loaded_tokens,
            loaded_from_disk=self._disk_blocks_read * self._block,
            hit=counters.hit_requests,
            recomputed=counters.recomputed_requests,
            late=counters.late_loads,
            evicted=self.disk.evicted + self._host.evicted,
            blocks=len(self.disk) + len(self._host),
            unstored=unstored,
        )

    # ---- the driver ------------------------------------------------------------------------------------------------

    def _handle(self, event: KvStoreEvent, now: int) -> None:
        """Hand an event to the machine, and carry out what it says."""
        if not self.alive:
            return
        for action in self.machine.handle(event, now):
            self._carry_out(action, now)
        due_ns = self.machine.next_ns()
        if due_ns < self._tick_ns:
            self._tick_ns = due_ns
            self._at(max(due_ns, now), self._tick)

    def _tick(self, now: int) -> None:
        if now >= self._tick_ns:
            self._tick_ns = NEVER_NS
            self._handle(Tick(), now)

    def _carry_out(self, action: KvStoreAction, now: int) -> None:
        match action:
            case Apply(event):
                self._apply(event, now)
            case Find(max_requests):
                self._find(max_requests, now)
            case Prefetch():
                self._prefetch(action, now)
            case Read():
                self._read(action, now)
            case Gather():
                self._gather(action, now)
            case Write(op):
                self._write(op, now)
            case Discard(op):
                self._in_staging.difference_update(self._staged.pop(op)[0])
            case Cancel(op):
                channel, job = self._jobs[op]
                channel.cancel(job, now)

    def _add(self, channel: IoChannel, op: int, job: ChannelJob, now: int) -> None:
        self._jobs[op] = channel, job
        channel.add(job, now)

    def _answer(self, event: Prefetched | ReadEnded | Gathered | Wrote, now: int) -> None:
        del self._jobs[event.op]
        self._handle(event, now)

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def _look_up(self, namespace: str, known: Int32Array, cached: int) -> StoredPrefix | None:
        lookups = self._count_stored, self._find_slow
        return stored_prefix(known, namespace, cached, self._block, *lookups, self._state_blocks)

    def _count_stored(self, digests: list[bytes]) -> int:
        there = (digest in self._host or digest in self.disk for digest in digests)
        return sum(1 for _ in takewhile(bool, there))

    def _find_slow(self, digests: list[bytes]) -> list[int]:
        """The places of the blocks that have to be read from the disk."""
        return [place for place, digest in enumerate(digests) if digest not in self._host]

    def _find(self, max_requests: int, now: int) -> None:
        if not (len(self.disk) or len(self._host)):
            return
        for one in self._core.requeued(max_requests):
            if not self.machine.has_stored(one.number):
                stored = self._look_up(one.namespace, one.known_ids, one.cached)
                if stored is not None:
                    self._handle(Requeued(one.number, stored, one.cached), now)

    def _touch(self, digests: list[bytes]) -> None:
        self._host.touch(digests)
        self.disk.touch(digests)

    # ---- reads and writes ------------------------------------------------------------------------------------------

    def _prefetch(self, action: Prefetch, now: int) -> None:
        self._touch(action.digests)
        run = action.digests[action.first :]
        slow = self._find_slow(run)

        def done(part: float, seconds: float, at: int) -> None:
            read = int(part * len(slow))
            reached = slow[read] if read < len(slow) else len(run)
            blocks = self._count_stored(run[:reached])
            self._disk_blocks_read += read
            for place in slow[:read]:
                self._host.put(run[place])
            self._answer(Prefetched(action.op, blocks, seconds), at)

        self._add(self._reads, action.op, ChannelJob(lambda: len(slow) * self._disk_ns, done), now)

    def _read(self, action: Read, now: int) -> None:
        self._touch(action.digests)
        run, ready = action.digests[action.first :], action.ready - action.first
        blocks, slow = 0, 0

        def begins() -> int:
            nonlocal blocks, slow
            # What was prefetched is in memory, even where it was evicted since.
            blocks = ready + self._count_stored(run[ready:]) if ready > 0 else self._count_stored(run)
            slow = sum(1 for place in self._find_slow(run[:blocks]) if place >= ready)
            return blocks * self._host_ns + slow * self._disk_ns

        def done(part: float, seconds: float, at: int) -> None:
            self._disk_blocks_read += int(part * slow)
            self._answer(ReadEnded(action.op, int(part * blocks), seconds), at)

        self._add(self._copies, action.op, ChannelJob(begins, done), now)

    def _gather(self, action: Gather, now: int) -> None:
        digests = self._digests(action.offer)
        places: list[int] = []

        def begins() -> int:
            lacking = (place for place in range(action.first, len(digests)) if not self._kept(digests[place]))
            # One more than is gathered, which says where the run ends.
            places.extend(islice(lacking, action.max_blocks + 1))
            return len(self._find_slow([digests[place] for place in places[: action.max_blocks]])) * self._host_ns

        def done(part: float, seconds: float, at: int) -> None:
            began, blocks = job.began_ns >= 0, int(part * min(len(places), action.max_blocks))
            end = places[blocks] if blocks < len(places) else len(digests) if began else action.first
            gathered = [digests[place] for place in places[:blocks]]
            for digest in gathered:
                self._host.put(digest)
            self._in_staging.update(gathered)
            if gathered:
                self._staged[action.op] = gathered, digests[:end]
            self._touch(digests[:end])
            self._answer(Gathered(action.op, end, blocks), at)

        job = ChannelJob(begins, done)
        self._add(self._copies, action.op, job, now)

    def _kept(self, digest: bytes) -> bool:
        """Whether a block is where it is stored for good, or on its way there."""
        return digest in self._lowest or digest in self._in_staging

    def _digests(self, offer: Store) -> list[bytes]:
        if self._hashed[0] != offer.number:
            digests = block_digests(offer.tokens, root_digest(offer.namespace), self._block)
            if offer.state_slot >= 0:
                digests += state_digests(digests[-1], self._state_blocks)
            self._hashed = offer.number, digests
        return self._hashed[1]

    def _write(self, op: int, now: int) -> None:
        gathered, prefix = self._staged.pop(op)
        # Blocks that are staged in host memory may have been evicted from there.
        there = [digest for digest in gathered if digest in self._host or not self._stages_in_store]

        def done(part: float, seconds: float, at: int) -> None:
            for digest in there:
                self._lowest.put(digest)
            self._in_staging.difference_update(gathered)
            self._touch(prefix)
            self._answer(Wrote(op, len(there)), at)

        self._add(self._writes, op, ChannelJob(lambda: len(there) * self._disk_ns, done), now)
