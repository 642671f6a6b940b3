"""What the core offers to a store below the device, and when; the mock's KV marks move with the pages."""

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    KvAvailable,
    KvLoaded,
    Load,
    PagesReleased,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    StateGroup,
    Store,
)
from tokenyard.base.blocks import BLOCK_TOKENS, block_digests, root_digest, state_digests, stored_prefix
from tokenyard.kv_layout.layout import PoolView, StateView, map_pages
from tokenyard.kv_store.store import MemoryStore, block_buffer

PAGE = 16
CONTEXT = 512
PER_BLOCK = BLOCK_TOKENS // PAGE


def make_yard(pages: int = 128, states: StateGroup | None = None, **changes) -> Yard:
    settings = SchedulerSettings(
        **{
            "page_size": PAGE,
            "context_length": CONTEXT,
            "max_running_requests": 6,
            "enable_hierarchical_cache": True,
            "chunked_prefill_size": 128,
        }
        | changes
    )
    return Yard(settings, make_info(pages, settings.page_size, 7, CONTEXT, states=states), answer_tokens=(8, 20))


def prompt(tokens: int = 200, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, tokens).tolist()


def namespace(cache_salt: str = "", **fields) -> str:
    """That of requests with these fields."""
    return Request(1, "", np.empty(0, np.int32), SamplingParams(), cache_salt=cache_salt).namespace


class Below:
    """A KV store below a yard that does what the core wants at once, or when the test asks."""

    def __init__(self, yard: Yard, store: MemoryStore | None = None) -> None:
        self.yard = yard
        self.store = MemoryStore(10_000) if store is None else store
        self.pool = PoolView(map_pages(yard.executor.pieces), yard.scheduler.state.memory.num_pages)
        self.states = StateView(map_pages(yard.executor.state_pieces))
        self.has_states = yard.scheduler.state.memory.states is not None
        self.block = block_buffer(PER_BLOCK * self.pool.page_bytes)
        self.offers: list[Store] = []
        self.loads: list[Load] = []
        self.digests: dict[int, list[bytes]] = {}

    def submit(self, tokens: list[int], **fields) -> int:
        """Submit a prompt as an engine does that looks into its store."""
        known, name = np.array(tokens, np.int32), namespace(**fields)
        digests = block_digests(known, root_digest(name))
        lookups = self.store.count_stored, self.store.find_slow
        stored = stored_prefix(known, name, 0, BLOCK_TOKENS, *lookups, int(self.has_states))
        reach = stored.tokens if stored else 0
        number = self.yard.submit(tokens, awaits_kv=reach > 0, **fields)
        self.digests[number] = digests
        if reach:
            self.yard.apply(KvAvailable(number, reach))
        return number

    def collect(self) -> None:
        for wanted in self.yard.scheduler.drain_moves():
            (self.offers if isinstance(wanted, Store) else self.loads).append(wanted)

    def keep(self, offer: Store, *, fails: bool = False) -> None:
        """Store an offer and release its pages."""
        digests = block_digests(offer.tokens, root_digest(offer.namespace))
        for place, digest in enumerate(digests if not fails else []):
            if not self.store.count_stored([digest]):
                self.pool.gather(offer.pages[place * PER_BLOCK :][:PER_BLOCK], self.block)
                self.store.put(digest, self.block)
        if offer.state_slot >= 0 and not fails:
            self.states.read(offer.state_slot, self.block)
            self.store.put(*state_digests(digests[-1], 1), self.block)
        self.yard.apply(PagesReleased(offer.number))

    def bring(self, load: Load, most: int = CONTEXT) -> None:
        """Load at most so many tokens, and report it."""
        at = load.start
        for index in range(min(len(load.pages), most // PAGE)):
            place, page = divmod(at // PAGE, PER_BLOCK)
            if not self.store.get(self.digests[load.number][place], self.block):
                break
            self.pool.scatter(self.block, PER_BLOCK, page, load.pages[index : index + 1])
            at += PAGE
        if load.state_slot >= 0 and at == load.start + len(load.pages) * PAGE:
            if self.store.get(*state_digests(self.digests[load.number][at // BLOCK_TOKENS - 1], 1), self.block):
                self.states.write(load.state_slot, self.block)
            else:
                at = load.start
        self.yard.apply(KvLoaded(load.number, at))

    def serve(self, number: int) -> list[int]:
        """Run until a request has ended and all that was offered is stored."""
        while number not in self.yard.finished or self.offers or self.yard.scheduler.state.stores.waiting:
            self.yard.advance()
            self.collect()
            while self.offers:
                self.keep(self.offers.pop(0))
            while self.loads:
                self.bring(self.loads.pop(0))
            self.yard.check()
        return self.yard.tokens[number]


def test_stored_blocks_serve_a_restarted_scheduler():
    tokens = prompt()
    first = Below(make_yard())
    answer = first.serve(first.submit(tokens, max_new=12))
    stored = (len(tokens) + len(answer) - 1) // BLOCK_TOKENS
    assert first.store.blocks == stored

    second = Below(make_yard(), first.store)
    number = second.submit(tokens, max_new=12)
    assert second.serve(number) == answer
    counters = second.yard.scheduler.snapshot(1).counters
    assert counters.prefill_tokens == len(tokens) - len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.yard.finished[number].cached_tokens == 192
    for below in (first, second):
        assert not below.yard.scheduler.state.memory.holds
        assert below.yard.scheduler.idle() is None
        assert below.yard.scheduler.flush(below.yard.now)


def test_a_checkpoint_comes_back_with_the_kv_of_its_prefix():
    tokens = prompt()
    first = Below(make_yard(states=StateGroup(4, track_interval=500)))
    answer = first.serve(first.submit(tokens, max_new=12))
    names = block_digests(np.array(tokens, np.int32))
    assert first.store.blocks == 4
    assert first.store.count_stored(names + state_digests(names[-1], 1)) == 4

    second = Below(make_yard(states=StateGroup(4, track_interval=500)), first.store)
    numbers = [second.submit(tokens, max_new=12) for _ in range(2)]
    loads = 0
    while second.yard.scheduler.has_work:
        second.yard.advance()
        second.collect()
        loads += len(second.loads)
        while second.loads:
            second.bring(second.loads.pop())
        second.yard.check()
    assert [second.yard.tokens[number] for number in numbers] == [answer] * 2
    assert [second.yard.finished[number].cached_tokens for number in numbers] == [192] * 2
    assert loads == 1, "one loads, and the other continues from a copy of its state"
    for offer in second.offers:
        second.keep(offer)
    assert second.yard.scheduler.idle() is None
    assert second.yard.scheduler.flush(second.yard.now)


def test_kv_without_its_state_is_computed():
    tokens, states = prompt(), StateGroup(4, track_interval=64)
    first = Below(make_yard(states=states))
    answer = first.serve(first.submit(tokens, max_new=12))
    second = Below(make_yard(states=states), first.store)
    number = second.submit(tokens, max_new=12)
    second.yard.advance()
    second.collect()
    first.store.clear()
    second.bring(second.loads.pop())
    assert second.serve(number) == answer
    assert second.yard.finished[number].cached_tokens == 0


@pytest.mark.parametrize("states", [None, StateGroup(4, track_interval=64)])
def test_names_of_blocks_depend_on_the_name_space(states):
    tokens = prompt()
    below = Below(make_yard(states=states))
    below.serve(below.submit(tokens, cache_salt="one"))
    assert below.store.count_stored(block_digests(np.array(tokens, np.int32))) == 0
    other = Below(make_yard(states=states), below.store)
    assert not other.yard.scheduler.state.table.loadable_tokens[
        other.yard.scheduler.state.table.row_of(other.submit(tokens))
    ]
    salted = other.submit(tokens, cache_salt="one")
    other.serve(salted)
    assert other.yard.finished[salted].cached_tokens == 192


def offered_tokens(yard: Yard) -> list[int]:
    return [len(one.tokens) for one in yard.scheduler.drain_moves() if isinstance(one, Store)]


def test_selective_stores_what_is_hit_and_nothing_else():
    yard = make_yard(hicache_write_policy="write_through_selective")
    tokens = prompt()
    yard.submit(tokens)
    yard.run()
    assert offered_tokens(yard) == []
    yard.submit(tokens[:150] + prompt(30, seed=2))
    yard.run()
    assert offered_tokens(yard) == [128], "what both have in common, up to the end of a block"


def test_write_back_stores_what_goes_next():
    below = Below(make_yard(pages=32, hicache_write_policy="write_back"))
    first = below.submit(prompt(150, seed=1))
    below.serve(first)
    assert below.store.blocks == 0, "there is room"
    for seed in range(2, 6):
        below.serve(below.submit(prompt(150, seed=seed)))
    assert below.store.blocks >= 4
    again = below.submit(prompt(150, seed=1))
    below.serve(again)
    assert below.yard.finished[again].cached_tokens >= 64
    assert below.yard.tokens[again] == below.yard.tokens[first]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_loses_its_place_is_swapped_out(policy, depth):
    tokens = prompt(189)
    below = Below(make_yard(hicache_write_policy=policy, max_in_flight=depth))
    whole = below.serve(below.submit(tokens, max_new=12, cache_salt="other"))
    number = below.submit(tokens, max_new=12)
    while len(below.yard.tokens.get(number, [])) < 6:
        assert number not in below.yard.finished
        below.yard.advance()
    below.store.clear()
    below.yard.apply(Pause(numbers=[number]))
    for _ in range(8):
        below.yard.advance()
        below.collect()
        while below.offers:
            below.keep(below.offers.pop())
    digests = block_digests(np.array(tokens + below.yard.tokens[number], np.int32))
    assert below.store.count_stored(digests) == 3, "all whole blocks of the prompt and of the answer so far"
    below.yard.apply(Resume([number]))
    assert below.serve(number) == whole


def test_no_more_is_locked_than_a_part_of_the_pool():
    yard = make_yard(pages=64)
    for seed in range(4):
        yard.submit(prompt(100, seed=seed))
    yard.run()
    state = yard.scheduler.state
    assert (state.stores.offered, state.stores.waiting) == (1, 3), "an eighth of the pool, and at least one"
    (offer,) = yard.scheduler.drain_moves()
    yard.apply(PagesReleased(offer.number))
    yard.launch()
    assert (state.stores.offered, state.stores.waiting) == (1, 2)
    assert not yard.scheduler.flush(yard.now), "pages are being read"


def test_what_is_evicted_before_its_turn_is_counted():
    yard = make_yard(pages=40)
    for seed in range(8):
        yard.submit(prompt(100, seed=seed))
    yard.run()
    snapshot = yard.scheduler.snapshot(yard.now)
    assert snapshot.unstored_tokens > 0
    yard.check()


def test_a_request_that_needs_what_is_being_stored_waits_for_it():
    yard = make_yard(pages=20)
    yard.submit(prompt(200))
    yard.run()
    (offer, *_) = yard.scheduler.drain_moves()
    large = yard.submit(prompt(250, seed=2))
    yard.run()
    assert large not in yard.finished
    while yard.scheduler.state.memory.holds:
        yard.apply(PagesReleased(offer.number))
        yard.run()
        offer = next((one for one in yard.scheduler.drain_moves()), offer)
    yard.run()
    assert yard.finished[large].reason == "length"


def test_all_is_offered_as_the_engine_ends():
    yard = make_yard(hicache_write_policy="write_back")
    for seed in range(3):
        yard.submit(prompt(100, seed=seed))
    yard.run()
    assert offered_tokens(yard) == []
    yard.scheduler.store_whole_cache(yard.now)
    assert offered_tokens(yard)


@pytest.mark.parametrize("page", [1, 48, 128])
def test_any_page_size(page):
    yard = make_yard(pages=4096 // page, page_size=page, chunked_prefill_size=-1)
    yard.submit(prompt(300))
    yard.run()
    assert offered_tokens(yard)[-1] >= 300 // page * page


def test_off_it_costs_nothing():
    yard = make_yard(enable_hierarchical_cache=False)
    assert yard.scheduler.state.stores is None
    assert yard.scheduler.state.memory.tree.listeners == []
