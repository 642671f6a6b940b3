"""The decisions of a KV store: what to look for, load, store and give up. No thread, no clock, no IO.

`KvStoreMachine.handle` takes an event and its time, and returns actions. A driver carries them out and reports what
came of them as further events. There are two drivers: the engine's has threads that block
(`engine/scheduler_process/attachments/kv_store.py`), the simulator's has channels in virtual time
(`sim/kv/kv_store.py`).

An action names a run of blocks and has a number, its `op`. The driver answers each op once: `Prefetch` with
`Prefetched`, `Read` with `ReadEnded`, `Gather` with `Gathered`, `Write` with `Wrote`. After `Cancel(op)` it answers as
soon as no copy from or to pages is in progress, without waiting for the store, and then copies nothing more for that
op. So pages are in use until the answer, however long a store takes, and never go back because a time has passed.

The pipeline of a write is device, staging memory, store. An offer's pages are free once they are gathered. Where host
memory is a store in front of another one, it is the staging memory, and gathering does not wait for the other store.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tokenyard.base import (
    NS_PER_S,
    CostModel,
    Event,
    KvAvailable,
    KvLoaded,
    Load,
    OpenGate,
    PagesReleased,
    StepWork,
    Store,
)
from tokenyard.base.blocks import StoredPrefix
from tokenyard.base.kv_store_limits import KvStoreLimits

NEVER_NS = 2**63 - 1
FIND_INTERVAL_NS, MAX_FOUND = NS_PER_S // 10, 8
"""How often retracted requests are looked up, and how many at a time."""
WRITE_TIMEOUT_NS = 5 * NS_PER_S
"""If a write takes longer, nothing more is stored until it ends."""
MIN_BACKOFF_NS, MAX_BACKOFF_NS = NS_PER_S, 30 * NS_PER_S
"""How long nothing is stored after a write has failed: the first time, and at most."""
MAX_STAGED = 2
"""Runs in staging memory at a time, including one that is being gathered and one that is being written."""
MAX_BACKLOG = 1024
"""The same where staging memory is a store; the oldest run beyond that is not written."""
STAGED_BYTES = 1 << 26
"""Most bytes of a run that is stored, if a block is not larger."""
LEARNING_RATE = 0.2


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The size of a block, and the first guesses of what it takes to move one."""

    block_tokens: int
    """Tokens of a block; whole pages."""
    page_size: int
    """Tokens of a page."""
    block_bytes: int
    """Bytes of a block's KV."""
    fast_s: float
    """Seconds to copy a block between host memory and the device."""
    slow_s: float
    """Seconds to read a block from the store behind host memory; 0.0 if there is none."""
    stages_in_store: bool = False
    """Whether staging memory is a store in front of another one."""
    state_blocks: int = 0
    """Blocks that the recurrent states of one prefix take; 0 for a model without."""


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request came in, and the store has a part of its KV that the prefix cache lacks."""

    number: int
    stored: StoredPrefix
    """The part that the store has."""
    cached: int
    """Tokens that the prefix cache has."""
    answers: int = 1
    """Answers to the prompt; they have the numbers from `number` on."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """An answer to `Find`: the store has a part of the KV of a waiting request that the prefix cache lacks."""

    number: int
    stored: StoredPrefix
    """The part that the store has."""
    cached: int
    """Tokens that the prefix cache has."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The answer to `Prefetch`."""

    op: int
    blocks: int
    """Blocks of the run, from the first on, that can be read without a wait."""
    seconds: float
    """Time that it took, without the time it waited for its turn; 0.0 if it did not begin."""


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The answer to `Read`: nothing writes to the pages any more."""

    op: int
    blocks: int
    """Blocks of the run, from the first on, that are in the pages."""
    seconds: float
    """Time that it took, without the time it waited for its turn; 0.0 if it did not begin."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The answer to `Gather`: nothing reads the pages any more for this op."""

    op: int
    end: int
    """The block after the last one that the store has or that was staged. If it is where the run began, the offer is
    dropped."""
    blocks: int
    """Blocks that were staged; if there are any, a `Write` of this op follows."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """The answer to `Write`: what was staged is no longer needed."""

    op: int
    blocks: int
    """Blocks that were written."""
    error: str = ""
    """Why the others could not be written; "" if all are, or were evicted from staging memory."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StoresDropped:
    """The prefix cache is to be emptied: release the pages of all offers."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The engine ends: write without limit from now on."""


KvStoreEvent = (
    Submitted
    | Requeued
    | Load
    | Ended
    | Store
    | Prefetched
    | ReadEnded
    | Gathered
    | Wrote
    | Tick
    | StoresDropped
    | Closing
)
"""What the machine hears. `Load` and `Store` are what the scheduler asks for."""

# ---- actions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Find:
    """Look up the KV of requests that were retracted; report those with stored KV by `Requeued`."""

    max_requests: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a run of blocks where reading them is fast."""

    op: int
    digests: list[bytes]
    """The blocks from the beginning of the prompt to the end of the run. All of them were used."""
    first: int
    """Where in `digests` the run begins."""


@dataclass(frozen=True, slots=True)
class Read:
    """Copy a run of blocks to the pages of a load."""

    op: int
    digests: list[bytes]
    """The blocks from the beginning of the prompt to the end of the run. All of them were used. The last ones have the
    recurrent states after the load's tokens, if it has a slot for these."""
    first: int
    """Where in `digests` the run begins: the block of token `load.start`."""
    ready: int
    """Where in `digests` the blocks end that were prefetched."""
    load: Load
    """The pages. The first and the last block of the run may have others as well, which are left alone."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy the blocks of an offer that the store lacks to staging memory, from block `first` on."""

    op: int
    offer: Store
    """The tokens, from which the driver makes the digests, and the pages."""
    first: int
    """The block to begin with."""
    max_blocks: int
    """Most blocks to stage."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write to the store what `Gather` of the same op has staged."""

    op: int


@dataclass(frozen=True, slots=True)
class Discard:
    """What `Gather` of the same op has staged is not written."""

    op: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a `Prefetch`, `Read` or `Gather` early. It is answered with what was done by then."""

    op: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply an event to the scheduler."""

    event: Event


KvStoreAction = Find | Prefetch | Read | Gather | Write | Discard | Cancel | Apply

# ---- the machine ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class KvStoreCounters:
    """Totals since the start."""

    written_bytes: int = 0
    """Bytes of KV that were stored."""
    loaded_bytes: int = 0
    """Bytes of KV that were copied to pages."""
    loaded_tokens: int = 0
    """Tokens whose KV was copied to pages."""
    dropped_blocks: int = 0
    """Blocks that were given up: of offers, of which the store may have some, and staged ones."""
    failed_writes: int = 0
    """Runs that could not be written."""
    failed_loads: int = 0
    """Loads that ended before a block that was missing or could not be read."""
    late_loads: int = 0
    """Loads that were cut short by their timeout."""
    hit_requests: int = 0
    """Requests for which stored KV was found and ready in time."""
    recomputed_requests: int = 0
    """Requests whose stored KV was predicted to be computed faster than loaded."""
    swapped_in_requests: int = 0
    """Retracted requests among `hit_requests`."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request with stored KV."""

    number: int
    stored: StoredPrefix
    answers: int = 1
    op: int = 0
    """Its `Prefetch` or `Read`, 0 for none."""
    ready: int = 0
    """Blocks from `stored.first` on that were prefetched."""
    load: Load | None = None
    """Its pages, once it has some."""
    deadline_ns: int = NEVER_NS
    """When its op is cancelled."""
    cancelled: bool = False
    """Whether its op was cancelled."""
    ended: bool = False
    """Whether the request has ended, so that only its op is left."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An offer whose pages are not free yet."""

    offer: Store
    blocks: int
    """Whole blocks that it has, those of recurrent states last."""
    next: int = 0
    """Blocks from the first on that the store has or that were staged."""
    op: int = 0
    """Its `Gather`, 0 for none."""
    dropped: bool = False
    """Whether it is given up, so that only its op is left."""


@dataclass(slots=True)
class _WriteLimit:
    """When the next run may be written."""

    bytes_per_s: float
    """0.0 for no limit."""
    next_ns: int = 0
    paused_until_ns: int = 0
    pause_ns: int = 0
    """The length of the last pause; 0 after a write that succeeded."""

    def wrote(self, num_bytes: int, since_ns: int) -> None:
        """Bytes were written in a write that began at `since_ns`."""
        if self.bytes_per_s:
            self.next_ns = max(since_ns, self.next_ns) + round(num_bytes / self.bytes_per_s * NS_PER_S)

    def failed(self, now: int) -> None:
        """A write has failed: pause, longer each time."""
        self.pause_ns = min(2 * self.pause_ns or MIN_BACKOFF_NS, MAX_BACKOFF_NS)
        self.paused_until_ns = now + self.pause_ns

    @property
    def ready_ns(self) -> int:
        """When the next run may be written."""
        return max(self.next_ns, self.paused_until_ns)


@dataclass(slots=True)
class KvStoreMachine:
    """The state of one scheduler's KV store. One thread at a time may call it.

    Every request that waits for KV hears `KvAvailable` within its timeout, and every `Load` and `Store` is answered
    with `KvLoaded` and `PagesReleased`, if the driver answers ops as this module says.
    """

    limits: KvStoreLimits
    sizes: BlockSizes
    cost: CostModel
    """Predicts what computing KV takes."""
    gate: int
    """The gate that the other answers to a prompt wait at (`OpenGate`)."""
    counters: KvStoreCounters = field(default_factory=KvStoreCounters)
    fast_s: float = 0.0
    """`BlockSizes.fast_s`, corrected by what reads took."""
    slow_s: float = 0.0
    """`BlockSizes.slow_s`, corrected by what reads took."""
    _requests: dict[int, _Request] = field(default_factory=dict)
    _reading: dict[int, _Request] = field(default_factory=dict)
    """Requests by the op of their `Prefetch` or `Read`."""
    _offers: deque[_Offer] = field(default_factory=deque)
    """Only the first one is being gathered."""
    _staged: deque[tuple[int, int]] = field(default_factory=deque)
    """The ops of staged runs and their blocks, without the one that is being written."""
    _writing: tuple[int, int] = (0, 0)
    """The op that is being written and its blocks; (0, 0) for none."""
    _write_since_ns: int = 0
    _stuck: bool = False
    """Whether the write has taken too long."""
    _limit: _WriteLimit = field(init=False)
    _run_blocks: int = 1
    _last_op: int = 0
    _find_ns: int = 0
    _due_ns: int = NEVER_NS
    _on: dict[type, Callable[..., list[KvStoreAction]]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the first guesses."""
        self.fast_s, self.slow_s = self.sizes.fast_s, self.sizes.slow_s
        self._limit = _WriteLimit(self.limits.write_mb_s * 1e6)
        self._run_blocks = max(1, STAGED_BYTES // max(self.sizes.block_bytes, 1))
        self._on = {
            Submitted: self._submitted,
            Requeued: self._requeued,
            Load: self._load,
            Ended: self._ended,
            Store: self._offered,
            Prefetched: self._prefetched,
            ReadEnded: self._read_ended,
            Gathered: self._gathered,
            Wrote: self._wrote,
            Tick: self._tick,
            StoresDropped: self._drop_offers,
            Closing: self._closing,
        }

    # ---- what drivers ask -----------------------------------------------------------------------------------------

    def handle(self, event: KvStoreEvent, now: int) -> list[KvStoreAction]:
        """Take an event at `now` (ns); returns what to do, in order.

        Raises ValueError for an answer to an op that is not open, and for a `Load` of a request without stored KV.
        """
        if type(event) is Tick and now < min(self._due_ns, self._find_ns):
            return []
        actions = self._on[type(event)](event, now)
        self._due_ns = self._next_due_ns()
        return actions

    def next_ns(self) -> int:
        """When a `Tick` is due (ns); `NEVER_NS` if only events can change anything."""
        return self._due_ns

    def awaits_kv(self, number: int) -> bool:
        """Whether a request that was just submitted waits for `KvAvailable` before it may start."""
        return number in self._requests and self.limits.prefetch_policy != "best_effort"

    def has_stored(self, number: int) -> bool:
        """Whether the machine takes the `Load` of a request."""
        return number in self._requests

    @property
    def loading(self) -> int:
        """Requests with stored KV that have not loaded it yet."""
        return len(self._requests)

    @property
    def storing(self) -> int:
        """Offers and staged runs that are not written yet."""
        return len(self._offers) + len(self._staged) + bool(self._writing[0])

    @property
    def offers(self) -> int:
        """Offers whose pages are not released yet."""
        return len(self._offers)

    def load_s(self, stored: StoredPrefix) -> float:
        """Seconds that loading stored KV is predicted to take."""
        return stored.found * self.fast_s + stored.slow * self.slow_s

    # ---- loading --------------------------------------------------------------------------------------------------

    def _submitted(self, event: Submitted, now: int) -> list[KvStoreAction]:
        if event.number in self._requests:
            return []
        stored = self._worthwhile(event.stored, event.cached)
        if stored is None:
            self.counters.recomputed_requests += 1
            return []
        request = self._requests[event.number] = _Request(event.number, stored, event.answers)
        op = self._begin(request, stored.tokens - event.cached, now)
        return [Prefetch(op, stored.digests[: stored.first + stored.found], stored.first)]

    def _requeued(self, event: Requeued, now: int) -> list[KvStoreAction]:
        """A retracted request waits in the queue anyway, so no gate is closed for it, and nothing is prefetched."""
        if event.number in self._requests:
            return []
        stored = self._worthwhile(event.stored, event.cached)
        if stored is None:
            return []
        self._requests[event.number] = _Request(event.number, stored)
        self.counters.hit_requests += 1
        self.counters.swapped_in_requests += 1
        return [Apply(KvAvailable(event.number, stored.tokens))]

    def _prefetched(self, event: Prefetched, now: int) -> list[KvStoreAction]:
        request, was_cancelled = self._end(event.op)
        stored = request.stored
        if event.seconds and stored.slow:
            # A block that was cut short counts half.
            slow = _slow_blocks(stored, event.blocks) + (0.5 if was_cancelled and event.blocks < stored.found else 0.0)
            self._learn(0, max(slow, 1.0), event.seconds)
        if request.ended:
            return []
        request.ready = event.blocks
        tokens = min((stored.first + event.blocks) * self.sizes.block_tokens, stored.tokens) if event.blocks else 0
        if stored.state_blocks and event.blocks < stored.found:
            tokens = 0
        if tokens:
            self.counters.hit_requests += 1
        else:
            del self._requests[request.number]
        others = range(request.number + 1, request.number + request.answers)
        return [Apply(KvAvailable(request.number, tokens)), *(Apply(OpenGate(one, self.gate)) for one in others)]

    def _load(self, event: Load, now: int) -> list[KvStoreAction]:
        request = self._requests.get(event.number)
        if request is None or request.op:
            raise ValueError(f"request {event.number} has no stored KV to load, or loads it already")
        size, tokens = self.sizes.block_tokens, len(event.pages) * self.sizes.page_size
        request.load = event
        op = self._begin(request, tokens, now)
        digests = request.stored.digests
        if not request.stored.state_blocks:
            digests = digests[: -(-(event.start + tokens) // size)]
        return [Read(op, digests, event.start // size, request.stored.first + request.ready, event)]

    def _read_ended(self, event: ReadEnded, now: int) -> list[KvStoreAction]:
        request, was_cancelled = self._end(event.op)
        load, size, counters = request.load, self.sizes.block_tokens, self.counters
        assert load is not None
        end = load.start + len(load.pages) * self.sizes.page_size
        first, blocks = load.start // size, -(-end // size) - load.start // size + request.stored.state_blocks
        if event.blocks:
            unready = 0 if request.ready >= request.stored.found else request.stored.slow
            self._learn(event.blocks, min(unready, event.blocks), event.seconds)
        loaded_end = min(end, (first + event.blocks) * size) if event.blocks else load.start
        if request.stored.state_blocks and event.blocks < blocks:
            loaded_end = load.start
        counters.loaded_tokens += loaded_end - load.start
        counters.loaded_bytes += (loaded_end - load.start) * self.sizes.block_bytes // size
        if event.blocks < blocks and not request.ended:
            counters.late_loads += was_cancelled
            counters.failed_loads += not was_cancelled
        self._requests.pop(request.number, None)
        return [Apply(KvLoaded(request.number, loaded_end))]

    def _ended(self, event: Ended, now: int) -> list[KvStoreAction]:
        request = self._requests.pop(event.number, None)
        if request is None:
            return []
        request.ended = True
        return self._cancel(request)

    def _begin(self, request: _Request, tokens: int, now: int) -> int:
        """Give a request an op that moves the KV of `tokens` tokens; returns its number."""
        self._last_op += 1
        request.op, request.cancelled = self._last_op, False
        request.deadline_ns = now + round(self.limits.prefetch_timeout_s(tokens) * NS_PER_S)
        self._reading[request.op] = request
        return request.op

    def _end(self, op: int) -> tuple[_Request, bool]:
        """The request whose op has ended, and whether the op was cancelled. Raises ValueError if it is not open."""
        request = self._reading.pop(op, None)
        if request is None:
            raise ValueError(f"op {op} of the KV store is not open")
        request.op, request.deadline_ns = 0, NEVER_NS
        return request, request.cancelled

    def _cancel(self, request: _Request) -> list[KvStoreAction]:
        """Cancel the op of a request, once."""
        request.deadline_ns = NEVER_NS
        if not request.op or request.cancelled:
            return []
        request.cancelled = True
        return [Cancel(request.op)]

    def _worthwhile(self, stored: StoredPrefix, cached: int) -> StoredPrefix | None:
        """The part of stored KV that is predicted to be loaded faster than computed: all of it, or what lies in host
        memory. None if neither is.
        """
        if self._loads_faster(stored, cached):
            return stored
        if stored.state_blocks or not 0 < stored.fast < stored.found:
            return None
        tokens = min((stored.first + stored.fast) * self.sizes.block_tokens, stored.tokens)
        cut = replace(stored, found=stored.fast, slow=0, tokens=tokens)
        enough = tokens - cached >= self.sizes.block_tokens
        return cut if enough and self._loads_faster(cut, cached) else None

    def _loads_faster(self, stored: StoredPrefix, cached: int) -> bool:
        work = StepWork()
        work.add_chunk(cached, stored.tokens - cached)
        return self.load_s(stored) < self.cost.step(work)

    def _learn(self, fast: int, slow: float, seconds: float) -> None:
        """Correct the speeds by a transfer of `fast` blocks, `slow` of which (or others) came from the slow store."""
        if slow:
            self.slow_s += LEARNING_RATE * (max(seconds - fast * self.fast_s, 0.0) / slow - self.slow_s)
        elif fast:
            self.fast_s += LEARNING_RATE * (seconds / fast - self.fast_s)

    # ---- storing --------------------------------------------------------------------------------------------------

    def _offered(self, event: Store, now: int) -> list[KvStoreAction]:
        states = self.sizes.state_blocks if event.state_slot >= 0 else 0
        offer = _Offer(event, len(event.tokens) // self.sizes.block_tokens + states)
        waits = self._stuck or now < self._limit.paused_until_ns
        if not offer.blocks or (waits and not self.sizes.stages_in_store):
            return [self._release(offer)]
        self._offers.append(offer)
        return self._store_more(now)

    def _gathered(self, event: Gathered, now: int) -> list[KvStoreAction]:
        offer = self._offers[0] if self._offers else None
        if offer is None or offer.op != event.op:
            raise ValueError(f"op {event.op} of the KV store is not open")
        actions: list[KvStoreAction] = []
        if event.blocks:
            self._staged.append((event.op, event.blocks))
        if len(self._staged) > MAX_BACKLOG:
            oldest, blocks = self._staged.popleft()
            self.counters.dropped_blocks += blocks
            actions.append(Discard(oldest))
        progress = event.end > offer.next
        offer.op, offer.next = 0, event.end
        if offer.dropped or offer.next >= offer.blocks or not progress:
            self._offers.popleft()
            actions.append(self._release(offer))
        return actions + self._store_more(now)

    def _wrote(self, event: Wrote, now: int) -> list[KvStoreAction]:
        op, blocks = self._writing
        if event.op != op:
            raise ValueError(f"op {event.op} of the KV store is not open")
        num_bytes = event.blocks * self.sizes.block_bytes
        self._limit.wrote(num_bytes, self._write_since_ns)
        self._writing, self._stuck = (0, 0), False
        self.counters.written_bytes += num_bytes
        self.counters.dropped_blocks += blocks - event.blocks
        actions: list[KvStoreAction] = []
        if event.error:
            self.counters.failed_writes += 1
            self._limit.failed(now)
            if not self.sizes.stages_in_store:
                actions += self._drop_offers()
        else:
            self._limit.pause_ns = 0
        return actions + self._store_more(now)

    def _store_more(self, now: int) -> list[KvStoreAction]:
        """Gather the next run if there is staging memory for it, and write the next one if it may be."""
        actions: list[KvStoreAction] = []
        has_room = self.sizes.stages_in_store or len(self._staged) + bool(self._writing[0]) < MAX_STAGED
        if self._offers and not self._offers[0].op and has_room:
            offer = self._offers[0]
            self._last_op += 1
            offer.op = self._last_op
            actions.append(Gather(offer.op, offer.offer, offer.next, self._run_blocks))
        if self._staged and not self._writing[0] and now >= self._limit.ready_ns:
            self._writing, self._write_since_ns = self._staged.popleft(), now
            actions.append(Write(self._writing[0]))
        return actions

    def _drop_offers(self, event: StoresDropped | None = None, now: int = 0) -> list[KvStoreAction]:
        """Give up all offers. The pages of one that is being gathered are free when that has ended."""
        left: deque[_Offer] = deque()
        actions: list[KvStoreAction] = []
        for offer in self._offers:
            if not offer.op:
                actions.append(self._release(offer))
                continue
            left.append(offer)
            if not offer.dropped:
                actions.append(Cancel(offer.op))
            offer.dropped = True
        self._offers = left
        return actions

    def _release(self, offer: _Offer) -> Apply:
        self.counters.dropped_blocks += offer.blocks - offer.next
        return Apply(PagesReleased(offer.offer.number))

    def _closing(self, event: Closing, now: int) -> list[KvStoreAction]:
        self._limit = _WriteLimit(0.0)
        return self._store_more(now)

    # ---- time -----------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, now: int) -> list[KvStoreAction]:
        actions: list[KvStoreAction] = []
        for request in self._requests.values():
            if now >= request.deadline_ns:
                actions += self._cancel(request)
        if self._writing[0] and not self._stuck and now >= self._write_since_ns + WRITE_TIMEOUT_NS:
            self._stuck = True
            if not self.sizes.stages_in_store:
                actions += self._drop_offers()
        actions += self._store_more(now)
        if now >= self._find_ns:
            self._find_ns = now + FIND_INTERVAL_NS
            actions.append(Find(MAX_FOUND))
        return actions

    def _next_due_ns(self) -> int:
        due = min((request.deadline_ns for request in self._requests.values()), default=NEVER_NS)
        if self._writing[0] and not self._stuck:
            due = min(due, self._write_since_ns + WRITE_TIMEOUT_NS)
        if self._staged and not self._writing[0]:
            due = min(due, self._limit.ready_ns)
        return due


def _slow_blocks(stored: StoredPrefix, blocks: int) -> float:
    """How many of the first `blocks` that were found came from the slow store, if these lie evenly behind the fast
    ones at the beginning.
    """
    behind = stored.found - stored.fast
    return stored.slow * max(0, blocks - stored.fast) / behind if behind else 0.0
