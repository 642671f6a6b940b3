"""The KV store of a scheduler process: which KV is stored and loaded, and for which requests.

It connects the event loop to a `BlockStore`. One thread writes what the scheduler offers (`Store`), others read what it
requests (`Load`). The event loop does not wait for them. A `Store` holds its pages until the thread has copied them. A
request with stored KV waits at its gate and then as LOADING, both for a limited time. KV that arrives late is computed.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokenyard.base import (
    NS_PER_S,
    BlockPool,
    Event,
    Executor,
    ExecutorInfo,
    Int32Array,
    KvAvailable,
    KvLoaded,
    KvMove,
    Load,
    OpenGate,
    PagesReleased,
    Request,
    Store,
    TokenBatch,
    TokenyardError,
)
from tokenyard.base.blocks import block_digests, root_digest, stored_prefix, tokens_per_block
from tokenyard.disagg.protocol.decisions import prefetch_timeout_s, should_load_kv
from tokenyard.engine.processes.engine_config import EngineConfig, KvStoreConfig
from tokenyard.engine.scheduler_process.attachments.base import Attachment, VerbHandler
from tokenyard.engine.scheduler_process.attachments.kv_store_backends import LINKS, open_pool, open_store
from tokenyard.engine.scheduler_process.attachments.kv_store_operations import (
    NEVER_NS,
    BackupOperation,
    KvStoreCounters,
    PrefetchOperation,
    WriteThrottle,
)
from tokenyard.kv_store.store import Block, BlockStore, block_buffer
from tokenyard.scheduler.row_state import Gate
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

READERS = 2
WRITE_TIMEOUT_NS = 5 * NS_PER_S
"""If writing a block takes longer, the pages of all backups are released."""
FLUSH_TIMEOUT_S = 3.5
"""Less than a scheduler process is given to end."""
SPEED_WEIGHT = 0.2
RECHECK_INTERVAL_NS, MAX_RECHECKS = NS_PER_S // 10, 8


class KvStoreConnector(Attachment):
    """The KV store of one scheduler. `deliver` sends events to it, from any thread."""

    name = "kv_store"

    def __init__(
        self,
        config: KvStoreConfig,
        store: BlockStore,
        pool: BlockPool,
        core: Core,
        info: ExecutorInfo,
        deliver: Callable[[Event], None],
        rank: int = 0,
    ) -> None:
        self.counters = KvStoreCounters()
        self._rank = rank
        self._config = config
        self._store = store
        self._pool = pool
        self._core = core
        self._info = info
        self._deliver = deliver
        self._cost = core.cost or prior_cost_model(info)
        self._block = tokens_per_block(info.page_size)
        self._per_block = self._block // info.page_size
        self._block_bytes = self._per_block * pool.page_bytes
        self._read_s_per_block = self._cost.copy(self._block_bytes, LINKS[config.backend])
        self._write_throttle = WriteThrottle(config.write_mb_s * 1e6)
        self._lock = threading.Lock()
        """Guards the fields below and the pages, which a thread may access if it holds the lock and `alive` is set."""
        self._backups: dict[int, BackupOperation] = {}
        self._prefetches: dict[int, PrefetchOperation] = {}
        self._flushing = threading.Event()
        self._to_store: queue.SimpleQueue[BackupOperation | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[Callable[[Block], None] | None] = queue.SimpleQueue()
        self._recheck_at_ns = 0
        self._writing_since_ns = 0
        self._threads = [threading.Thread(target=self._write_all, name="kv-store", daemon=True)]
        self._threads += [threading.Thread(target=self._read_all, name="kv-load", daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    # ---- calls of the event loop ----------------------------------------------------------------------------------

    def submitted(self, request: Request, now: int) -> Request:
        """Look up the KV of a request, unless it comes from another engine; returns the request, with `awaits_kv` if it
        waits for a prefetch.
        """
        options = request.logprobs
        if request.awaits_kv or (options is not None and options.prompt_from >= 0):
            return request
        cached = self._core.cached_tokens(request)
        prefetch = self._find(
            request.number, request.namespace, request.known_ids, cached, self._store.count_maybe_stored
        )
        if prefetch is None:
            return request
        if not self._should_load_kv(cached, prefetch.tokens):
            self.counters.recomputed_requests += 1
            return request
        prefetch.answers = request.sampling.n
        prefetch.deadline_ns = now + self._prefetch_timeout_ns(prefetch.tokens - cached)
        self._add_prefetch(prefetch)
        self._to_read.put(lambda block: self._prefetch(prefetch))
        return replace(request, awaits_kv=self._config.prefetch_policy != "best_effort")

    def take(self, moves: list[KvMove]) -> list[KvMove]:
        """Start the backups and loads among `moves`; returns the rest."""
        rest: list[KvMove] = []
        for one in moves:
            if isinstance(one, Store):
                self._enqueue_backup(one)
            elif isinstance(one, Load) and (job := self._prefetches.get(one.number)) is not None:
                self._load(job, one)
            else:
                rest.append(one)
        return rest

    def poll(self, now: int) -> list[Event]:
        """End what has timed out at `now` (ns): such requests are computed, and such pages are released."""
        events: list[Event] = []
        if now >= self._recheck_at_ns and self._store.blocks:
            self._recheck_at_ns = now + RECHECK_INTERVAL_NS
            events += self._recheck()
        if not (self._prefetches or self._backups):
            return events
        with self._lock:
            for job in list(self._prefetches.values()):
                if now < job.deadline_ns:
                    continue
                if job.load is not None:
                    self.counters.late_loads += 1
                    events += self._end_load(job)
                else:
                    events += self._announce(job)
            if self._writing_since_ns and now - self._writing_since_ns > WRITE_TIMEOUT_NS:
                events += self._release_all()
        return events

    def on_output(self, batch: TokenBatch) -> None:
        """Forget requests that have ended."""
        if not self._prefetches:
            return
        for finish in batch.finished:
            job = self._prefetches.get(finish.number)
            if job is None:
                continue
            with self._lock:
                for event in self._end_load(job) if job.load is not None else ():
                    self._deliver(event)
                self._prefetches.pop(finish.number, None)

    def before_flush(self, now: int) -> list[Event]:
        """Abandon all backups, so that their pages are free."""
        with self._lock:
            return self._release_all()

    def busy(self) -> bool:
        """Whether requests wait for stored KV."""
        return bool(self._prefetches)

    def held_reasons(self) -> Mapping[str, str]:
        """Requests wait for stored KV."""
        return {"kv": "until the KV store answers"}

    def verbs(self) -> Mapping[str, VerbHandler]:
        """The store can be emptied."""
        return {"clear_store": self._clear}

    def _clear(self, now: int) -> int:
        """Forget all that is stored; returns how many blocks that was."""
        blocks = self._store.blocks
        self._store.clear()
        return blocks

    def describe(self, now: int) -> Mapping[str, Any]:
        """Counters and sizes for `/v1/cache`, by rank."""
        return {"tiers": {f"rank {self._rank}": self._counters()}}

    def _counters(self) -> dict[str, Any]:
        speed = self._block_bytes / self._read_s_per_block if self._read_s_per_block else 0.0
        counters = {name: getattr(self.counters, name) for name in KvStoreCounters.__slots__}
        return {
            "backend": self._config.backend if self._config.backend != "none" else "host",
            "block_tokens": self._block,
            "blocks": self._store.blocks,
            "stored_bytes": self._store.stored_bytes,
            "storing": len(self._backups),
            "loading": len(self._prefetches),
            "read_bytes_per_s": round(speed),
            **counters,
            **self._store.counters.public(),
        }

    def close(self) -> None:
        """Store what waits for it, for a limited time, and end the threads."""
        try:
            self._flush()
        except Exception:
            logger.exception("KV could not be stored at the end")
        self._flushing.set()
        with self._lock:
            self._release_all()
            for job in self._prefetches.values():
                job.alive = False
        self._to_store.put(None)
        for _ in range(READERS):
            self._to_read.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()

    def _flush(self) -> None:
        """Store what the prefix cache holds and the store lacks, without regard to the pace."""
        ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with self._lock:
            self._deliver = ended.put
            self._write_throttle.bytes_per_s = 0.0
            self._flushing.set()
        until = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            self._core.store_whole_cache(time.monotonic_ns())
            self.take(self._core.drain_moves())
            left_s = until - time.monotonic()
            if not self._backups or left_s <= 0:
                return
            try:
                self._core.apply(ended.get(timeout=left_s), time.monotonic_ns())
            except queue.Empty:
                logger.warning("not all KV could be stored in %g s", FLUSH_TIMEOUT_S)

    # ---- storing ---------------------------------------------------------------------------------------------------

    def _enqueue_backup(self, offer: Store) -> None:
        backup = BackupOperation(offer)
        with self._lock:
            self._backups[offer.number] = backup
        self._to_store.put(backup)

    def _release_all(self) -> list[Event]:
        gone = [backup.offer.number for backup in self._backups.values()]
        for backup in self._backups.values():
            backup.alive = False
        self._backups.clear()
        return [PagesReleased(number) for number in gone]

    def _write_all(self) -> None:
        block = block_buffer(self._block_bytes)
        while (backup := self._to_store.get()) is not None:
            try:
                self._write(backup, block)
            except Exception:
                logger.exception("KV could not be stored")
            with self._lock:
                if backup.alive:
                    backup.alive = False
                    del self._backups[backup.offer.number]
                    self._deliver(PagesReleased(backup.offer.number))

    def _write(self, backup: BackupOperation, block: Block) -> None:
        """Store those blocks of an offer that the store lacks, first ones first."""
        offer, size = backup.offer, self._per_block
        digests = block_digests(offer.tokens, root_digest(offer.namespace), self._block)
        for place, digest in enumerate(digests):
            if self._store.count_stored([digest]):
                continue
            if time.monotonic_ns() < self._write_throttle.paused_until_ns or not self._write_block(
                backup, digest, place * size, block
            ):
                self.counters.dropped_blocks += len(digests) - place
                break
        self._store.touch(digests)

    def _write_block(self, backup: BackupOperation, digest: bytes, first: int, block: Block) -> bool:
        """Store one block; False if that cannot be now."""
        self._wait_for_throttle()
        with self._lock:
            if not backup.alive:
                return False
            self._pool.gather(backup.offer.pages[first : first + self._per_block], block)
            self._writing_since_ns = time.monotonic_ns()
        try:
            self._store.put(digest, block)
        except (OSError, TokenyardError) as error:
            self.counters.failed_writes += 1
            if not self._write_throttle.pause_ns:
                logger.warning("KV is not stored for now: %s", error)
            self._write_throttle.failed(time.monotonic_ns())
            return False
        finally:
            self._writing_since_ns = 0
        self._write_throttle.pause_ns = 0
        self.counters.written_bytes += self._block_bytes
        return True

    def _wait_for_throttle(self) -> None:
        """Wait until the next block may be written."""
        throttle = self._write_throttle
        if not throttle.bytes_per_s:
            return
        now = time.monotonic_ns()
        if (wait_ns := throttle.next_ns - now) > 0:
            self._flushing.wait(wait_ns / NS_PER_S)
        throttle.next_ns = max(now, throttle.next_ns) + round(self._block_bytes / throttle.bytes_per_s * NS_PER_S)

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _find(
        self, number: int, namespace: str, known: Int32Array, cached: int, count_stored: Callable[[list[bytes]], int]
    ) -> PrefetchOperation | None:
        """The stored blocks, by `count_stored`, of a request's `known` tokens beyond the first `cached`; None for less
        than a block.
        """
        found = stored_prefix(known, namespace, cached, self._block, count_stored, lambda digests: [])
        return (
            None
            if found is None
            else PrefetchOperation(number, 1, found.digests, found.first, found.found, found.tokens)
        )

    def _add_prefetch(self, prefetch: PrefetchOperation) -> None:
        self._store.touch(prefetch.digests[: prefetch.first + prefetch.found])
        with self._lock:
            self._prefetches[prefetch.number] = prefetch

    def _recheck(self) -> list[Event]:
        """Find stored KV for retracted, preempted and resumed requests whose KV was evicted meanwhile.

        They wait in the queue anyway, so no gate is closed for them.
        """
        events: list[Event] = []
        for one in self._core.requeued(MAX_RECHECKS):
            if one.number in self._prefetches:
                continue
            prefetch = self._find(one.number, one.namespace, one.known_ids, one.cached, self._store.count_stored)
            if prefetch is not None and self._should_load_kv(one.cached, prefetch.tokens):
                prefetch.announced = True
                self._add_prefetch(prefetch)
                self.counters.hit_requests += 1
                self.counters.swapped_in_requests += 1
                events.append(KvAvailable(one.number, prefetch.tokens))
        return events

    def _should_load_kv(self, cached: int, tokens: int) -> bool:
        """Whether reading the KV of tokens `cached` .. `tokens` is predicted to be faster than computing it."""
        blocks = -(-(tokens - cached) // self._block)
        return should_load_kv(self._cost, cached, tokens, blocks * self._read_s_per_block)

    def _prefetch_timeout_ns(self, tokens: int) -> int:
        """How long to wait for KV of `tokens` tokens: once until it is ready, and once until it is in its pages."""
        config = self._config
        per_1k_s = config.timeout_per_1k_tokens_s
        return round(prefetch_timeout_s(config.prefetch_policy, config.timeout_s, per_1k_s, tokens) * NS_PER_S)

    def _read_all(self) -> None:
        block = block_buffer(self._block_bytes)
        while (work := self._to_read.get()) is not None:
            try:
                work(block)
            except Exception:
                logger.exception("KV could not be read")

    def _prefetch(self, job: PrefetchOperation) -> None:
        """Have the blocks of a request ready, then say how far its KV reaches."""
        try:
            for digest in job.digests[job.first : job.first + job.found]:
                if job.announced or not self._store.prefetch(digest):
                    break
                job.ready += 1
        except OSError as error:
            logger.warning("stored KV could not be read: %s", error)
        with self._lock:
            for event in self._announce(job):
                self._deliver(event)

    def _announce(self, job: PrefetchOperation) -> list[Event]:
        """Open the gate of a request, once, for as many blocks as are ready."""
        if job.announced or self._prefetches.get(job.number) is not job:
            return []
        job.announced, job.deadline_ns = True, NEVER_NS
        tokens = min((job.first + job.ready) * self._block, job.tokens) if job.ready else 0
        if tokens:
            self.counters.hit_requests += 1
        else:
            del self._prefetches[job.number]
        others = range(job.number + 1, job.number + job.answers)
        return [KvAvailable(job.number, tokens), *(OpenGate(number, Gate.KV) for number in others)]

    def _load(self, job: PrefetchOperation, load: Load) -> None:
        now = time.monotonic_ns()
        with self._lock:
            job.load, job.alive, job.loaded_end = load, True, load.start
            job.deadline_ns = now + self._prefetch_timeout_ns(len(load.pages) * self._info.page_size)
        self._to_read.put(lambda block: self._read(job, load, block))

    def _read(self, job: PrefetchOperation, load: Load, block: Block) -> None:
        """Fill the pages of a load, block by block."""
        size, page = self._block, self._info.page_size
        start, end = load.start, load.start + len(load.pages) * page
        try:
            for place in range(start // size, -(-end // size)):
                began = time.monotonic()
                if not self._store.get(job.digests[place], block):
                    self.counters.failed_loads += 1
                    break
                begin, stop = max(start, place * size), min(end, (place + 1) * size)
                pages = load.pages[(begin - start) // page : -(-(stop - start) // page)]
                with self._lock:
                    if not job.alive:
                        return
                    self._pool.scatter(block, self._per_block, (begin - place * size) // page, pages)
                    job.loaded_end = begin + len(pages) * page
                    self.counters.loaded_bytes += len(pages) * self._pool.page_bytes
                    self.counters.loaded_tokens += len(pages) * page
                    self._read_s_per_block += SPEED_WEIGHT * (time.monotonic() - began - self._read_s_per_block)
        except OSError as error:
            self.counters.failed_loads += 1
            logger.warning("stored KV could not be read: %s", error)
        with self._lock:
            for event in self._end_load(job):
                self._deliver(event)

    def _end_load(self, job: PrefetchOperation) -> list[Event]:
        """End a load, once."""
        if not job.alive:
            return []
        job.alive = False
        self._prefetches.pop(job.number, None)
        return [KvLoaded(job.number, job.loaded_end)]


def open_kv_store_connector(
    config: EngineConfig, core: Core, executor: Executor, deliver: Callable[[Event], None], rank: int = 0
) -> KvStoreConnector | None:
    """The KV store of the settings, if enabled. Raises ConfigError for a folder or an address that cannot
    be used, and for an executor whose KV cannot be moved.
    """
    if not config.kv_store.enabled:
        return None
    pool = open_pool(executor)
    store = open_store(config, executor, pool, rank)
    return KvStoreConnector(config.kv_store, store, pool, core, executor.info, deliver, rank)
