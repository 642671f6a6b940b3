"""Random inserts, evictions and splits under random waiting requests: the index says what matching would say."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tests.scheduler.harness import check_branch, hit_by_definition
from tokenyard.base import LogprobOptions, Request, SamplingParams, SchedulerSettings, WindowGroup
from tokenyard.scheduler.memory import KvMemory
from tokenyard.scheduler.request_table import RequestTable
from tokenyard.scheduler.waiting_index import WaitingIndex

# Few different tokens and repeated blocks, so that keys share prefixes and part in the middle of runs.
KEYS = st.lists(st.sampled_from([(5,), (6,), (5, 5, 5, 5), (5, 6, 5, 6, 5, 6, 7, 7)]), min_size=1, max_size=8).map(
    lambda parts: [token for part in parts for token in part]
)
SPACES = st.sampled_from(["", "", "lora\x00"])
GROUP_TOKENS = 4


class WaitingIndexMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 4]), late=st.booleans())
    def start(self, page_size, late):
        self.memory = KvMemory(SchedulerSettings(page_size=page_size), 2000, 4)
        self.table = RequestTable(4)
        self.index = WaitingIndex(self.table, GROUP_TOKENS)
        self.waiting: list[int] = []
        self.number = 0
        self.locked: list = []
        if not late:
            self.activate()

    def activate(self):
        self.index.activate(self.memory, self.waiting)

    @rule(key=KEYS, space=SPACES, prompt_from=st.sampled_from([-1, -1, 0, 3]))
    def arrive(self, key, space, prompt_from):
        self.number += 1
        prompt, options = np.array(key, np.int32), LogprobOptions(prompt_from=prompt_from)
        lora = space.partition("\x00")[0]
        request = Request(self.number, "r", prompt, SamplingParams(), logprobs=options, lora=lora)
        row = self.table.add(request, self.number, 1)
        self.waiting.append(row)
        self.index.add(row)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), ends=st.booleans())
    def leave(self, data, ends):
        row = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(row)
        self.index.remove(row)
        if ends:
            self.index.forget(row)
            self.table.remove(row)

    @rule(key=KEYS, space=SPACES)
    def insert(self, key, space):
        size = self.memory.page_size
        count = len(key) // size
        pages = self.memory.take_pages(count)
        tree = self.memory.tree
        inserted = tree.insert(np.array(key[: count * size], np.int32).tobytes(), pages, space)
        self.memory.allocator.free(pages[: inserted.present_tokens // size])

    @rule(key=KEYS, space=SPACES, lock=st.booleans())
    def match(self, key, space, lock):
        node = self.memory.tree.match(np.array(key, np.int32).tobytes(), space).node
        if lock:
            self.memory.tree.lock(node)
            self.locked.append(node)

    @precondition(lambda self: self.locked)
    @rule()
    def unlock(self):
        self.memory.tree.unlock(self.locked.pop())

    @rule(pages=st.integers(1, 12))
    def evict(self, pages):
        self.memory.allocator.free(self.memory.tree.evict(pages))

    @precondition(lambda self: not self.locked)
    @rule()
    def clear(self):
        self.memory.flush()

    @rule(off=st.booleans())
    def switch(self, off):
        if off:
            self.index.deactivate()
            assert all(node.tag is None for node in self.memory.tree.nodes())
        else:
            self.activate()

    @rule()
    def reset_memory(self):
        self.memory = KvMemory(SchedulerSettings(page_size=self.memory.page_size), 2000, 4)
        self.locked.clear()
        if self.index.active:
            self.activate()

    @invariant()
    def hits_are_what_matching_finds(self):
        if not getattr(self, "index", None) or not self.index.active:
            return
        for row in self.waiting:
            request = self.table.request(row)
            key = request.prompt_ids[: self.table.usable_tokens(row)].tobytes()
            assert self.table.matchable[row] == self.memory.tree.peek(key, request.namespace)

    @invariant()
    def weights_add_up(self):
        if getattr(self, "index", None) and self.index.active:
            assert self.index.forest.weight == len(self.waiting)
            assert sorted(check_branch(self.index.forest)) == sorted(self.waiting)
            tagged = [node for node in self.memory.tree.nodes() if node.tag is not None]
            assert all(node.tag.weight for node in tagged)

    @invariant()
    def groups_are_those_that_share_their_first_tokens(self):
        if not getattr(self, "index", None) or not self.index.active:
            return
        starts = {row: self._start(row) for row in self.waiting}
        for row, start in starts.items():
            group = self.table.prefix_group[row]
            assert (group >= 0) == (start is not None)
            same = [other for other in self.waiting if group >= 0 and self.table.prefix_group[other] == group]
            assert same == [other for other in self.waiting if start is not None and starts[other] == start]

    def _start(self, row):
        request = self.table.request(row)
        tokens = request.prompt_ids[:GROUP_TOKENS]
        return (request.namespace, tokens.tobytes()) if len(tokens) == GROUP_TOKENS else None


WaitingIndexMachine.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWaitingIndex = WaitingIndexMachine.TestCase


class Windowed:
    """Waiting requests over a tree whose pages lose and regain their window pages, drawn with a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.size, window = self.draw.choice((1, 1, 2)), self.draw.choice((2, 4, 9))
        settings = SchedulerSettings(page_size=self.size)
        self.memory = KvMemory(settings, 900, 1, WindowGroup(window, 900))
        self.table = RequestTable(4)
        self.index = WaitingIndex(self.table, GROUP_TOKENS)
        self.index.activate(self.memory, [])
        self.waiting: list[int] = []
        self.arrivals = self.changes = 0

    def prompt(self) -> np.ndarray:
        """Begins with a part of the same tokens as all others, then parts from them."""
        shared, own = self.draw.randint(0, 16), self.draw.randint(1, 12)
        return np.array([5] * shared + [self.draw.choice((5, 6)) for _ in range(own)], np.int32)

    def arrive(self) -> None:
        self.arrivals += 1
        request = Request(self.arrivals, "r", self.prompt(), SamplingParams())
        self.waiting.append(self.table.add(request, self.arrivals, 1))
        self.index.add(self.waiting[-1])

    def leave(self) -> None:
        if self.waiting:
            row = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            self.index.forget(row)
            self.table.remove(row)

    def insert(self) -> None:
        """As a row does that computes its whole prompt."""
        ids, memory, windows = self.prompt(), self.memory, self.memory.windows
        pages = memory.take_pages(len(ids) // self.size)
        inserted = memory.tree.insert(ids[: len(pages) * self.size].tobytes(), pages)
        present = inserted.present_tokens // self.size
        found = memory.tree.pages(inserted.node)[:present]
        if present:
            windows.replace(0, 0, pages[:present].copy(), found)
        windows.release_pages(found)
        windows.release_pages(pages[present:])
        memory.allocator.free(pages[:present])

    def lose(self) -> None:
        windows = self.memory.windows
        there = np.flatnonzero(windows.of).tolist()
        gone = self.draw.sample(there, min(len(there), self.draw.randint(1, 4)))
        if gone:
            # First in the order of eviction, of which at least a part of the pool goes.
            windows.rank[gone] = -1
            windows.num_pages, most = 0, windows.num_pages
            windows.evict(len(gone))
            windows.num_pages = most

    def evict(self) -> None:
        self.memory.allocator.free(self.memory.tree.evict(self.draw.randint(1, 6)))

    def match(self) -> None:
        self.memory.tree.match(self.prompt().tobytes())

    def turn(self) -> None:
        call = self.draw.choice(
            (self.arrive, self.arrive, self.leave, self.insert, self.lose, self.lose, self.lose, self.evict, self.match)
        )
        before = self.table.matchable[self.waiting].copy()
        call()
        if call == self.lose:
            self.changes += int((self.table.matchable[self.waiting] != before).sum())

    def check(self) -> None:
        for row in self.waiting:
            ids = self.table.request(row).prompt_ids[: self.table.usable_tokens(row)]
            hit = hit_by_definition(self.memory, ids, "")
            assert self.table.matchable[row] == self.memory.peek(ids.tobytes(), "") == hit


@pytest.mark.part(6)
@pytest.mark.parametrize("seed", range(6))
def test_hits_follow_window_pages(seed):
    world = Windowed(seed)
    for _ in range(400):
        world.turn()
        world.check()
    assert world.changes > 5, "window pages that hits need were lost"
