"""KV that comes from elsewhere: gate, LOADING and held pages, between two cores and out of a store of blocks.

The mock's KV marks move with the pages, so a row that is given another's KV, or none, is noticed in the next step.
"""

import ctypes
import random

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    Cancel,
    Flush,
    Handover,
    KvAvailable,
    KvLoaded,
    Load,
    OpenGate,
    PagesReleased,
    Pause,
    Resume,
    SamplingParams,
    SchedulerSettings,
)
from tokenyard.base.blocks import BLOCK_TOKENS, block_digests
from tokenyard.scheduler import Gate, RowState

PAGE = 16
CONTEXT = 512
MESSAGES = ("want", "offer", "reach", "load", "read", "arrived", "done")


def make_yard(pages=64, depth=1, **changes) -> Yard:
    settings = SchedulerSettings(
        **{"page_size": PAGE, "context_length": CONTEXT, "max_running_requests": 6, "max_in_flight": depth} | changes
    )
    return Yard(settings, make_info(pages, PAGE, 6 + depth, CONTEXT), answer_tokens=(8, 20))


def prompt(tokens=200, seed=1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(3, 90) for _ in range(tokens)]


def copy_marks(source: Yard, pages_from: np.ndarray, target: Yard, pages_to: np.ndarray) -> None:
    """Move KV marks page by page, as a transport would: by the addresses that the executors give."""
    there, here = source.executor.pieces(pages_from), target.executor.pieces(pages_to)
    for a, b in zip(there.addresses.ravel().tolist(), here.addresses.ravel().tolist(), strict=True):
        ctypes.memmove(b, a, here.nbytes)


def answer_of(tokens: list[int], max_new: int = 12) -> list[int]:
    alone = make_yard()
    number = alone.submit(tokens, max_new=max_new)
    alone.run()
    return alone.tokens[number]


def step(yard: Yard, depth: int) -> None:
    while len(yard.tickets) < depth and yard.launch():
        pass
    yard.commit()
    yard.check()


class Pair:
    """A prefill and a decode engine with a fake transport between them, which dies before the message `broken`."""

    def __init__(self, depth: int, broken: str) -> None:
        self.p, self.d, self.depth, self.broken = make_yard(depth=depth), make_yard(depth=depth), depth, broken
        self.dead = False

    def says(self, message: str) -> bool:
        self.dead = self.dead or message == self.broken
        return not self.dead

    def serve(self, tokens: list[int], max_new: int = 12) -> list[int]:
        d, p = self.d, self.p
        number = d.submit(tokens, max_new=max_new, awaits_kv=True)
        assert not d.launch(), "the gate is shut"
        offer = self._prefill(tokens) if self.says("want") else None
        if offer is not None and self.says("offer") and self.says("reach"):
            d.apply(KvAvailable(number, offer.tokens))
        else:
            d.apply(OpenGate(number, Gate.KV))
        while number not in d.finished:
            step(d, self.depth)
            for load in d.scheduler.drain_moves():
                self._load(load, offer)
        if offer is not None:
            # Done where all went well, else the lease runs out.
            p.apply(PagesReleased(offer.number))
        return d.tokens[number]

    def _prefill(self, tokens: list[int]) -> Handover:
        p = self.p
        number = p.submit(tokens, max_new=50, handover=True)
        p.run(self.depth)
        assert p.finished[number].reason == "handover"
        assert p.finished[number].completion_tokens == 1
        (offer,) = p.scheduler.drain_moves()
        assert p.scheduler.state.memory.holds == 1
        assert not p.scheduler.flush(p.now), "held pages are in use"
        return offer

    def _load(self, load: Load, offer: Handover) -> None:
        row = self.d.scheduler.state.table.row_of(load.number)
        assert self.d.scheduler.state.table.state[row] == RowState.LOADING
        first, arrived = load.start // PAGE, load.start
        if self.says("load") and self.says("read"):
            copy_marks(self.p, offer.pages[first : first + len(load.pages)], self.d, load.pages)
            arrived = load.start + len(load.pages) * PAGE
        if not self.says("arrived"):
            arrived = load.start
        self.d.apply(KvLoaded(load.number, arrived))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("broken", ["nothing", *MESSAGES])
def test_prefill_there_decode_here_whatever_message_is_lost(depth, broken):
    pair, tokens = Pair(depth, broken), prompt()
    assert pair.serve(tokens) == answer_of(tokens)
    computed = pair.d.scheduler.snapshot(1).counters.prefill_tokens
    moved = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    assert computed == len(tokens) - (moved if broken in ("nothing", "done") else 0)
    for yard in (pair.p, pair.d):
        assert yard.scheduler.idle() is None
        assert not yard.scheduler.state.memory.holds
        assert yard.scheduler.flush(yard.now)
        assert yard.scheduler.state.memory.allocator.available == yard.scheduler.state.memory.num_pages


def loading(yard: Yard, tokens: list[int], **fields) -> tuple[int, Load]:
    number = yard.submit(tokens, awaits_kv=True, **fields)
    yard.apply(KvAvailable(number, len(tokens)))
    assert not yard.launch()
    (load,) = yard.scheduler.drain_moves()
    return number, load


@pytest.mark.parametrize("leave", [lambda n: Cancel([n]), lambda n: Pause(numbers=[n]), lambda n: Pause("retract")])
def test_pages_that_are_being_written_have_one_owner(leave):
    yard = make_yard(pages=14)
    number, load = loading(yard, prompt())
    yard.apply(leave(number))
    yard.check()
    memory = yard.scheduler.state.memory
    assert memory.held_pages == len(load.pages)
    assert memory.free_tokens == (14 - len(load.pages)) * PAGE, "held pages are neither free nor coming"
    yard.apply(Resume())
    other = yard.submit(prompt(30, seed=2), max_new=4)
    yard.run()
    assert not set(load.pages.tolist()) & {page for plan in yard.plans for page in plan.page_ids.tolist()}
    assert other not in yard.finished, "it waits for the pages"
    yard.apply(KvLoaded(number, 0))
    assert not memory.holds
    yard.apply(Resume([number]))
    yard.run()
    assert yard.finished[other].reason == "length"
    yard.check()
    assert yard.scheduler.idle() is None


def test_a_second_load_begins_only_after_the_first_has_ended():
    yard, tokens = make_yard(), prompt()
    number, first = loading(yard, tokens, max_new=12)
    yard.apply(Pause(numbers=[number]))
    yard.apply(Resume([number]))
    yard.apply(KvAvailable(number, len(tokens)))
    assert not yard.launch(), "its first load still writes"
    assert not yard.scheduler.drain_moves()
    assert not yard.scheduler.requeued(9)
    yard.apply(KvLoaded(number, first.start + len(first.pages) * PAGE))
    table = yard.scheduler.state.table
    assert table.state[table.row_of(number)] == RowState.WAITING, "what came was not for the pages that it has now"
    assert not yard.scheduler.state.memory.holds
    assert not yard.launch()
    (second,) = yard.scheduler.drain_moves()
    yard.apply(KvLoaded(number, second.start))
    yard.run()
    assert yard.tokens[number] == answer_of(tokens)
    assert yard.scheduler.idle() is None


def test_a_load_that_was_given_up_is_named_again_once_it_has_ended():
    yard = make_yard()
    number, load = loading(yard, prompt())
    yard.apply(Pause(numbers=[number]))
    assert not yard.scheduler.requeued(9)
    yard.apply(KvLoaded(number, load.start))
    assert [one.number for one in yard.scheduler.requeued(9)] == [number]


def test_loads_given_up_again_and_again_lose_no_pages():
    yard = make_yard()
    number, _ = loading(yard, prompt())
    loads = 1
    for _ in range(3):
        yard.apply(Pause(numbers=[number]))
        yard.apply(Resume([number]))
        yard.apply(KvAvailable(number, 200))
        yard.launch()
        loads += len(yard.scheduler.drain_moves())
        yard.check()
    yard.apply(Cancel([number]))
    for _ in range(loads):
        yard.apply(KvLoaded(number, 0))
    assert yard.scheduler.idle() is None
    assert yard.scheduler.state.memory.allocator.available == 64


def test_a_loading_row_counts_wherever_a_place_counts():
    yard = make_yard(max_running_requests=1, queue_timeout_s=1.0, run_timeout_s=5.0)
    number, load = loading(yard, prompt())
    waiting = yard.submit(prompt(20, seed=3))
    assert not yard.launch(), "the only place is taken"
    assert yard.scheduler.explain(number, yard.now).stage == "loading"
    snapshot = yard.scheduler.snapshot(yard.now)
    assert (snapshot.loading, snapshot.waiting, snapshot.prefilling) == (1, 1, 0)
    yard.now += 2 * 10**9
    yard.launch()
    assert set(yard.finished) == {waiting}, "its queue timeout is over, its run timeout has begun"
    yard.now += 4 * 10**9
    yard.launch()
    assert yard.finished[number].cause == "run_timeout"
    assert yard.scheduler.state.memory.held_pages == len(load.pages)
    yard.apply(KvLoaded(number, 0))
    assert yard.scheduler.idle() is None


class Store:
    """Blocks by their digest, each with the marks of its pages."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.reads = 0

    def keep(self, yard: Yard, tokens: list[int], handover: Handover) -> None:
        per_block = BLOCK_TOKENS // PAGE
        pieces = yard.executor.pieces(handover.pages)
        for i, digest in enumerate(block_digests(np.array(tokens, np.int32))):
            spans = pieces.addresses[i * per_block : (i + 1) * per_block].ravel().tolist()
            self.blocks[digest] = b"".join(ctypes.string_at(span, pieces.nbytes) for span in spans)

    def reach(self, tokens: list[int]) -> int:
        digests = block_digests(np.array(tokens, np.int32))
        missing = [i for i, digest in enumerate(digests) if digest not in self.blocks]
        return (missing[0] if missing else len(digests)) * BLOCK_TOKENS

    def fill(self, yard: Yard, tokens: list[int], load: Load) -> int:
        digests = block_digests(np.array(tokens, np.int32))
        marks = b"".join(self.blocks[digest] for digest in digests if digest in self.blocks)
        pieces = yard.executor.pieces(load.pages)
        for i, address in enumerate(pieces.addresses.ravel().tolist()):
            start = (load.start // PAGE + i) * pieces.nbytes
            ctypes.memmove(address, marks[start : start + pieces.nbytes], pieces.nbytes)
        self.reads += 1
        return load.start + len(load.pages) * PAGE


def test_a_store_of_blocks_fills_the_tree_once_for_all_that_want_it():
    store, common = Store(), prompt(256)
    writer = make_yard()
    number = writer.submit(common, handover=True)
    writer.run()
    (handover,) = writer.scheduler.drain_moves()
    store.keep(writer, common, handover)
    writer.apply(PagesReleased(number))
    reader = make_yard()
    prompts = [[*common, *prompt(10 + i, seed=i)] for i in range(5)]
    numbers = [reader.submit(tokens, awaits_kv=True) for tokens in prompts]
    for number, tokens in zip(numbers, prompts, strict=True):
        reader.apply(KvAvailable(number, store.reach(tokens)))
    plain = reader.submit(prompt(40, seed=99))
    while len(reader.finished) < 6:
        step(reader, 1)
        loads = reader.scheduler.drain_moves()
        if loads and plain not in reader.finished:
            reader.run()
            assert plain in reader.finished, "those without a hit are never blocked"
        for load in loads:
            tokens = prompts[numbers.index(load.number)]
            reader.apply(KvLoaded(load.number, store.fill(reader, tokens, load)))
    assert store.reads == 1, "one load for all rows"
    assert [reader.tokens[n] for n in numbers] == [answer_of(tokens, 4) for tokens in prompts]
    assert [reader.finished[n].cached_tokens for n in numbers] == [256] * 5
    assert reader.scheduler.idle() is None


def test_requests_that_wait_for_a_load_continue_when_it_fails():
    yard, common = make_yard(), prompt(128)
    number, load = loading(yard, common)
    other = yard.submit([*common, 5], awaits_kv=True)
    yard.apply(KvAvailable(other, 128))
    assert not yard.launch()
    assert not yard.scheduler.drain_moves()
    yard.apply(KvLoaded(number, 15))
    yard.run()
    for load in yard.scheduler.drain_moves():
        yard.apply(KvLoaded(load.number, 0))
    yard.run()
    assert yard.tokens[number] == answer_of(common, 4)
    assert yard.tokens[other] == answer_of([*common, 5], 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_loads_holds_and_ends_keep_kv_accounting_right(depth):
    rng = random.Random(depth)
    yard = make_yard(pages=40, depth=depth, headroom="none")
    loads: list[Load] = []
    held: list[int] = []
    for turn in range(400):
        happens = rng.random()
        number = rng.randint(1, 120)
        if happens < 0.25 and turn < 350:
            tokens = prompt(rng.choice((20, 64, 130, 200)), seed=rng.randint(0, 2))
            fields = {"handover": True} if rng.random() < 0.3 else {"awaits_kv": rng.random() < 0.7}
            new = yard.submit(tokens, sampling=SamplingParams(max_new_tokens=rng.randint(0, 9)), **fields)
            if fields.get("awaits_kv"):
                yard.apply(rng.choice((KvAvailable(new, rng.randint(0, 300)), OpenGate(new, Gate.KV))))
        elif happens < 0.32:
            yard.apply(Cancel([number]))
        elif happens < 0.4:
            yard.apply(Pause(numbers=[number]))
            yard.apply(Resume([number]))
        elif happens < 0.43:
            yard.apply(Flush())
        step(yard, depth)
        for wanted in yard.scheduler.drain_moves():
            if isinstance(wanted, Load):
                loads.append(wanted)
            else:
                held.append(wanted.number)
        if (loads and rng.random() < 0.4) or turn > 360:
            for load in loads:
                yard.apply(KvLoaded(load.number, load.start))
            loads = []
        if held and rng.random() < 0.3:
            yard.apply(PagesReleased(held.pop()))
    for load in loads:
        yard.apply(KvLoaded(load.number, load.start))
    for number in held:
        yard.apply(PagesReleased(number))
    while yard.scheduler.has_work:
        yard.run(depth)
        for wanted in yard.scheduler.drain_moves():
            yard.apply(KvLoaded(wanted.number, 0) if isinstance(wanted, Load) else PagesReleased(wanted.number))
    for wanted in yard.scheduler.drain_moves():
        yard.apply(PagesReleased(wanted.number))
    assert yard.scheduler.idle() is None
    assert not yard.scheduler.state.memory.holds


@pytest.mark.parametrize(("token", "reason"), [(2, "stop"), (50, "length")])
def test_a_first_token_that_ends_the_answer_needs_no_pages(token, reason):
    yard = make_yard()
    number = yard.submit(prompt(), max_new=1 if reason == "length" else 9, awaits_kv=True)
    yard.apply(KvAvailable(number, 192, token))
    assert yard.tokens[number] == [token]
    assert (yard.finished[number].reason, yard.finished[number].completion_tokens) == (reason, 1)
    assert not yard.launch()
    assert not yard.scheduler.drain_moves()


def test_a_first_token_is_delivered_at_once_and_only_once():
    tokens, expected = prompt(), answer_of(prompt())
    yard = make_yard(pages=14)
    number = yard.submit(tokens, max_new=12, awaits_kv=True)
    yard.apply(KvAvailable(number, len(tokens), expected[0]))
    yard.apply(KvAvailable(number, len(tokens), expected[0] + 1))
    assert yard.tokens[number] == expected[:1]
    assert not yard.launch()
    (load,) = yard.scheduler.drain_moves()
    yard.apply(KvLoaded(number, load.start))
    yard.run()
    assert yard.tokens[number] == expected
    assert yard.finished[number].completion_tokens == 12
    assert yard.scheduler.idle() is None


def test_prompts_of_less_than_a_block_are_loaded_too():
    yard, tokens = make_yard(), prompt(40)
    number, load = loading(yard, tokens)
    assert len(load.pages) == 2
    yard.apply(KvLoaded(number, 0))
    yard.run()
    assert yard.tokens[number] == answer_of(tokens, 4)
