"""Random stores, loads, failures and evictions between a scheduler and a store below it, in any order.

No page has two owners, holds and pages are back at the end, each request ends once, and no token is another one than
without a store: the KV marks of the mock move with the pages, so what is read wrongly fails its step.
"""

import random

import pytest

from tests.scheduler.test_store_queue import Below, make_yard, prompt
from tokenyard.base import Cancel, Pause, Resume, StateGroup
from tokenyard.kv_store.store import MemoryStore
from tokenyard.policy.state_retention import STATE_RETENTIONS

POLICIES = ("write_through", "write_through_selective", "write_back")
SEEDS = 8
TURNS = 150


def alone() -> list[list[int]]:
    """The answer to each prompt by a separate scheduler without a store."""
    answers = []
    for tokens in PROMPTS:
        yard = make_yard(enable_hierarchical_cache=False)
        number = yard.submit(tokens, max_new=12)
        yard.run()
        answers.append(yard.tokens[number])
    return answers


SHARED = prompt(140, seed=50)
PROMPTS = [SHARED + prompt(30 + 20 * seed, seed=seed) for seed in range(4)] + [prompt(90, seed=9), SHARED]


class Chaos:
    """One scheduler over a small pool, and a store that does what it should at random times, or not at all."""

    def __init__(self, seed: int, store: MemoryStore, answers: list[list[int]], *, states: bool = False) -> None:
        self.rng = random.Random(seed)
        self.depth = self.rng.choice([1, 2])
        policy = self.rng.choice(POLICIES)
        changes = {"max_in_flight": self.depth, "hicache_write_policy": policy}
        if states:
            changes["states"] = StateGroup(self.rng.choice([1, 3, 20]), track_interval=8)
            changes["mamba_retention_policy"] = self.rng.choice(STATE_RETENTIONS)
        self.below = Below(make_yard(pages=48, **changes), store)
        self.yard, self.answers = self.below.yard, answers
        self.asked: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.loads = 0

    def turn(self) -> None:
        rng, below, yard = self.rng, self.below, self.yard
        action = rng.choice(["ask", "run", "run", "run", "keep", "keep", "bring", "bring", "cancel", "pause", "forget"])
        match action:
            case "ask":
                which = rng.randrange(len(PROMPTS))
                self.asked[below.submit(PROMPTS[which], max_new=12)] = which
            case "run":
                yard.advance(self.depth)
            case "keep" if below.offers:
                below.keep(below.offers.pop(rng.randrange(len(below.offers))), fails=rng.random() < 0.2)
            case "bring" if below.loads:
                load = below.loads.pop(rng.randrange(len(below.loads)))
                self.loads += 1
                below.bring(load, most=rng.choice([0, 16, 80, 512, 512]))
            case "cancel" if self.asked and rng.random() < 0.3:
                number = rng.choice(list(self.asked))
                self.cancelled.add(number)
                yard.apply(Cancel([number]))
            case "pause" if self.asked and rng.random() < 0.3:
                number = rng.choice(list(self.asked))
                yard.apply(Pause(numbers=[number]))
                yard.apply(Resume([number]))
            case "forget" if rng.random() < 0.1:
                below.store.clear()
        below.collect()
        yard.check()

    def finish(self) -> None:
        """Let everything end, and check what is left."""
        below, yard = self.below, self.yard
        for _ in range(5000):
            idle = not yard.advance(self.depth)
            below.collect()
            while below.loads:
                below.bring(below.loads.pop())
            while below.offers:
                below.keep(below.offers.pop())
            yard.check()
            if idle and not (
                below.loads or below.offers or yard.scheduler.has_work or yard.scheduler.state.stores.waiting
            ):
                break
        memory = yard.scheduler.state.memory
        assert {*yard.finished} == {*self.asked}
        for number, which in self.asked.items():
            if number not in self.cancelled:
                assert yard.tokens[number] == self.answers[which]
        assert (memory.holds, yard.scheduler.state.stores.offered) == (0, 0)
        assert yard.scheduler.idle() is None
        assert yard.scheduler.flush(yard.now)
        assert memory.allocator.available == memory.num_pages


@pytest.mark.parametrize("states", [False, True])
def test_any_order_of_stores_loads_failures_and_evictions(states):
    answers, hits = alone(), 0
    for seed in (0, 1, 2, 6) if states else (1, 4, 5, 7):
        # A store of few blocks evicts; two schedulers after each other are a restart.
        store = MemoryStore(random.Random(seed).choice([3, 8, 100]))
        for part in range(2):
            chaos = Chaos(1000 * part + seed, store, answers, states=states)
            for _ in range(TURNS):
                chaos.turn()
            chaos.finish()
            hits += chaos.loads
    assert hits, "nothing was loaded"


@pytest.mark.slow
def test_more_orders_of_stores_loads_failures_and_evictions():
    answers = alone()
    for seed in range(SEEDS, 48):
        chaos = Chaos(seed, MemoryStore(random.Random(seed).choice([3, 8, 100])), answers, states=seed % 2 == 0)
        for _ in range(3 * TURNS):
            chaos.turn()
        chaos.finish()
