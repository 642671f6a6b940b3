"""The KV store (HiCache) of a scheduler process: threads that look for, load and store what `kv_store.machine` decides.

One thread gathers KV from the pool, one writes it to the `BlockStore`, others read. A lock guards the machine and the
state of its operations. No thread holds it during a copy or while a store is busy, so the event loop waits for neither.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tokenyard.base import (
    NS_PER_S,
    BlockPool,
    Event,
    Executor,
    ExecutorInfo,
    Int32Array,
    KvMove,
    Load,
    Request,
    StateSlots,
    Store,
    TokenBatch,
    TokenyardError,
)
from tokenyard.base.blocks import (
    StoredPrefix,
    block_digests,
    root_digest,
    state_digests,
    stored_prefix,
    tokens_per_block,
)
from tokenyard.engine.processes.engine_config import EngineConfig, KvStoreConfig
from tokenyard.engine.scheduler_process.attachments.base import Attachment, VerbHandler
from tokenyard.engine.scheduler_process.attachments.kv_store_backends import (
    LINKS,
    blocks_of_states,
    open_pool,
    open_states,
    open_store,
)
from tokenyard.kv_store.machine import (
    NEVER_NS,
    Apply,
    BlockSizes,
    Cancel,
    Closing,
    Discard,
    Ended,
    Find,
    Gather,
    Gathered,
    KvStoreCounters,
    KvStoreEvent,
    KvStoreMachine,
    Prefetch,
    Prefetched,
    Read,
    ReadEnded,
    Requeued,
    StoresDropped,
    Submitted,
    Tick,
    Write,
    Wrote,
)
from tokenyard.kv_store.store import Block, BlockStore, block_buffer
from tokenyard.scheduler.row_state import Gate
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

READERS = 2
FLUSH_TIMEOUT_S = 3.5
"""Less than a scheduler process is given to end."""
COPY_TIMEOUT_S = 1.0
"""How long a flush of the prefix cache waits for a copy from the device, and a clear of the store for its writes."""


@dataclass(slots=True, eq=False)
class Operation:
    """An op of the machine that a thread carries out."""

    action: Prefetch | Read | Gather | Write
    copying: bool = False
    """Whether a thread copies from or to pages now."""
    cancelled: bool = False
    """Whether the op was cancelled, so that no copy may begin."""
    began_s: float = 0.0
    """When its turn came; 0.0 until then."""
    blocks: int = 0
    """Blocks of the run that are done."""
    end: int = 0
    """Where a gather has come to in the offer."""
    staged: list[tuple[bytes, Block | None]] = field(default_factory=list)
    """What a gather has staged; None for a block in the store's own memory."""
    digests: list[bytes] = field(default_factory=list)
    """The names of the blocks of a gather's offer."""
    error: str = ""
    """Why a write ended early."""

    def answer(self) -> Prefetched | ReadEnded | Gathered | Wrote:
        """What the machine is told at the end."""
        action, seconds = self.action, time.monotonic() - self.began_s if self.began_s else 0.0
        match action:
            case Prefetch():
                return Prefetched(action.op, self.blocks, seconds)
            case Read():
                return ReadEnded(action.op, self.blocks, seconds)
            case Gather():
                return Gathered(action.op, max(self.end, action.first), len(self.staged))
            case Write():
                return Wrote(action.op, self.blocks, self.error)


Inbox = queue.SimpleQueue[Operation | None]
"""What a thread has to do; None ends it."""


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
        states: StateSlots | None = None,
    ) -> None:
        """states: the recurrent states, None for a model without."""
        self._config, self._store, self._pool, self._core, self._rank = config, store, pool, core, rank
        self._page = info.page_size
        self._block = tokens_per_block(info.page_size)
        self._per_block = self._block // info.page_size
        self._block_bytes = self._per_block * pool.page_bytes
        self._states, self._state_blocks = states, blocks_of_states(states, self._block_bytes)
        cost = core.cost or prior_cost_model(info)
        has_slow = bool(store.find_slow([b""]))
        sizes = BlockSizes(
            block_tokens=self._block,
            page_size=info.page_size,
            block_bytes=self._block_bytes,
            fast_s=cost.copy(self._block_bytes, LINKS["none"]),
            slow_s=cost.copy(self._block_bytes, LINKS[config.backend]) if has_slow else 0.0,
            stages_in_store=store.has_memory_in_front,
            state_blocks=self._state_blocks,
        )
        self.machine = KvStoreMachine(config.limits, sizes, cost, Gate.KV)
        self._deliver = deliver
        self._send = deliver
        """Where events for the scheduler go."""
        self._changed = threading.Condition(threading.Lock())
        """Its lock guards the machine and the fields below; notified when an op has ended."""
        self._operations: dict[int, Operation] = {}
        self._staged: dict[int, Operation] = {}
        """Gathers whose blocks are not written yet."""
        self._closed = False
        """Whether no copy may begin any more."""
        self._finds = 0
        """How many retracted requests the next poll looks up."""
        self._in_staging: set[bytes] = set()
        """Blocks that are gathered and not written yet."""
        self._free_buffers: list[Block] = []
        self._hashed: tuple[int, list[bytes]] = (0, [])
        """The number of the last offer that was gathered, and the names of its blocks. Of the gathering thread."""
        self._failing = False
        """Whether the last write has failed. Of the writing thread."""
        self._to_gather, self._to_write, self._to_read = Inbox(), Inbox(), Inbox()
        self._threads: list[tuple[threading.Thread, Inbox]] = []
        for name, inbox in (
            ("kv-gather", self._to_gather),
            ("kv-write", self._to_write),
            *(("kv-read", self._to_read) for _ in range(READERS)),
        ):
            self._threads.append((threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True), inbox))
        for thread, _ in self._threads:
            thread.start()

    @property
    def counters(self) -> KvStoreCounters:
        """Totals since the start."""
        return self.machine.counters

    # ---- hooks of the event loop ----------------------------------------------------------------------------------

    def submitted(self, request: Request, now: int) -> Request:
        """Look up the KV of a request; returns the request, with `awaits_kv` if it waits for a prefetch."""
        options = request.logprobs
        if request.awaits_kv or (options is not None and options.prompt_from >= 0):
            return request
        cached, maybe = self._core.cached_tokens(request), self._store.count_maybe_stored
        stored = self._look_up(request.namespace, request.known_ids, cached, maybe)
        if stored is None:
            return request
        with self._changed:
            self._handle(Submitted(request.number, stored, cached, request.sampling.n))
            awaits_kv = self.machine.awaits_kv(request.number)
        return replace(request, awaits_kv=awaits_kv)

    def take(self, moves: list[KvMove]) -> list[KvMove]:
        """Start the stores and loads among `moves`; returns the rest."""
        rest: list[KvMove] = []
        with self._changed:
            for one in moves:
                if isinstance(one, Store) or (isinstance(one, Load) and self.machine.has_stored(one.number)):
                    self._handle(one)
                else:
                    rest.append(one)
        return rest

    def poll(self, now: int) -> Sequence[Event]:
        """Give up what has taken too long, and look for the KV of retracted requests."""
        with self._collecting() as events:
            self._handle(Tick())
            finds, self._finds = self._finds, 0
        if not finds or not self._store.blocks:
            return events
        for one in self._core.requeued(finds):
            stored = self._look_up(one.namespace, one.known_ids, one.cached, self._store.count_stored)
            if stored is not None:
                with self._collecting() as more:
                    self._handle(Requeued(one.number, stored, one.cached))
                events += more
        return events

    def on_output(self, batch: TokenBatch) -> None:
        """Forget requests that have ended."""
        if batch.finished and self.machine.loading:
            with self._changed:
                for finish in batch.finished:
                    self._handle(Ended(finish.number))

    def before_flush(self, now: int) -> Sequence[Event]:
        """Release the pages of all offers. One that is being copied from is waited for."""
        with self._collecting() as events:
            self._handle(StoresDropped())
            self._changed.wait_for(lambda: not self.machine.offers, COPY_TIMEOUT_S)
        return events

    def verbs(self) -> Mapping[str, VerbHandler]:
        """`clear_store` empties the store and returns how many blocks it had."""
        return {"clear_store": self._clear}

    def busy(self) -> bool:
        """Whether requests wait for stored KV."""
        return bool(self.machine.loading)

    def wakeup_ns(self) -> int | None:
        """When something has taken too long, or may be written again."""
        due_ns = self.machine.next_ns()
        return None if due_ns == NEVER_NS else due_ns

    def held_reasons(self) -> Mapping[str, str]:
        """Requests wait for a lookup or a prefetch."""
        return {"kv": "until the KV store answers"}

    def describe(self, now: int) -> Mapping[str, Any]:
        """Counters and sizes for `/v1/cache`."""
        machine, block_s = self.machine, self.machine.slow_s or self.machine.fast_s
        described = {
            "backend": self._config.backend if self._config.backend != "none" else "host",
            "block_tokens": self._block,
            "blocks": self._store.blocks,
            "stored_bytes": self._store.stored_bytes,
            "storing": machine.storing,
            "loading": machine.loading,
            "read_bytes_per_s": round(self._block_bytes / block_s) if block_s else 0,
            **asdict(machine.counters),
            **self._store.counters.public(),
        }
        return {"kv_store": {f"rank {self._rank}": described}}

    def close(self) -> None:
        """Store what waits for it, for a limited time, and end the threads."""
        try:
            self._flush()
        except Exception:
            logger.exception("KV could not be stored at the end")
        with self._changed:
            self._closed = True
            for operation in self._operations.values():
                operation.cancelled = True
        for _, inbox in self._threads:
            inbox.put(None)
        for thread, _ in self._threads:
            thread.join(timeout=1.0)
        if not any(thread.is_alive() for thread, _ in self._threads):
            self._store.close()

    def _flush(self) -> None:
        """Store what the prefix cache holds and the store lacks, without a limit to the speed."""
        events: list[Event] = []
        with self._changed:
            self._send = events.append
            self._handle(Closing())
        until = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            self._core.store_whole_cache(time.monotonic_ns())
            self.take(self._core.drain_moves())
            with self._changed:
                left_s = until - time.monotonic()
                ended = self._changed.wait_for(lambda: events or not self.machine.storing, max(left_s, 0.0))
                arrived = events.copy()
                events.clear()
            if not ended:
                logger.warning("not all KV could be stored in %g s", FLUSH_TIMEOUT_S)
            if not arrived:
                return
            for event in arrived:
                self._core.apply(event, time.monotonic_ns())

    def _clear(self, now: int) -> int:
        # Blocks that are being stored would come back.
        with self._changed:
            self._changed.wait_for(lambda: not self.machine.storing, COPY_TIMEOUT_S)
        blocks = self._store.blocks
        self._store.clear()
        return blocks

    def _look_up(
        self, namespace: str, known: Int32Array, cached: int, count_stored: Callable[[list[bytes]], int]
    ) -> StoredPrefix | None:
        slow = self._store.find_slow
        return stored_prefix(known, namespace, cached, self._block, count_stored, slow, self._state_blocks)

    # ---- the machine, under the lock ------------------------------------------------------------------------------

    @contextmanager
    def _collecting(self) -> Iterator[list[Event]]:
        """Hold the lock; meanwhile, events for the scheduler go to the list."""
        events: list[Event] = []
        with self._changed:
            self._send = events.append
            try:
                yield events
            finally:
                self._send = self._deliver

    def _handle(self, event: KvStoreEvent) -> None:
        """Hand an event to the machine, and start what it says."""
        for action in self.machine.handle(event, time.monotonic_ns()):
            match action:
                case Apply():
                    self._send(action.event)
                case Find():
                    self._finds = action.max_requests
                case Cancel():
                    self._cancel(action.op)
                case Discard():
                    self._unstage(self._staged.pop(action.op))
                case Prefetch() | Read():
                    self._start(action, self._to_read)
                case Gather():
                    self._start(action, self._to_gather)
                case Write():
                    self._start(action, self._to_write)

    def _start(self, action: Prefetch | Read | Gather | Write, to: Inbox) -> None:
        operation = self._operations[action.op] = Operation(action, cancelled=self._closed)
        to.put(operation)

    def _cancel(self, op: int) -> None:
        """No copy of an op begins from now on. If none is in progress, it has ended, whatever the store does."""
        operation = self._operations[op]
        operation.cancelled = True
        if not operation.copying:
            self._end(operation)

    def _end(self, operation: Operation) -> None:
        """Report what came of an op, once."""
        if self._operations.pop(operation.action.op, None) is None:
            return
        if operation.staged:
            self._staged[operation.action.op] = operation
        self._handle(operation.answer())
        self._changed.notify_all()

    def _may_copy(self, operation: Operation) -> bool:
        """Begin a copy from or to pages, unless the op was cancelled. The caller resets `copying` when it has ended."""
        with self._changed:
            operation.copying = not operation.cancelled
            return operation.copying

    # ---- the threads ----------------------------------------------------------------------------------------------

    def _work(self, inbox: Inbox) -> None:
        block = block_buffer(self._block_bytes)
        while (operation := self._next(inbox)) is not None:
            operation.began_s = time.monotonic()
            try:
                self._run(operation, block)
            except (OSError, TokenyardError) as error:
                operation.error = str(error) or type(error).__name__
                self._log_failure(operation)
            except Exception as error:
                operation.error = f"{type(error).__name__}: {error}"
                logger.exception("an operation of the KV store failed")
            with self._changed:
                operation.copying = False
                self._end(operation)

    def _next(self, inbox: Inbox) -> Operation | None:
        """What a thread does next. Until there is something, it tells the machine what time it is when that is due: the
        event loop may be waiting for messages, without a timeout, since before the thread's last operation ended.
        """
        while True:
            due_ns = self.machine.next_ns()
            timeout_s = None if due_ns == NEVER_NS else max(due_ns - time.monotonic_ns(), 0) / NS_PER_S
            try:
                return inbox.get(timeout=timeout_s)
            except queue.Empty:
                with self._changed:
                    self._handle(Tick())
                    self._changed.notify_all()

    def _run(self, operation: Operation, block: Block) -> None:
        match operation.action:
            case Prefetch() as prefetch:
                self._prefetch(operation, prefetch)
            case Read() as read:
                self._read(operation, read, block)
            case Gather() as gather:
                self._gather(operation, gather, block)
            case Write() as write:
                self._write(operation, self._staged.pop(write.op), block)

    def _log_failure(self, operation: Operation) -> None:
        """Log an error of the store; of writes that fail one after the other, the first."""
        if not isinstance(operation.action, Write):
            logger.warning("stored KV could not be read: %s", operation.error)
        elif not self._failing:
            self._failing = True
            logger.warning("KV is not stored for now: %s", operation.error)

    def _prefetch(self, operation: Operation, action: Prefetch) -> None:
        """Bring blocks where reading them is fast, up to the first one that is missing."""
        self._store.touch(action.digests)
        for digest in action.digests[action.first :]:
            if operation.cancelled or not self._store.prefetch(digest):
                return
            operation.blocks += 1

    def _read(self, operation: Operation, action: Read, block: Block) -> None:
        """Fill the pages of a load, block by block, up to the first one that is missing, and then the state."""
        self._store.touch(action.digests)
        size, page, load = self._block, self._page, action.load
        end = load.start + len(load.pages) * page
        states = self._state_blocks if load.state_slot >= 0 else 0
        for place in range(action.first, len(action.digests) - states):
            if operation.cancelled or not self._store.get(action.digests[place], block):
                return
            begin, stop = max(load.start, place * size), min(end, (place + 1) * size)
            pages = load.pages[(begin - load.start) // page : -(-(stop - load.start) // page)]
            if not self._may_copy(operation):
                return
            self._pool.scatter(block, self._per_block, (begin - place * size) // page, pages)
            with self._changed:
                operation.copying, operation.blocks = False, operation.blocks + 1
        if states:
            self._read_state(operation, action.digests[-states:], load.state_slot, block)

    def _read_state(self, operation: Operation, digests: list[bytes], slot: int, block: Block) -> None:
        """Set the states of a load, if all their blocks are there."""
        assert self._states is not None
        content = block_buffer(len(digests) * self._block_bytes)
        for place, digest in enumerate(digests):
            if operation.cancelled or not self._store.get(digest, block):
                return
            content[place * self._block_bytes :][: self._block_bytes] = block[: self._block_bytes]
        if self._may_copy(operation):
            self._states.write(slot, content)
            with self._changed:
                operation.copying, operation.blocks = False, operation.blocks + len(digests)

    def _gather(self, operation: Operation, action: Gather, buffer: Block) -> None:
        """Stage those blocks of an offer that the store lacks, first ones first."""
        digests, store = self._digests(action.offer), self._store
        operation.digests = digests
        state: Block | None = None
        first_state = len(action.offer.tokens) // self._block
        for place in range(action.first, len(digests)):
            digest = digests[place]
            if digest not in self._in_staging and store.lacks(digest):
                if len(operation.staged) == action.max_blocks or not self._may_copy(operation):
                    return
                block = buffer if store.has_memory_in_front else self._take_buffer()
                if place < first_state:
                    self._pool.gather(action.offer.pages[place * self._per_block :][: self._per_block], block)
                else:
                    state = self._state_of(action.offer) if state is None else state
                    block[: self._block_bytes] = state[(place - first_state) * self._block_bytes :][: self._block_bytes]
                store.put_in_memory(digest, block)
                with self._changed:
                    operation.copying = False
                    operation.staged.append((digest, None if block is buffer else block))
                    self._in_staging.add(digest)
            operation.end = place + 1
        store.touch(digests)

    def _state_of(self, offer: Store) -> Block:
        """The states of an offer, followed by zeros: uint8[at least state_blocks * block_bytes]."""
        assert self._states is not None
        content = block_buffer(self._state_blocks * self._block_bytes)
        self._states.read(offer.state_slot, content)
        return content

    def _take_buffer(self) -> Block:
        with self._changed:
            return self._free_buffers.pop() if self._free_buffers else block_buffer(self._block_bytes)

    def _write(self, operation: Operation, gathered: Operation, buffer: Block) -> None:
        """Write what was gathered. Raises OSError, and TokenyardError for a store that is full."""
        try:
            for digest, staged in gathered.staged:
                block = buffer if staged is None else staged
                # What is staged in the store's own memory may have been evicted from there.
                if staged is not None or self._store.get_from_memory(digest, block):
                    self._store.put(digest, block)
                    operation.blocks += 1
            self._failing = False
        finally:
            with self._changed:
                self._unstage(gathered)
            self._store.touch(gathered.digests[: gathered.end])

    def _unstage(self, gathered: Operation) -> None:
        """What was staged is no longer needed. The lock is held."""
        self._in_staging.difference_update(digest for digest, _ in gathered.staged)
        self._free_buffers += [block for _, block in gathered.staged if block is not None]

    def _digests(self, offer: Store) -> list[bytes]:
        """The names of an offer's blocks; those of the last offer are kept, as its runs follow each other."""
        if self._hashed[0] != offer.number:
            digests = block_digests(offer.tokens, root_digest(offer.namespace), self._block)
            if offer.state_slot >= 0:
                digests += state_digests(digests[-1], self._state_blocks)
            self._hashed = offer.number, digests
        return self._hashed[1]


def open_kv_store_connector(
    config: EngineConfig, core: Core, executor: Executor, deliver: Callable[[Event], None], rank: int = 0
) -> KvStoreConnector | None:
    """The KV store of the settings, if enabled. Raises ConfigError for a folder or an address that cannot
    be used, and for an executor whose KV cannot be moved.
    """
    if not config.kv_store.enabled:
        return None
    pool, states = open_pool(executor), open_states(executor)
    store = open_store(config, executor, pool, rank, states)
    return KvStoreConnector(config.kv_store, store, pool, core, executor.info, deliver, rank, states)
