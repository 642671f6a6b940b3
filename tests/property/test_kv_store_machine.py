"""The KV store's machine, with a driver that answers in any order, late, in part or with errors.

No page is free while a copy uses it, each op is answered once, each request hears of its KV in time, and all comes to
rest.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenyard.base import NS_PER_S, KvAvailable, KvLoaded, Load, OpenGate, PagesReleased, Store
from tokenyard.base.blocks import StoredPrefix
from tokenyard.base.kv_store_limits import PREFETCH_POLICIES, KvStoreLimits
from tokenyard.cost import get_profile
from tokenyard.kv_store.machine import (
    MAX_BACKLOG,
    MAX_STAGED,
    NEVER_NS,
    Apply,
    BlockSizes,
    Cancel,
    Closing,
    Discard,
    Ended,
    Gather,
    Gathered,
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

BLOCK, PAGE, BLOCK_BYTES, GATE = 64, 16, 1 << 25, 16
COST = get_profile("h100", "llama-3-8b").cost()


@dataclass
class Waiting:
    """A request that the machine knows."""

    stored: StoredPrefix
    answers: int
    available: int = 0
    """Tokens that it heard it can load."""


def stored_prefix(first, found, fast, slow, spare=1):
    digests = [bytes([place]) for place in range(first + found + spare)]
    return StoredPrefix(digests, first, found, (first + found) * BLOCK, min(fast, found), min(slow, found))


class AnyDriver(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(PREFETCH_POLICIES), rate=st.sampled_from([0.0, 100.0]), in_store=st.booleans())
    def start(self, policy, rate, in_store):
        limits = KvStoreLimits(write_mb_s=rate, prefetch_policy=policy, timeout_s=0.5)
        self.machine = KvStoreMachine(limits, BlockSizes(BLOCK, PAGE, BLOCK_BYTES, 1e-4, 1e-3, in_store), COST, GATE)
        self.limits, self.now, self.last_number = limits, 1, 0
        self.open = {}
        self.cancelled, self.answered = set(), set()
        self.until_ns = {}
        self.staged, self.in_store = {}, in_store
        self.requests, self.loads, self.offers = {}, {}, {}
        self.gates = set()

    # ---- the driver -----------------------------------------------------------------------------------------------

    def tell(self, event):
        for action in self.machine.handle(event, self.now):
            match action:
                case Apply(event=applied):
                    self.applied(applied)
                case Cancel(op=op):
                    assert op in self.open, "only what is open is cancelled"
                    assert not isinstance(self.open[op], Write)
                    assert op not in self.cancelled, "once"
                    self.cancelled.add(op)
                case Discard(op=op):
                    del self.staged[op]
                case Write(op=op):
                    assert op in self.staged, "only what was gathered is written, once"
                    self.open[op] = action
                case Prefetch(op=op) | Read(op=op) | Gather(op=op):
                    assert op not in {*self.open, *self.answered}, "each op has a different number"
                    self.open[op] = action
                    if isinstance(event, Submitted):
                        self.may_take(op, event.stored.tokens - event.cached)
                    elif isinstance(event, Load):
                        self.may_take(op, len(event.pages) * PAGE)
        assert len([one for one in self.open.values() if isinstance(one, Write)]) <= 1
        gathering = [one for one in self.open.values() if isinstance(one, Gather)]
        limit = MAX_BACKLOG + 2 if self.in_store else MAX_STAGED
        assert len(gathering) + len(self.staged) <= limit

    def may_take(self, op, tokens):
        self.until_ns[op] = self.now + round(self.limits.prefetch_timeout_s(tokens) * NS_PER_S)

    def applied(self, event):
        match event:
            case PagesReleased(number=number):
                del self.offers[number]
                assert not any(isinstance(one, Gather) and one.offer.number == number for one in self.open.values())
            case KvLoaded(number=number, tokens=tokens):
                load = self.loads.pop(number)
                assert not any(isinstance(one, Read) and one.load.number == number for one in self.open.values())
                assert load.start <= tokens <= load.start + len(load.pages) * PAGE
                assert tokens % PAGE == 0
                self.requests.pop(number, None)
            case KvAvailable(number=number, tokens=tokens):
                request = self.requests[number]
                assert not request.available, "once"
                assert tokens <= request.stored.tokens
                request.available = tokens
                if not tokens:
                    del self.requests[number]
            case OpenGate(number=number, gate=gate):
                assert gate == GATE
                self.gates.remove(number)
            case other:
                raise AssertionError(other)

    def answer(self, op, part, error):
        action = self.open.pop(op)
        self.answered.add(op)
        seconds = 0.001 * (1 + op % 3) if part else 0.0
        match action:
            case Prefetch():
                blocks = int(part * (len(action.digests) - action.first))
                self.tell(Prefetched(op, blocks, seconds))
            case Read():
                blocks = int(part * (len(action.digests) - action.first))
                self.tell(ReadEnded(op, blocks, seconds))
            case Gather():
                total = len(action.offer.tokens) // BLOCK
                end = action.first + int(part * (total - action.first))
                blocks = min(end - action.first, action.max_blocks)
                end = min(end, action.first + blocks)
                if blocks:
                    self.staged[op] = blocks
                self.tell(Gathered(op, end, blocks))
                if end == action.first:
                    assert action.offer.number not in self.offers, "what cannot be gathered is dropped"
            case Write():
                blocks = self.staged.pop(op)
                self.tell(Wrote(op, 0, "disk full") if error else Wrote(op, blocks))

    # ---- what happens ---------------------------------------------------------------------------------------------

    @rule(
        first=st.integers(0, 3),
        found=st.integers(1, 40),
        fast=st.integers(0, 40),
        slow=st.integers(0, 40),
        answers=st.integers(1, 3),
    )
    def submit(self, first, found, fast, slow, answers):
        number = self.last_number + 1
        self.last_number += answers
        stored = stored_prefix(first, found, fast, min(slow, max(found - fast, 0)))
        self.requests[number] = Waiting(stored, answers)
        self.gates.update(range(number + 1, number + answers))
        self.tell(Submitted(number, stored, first * BLOCK, answers))
        if not self.machine.has_stored(number):
            del self.requests[number]
            self.gates.difference_update(range(number + 1, number + answers))
            assert not self.machine.awaits_kv(number)

    @rule(found=st.integers(1, 40), slow=st.integers(0, 40))
    def requeue(self, found, slow):
        self.last_number += 1
        stored = stored_prefix(0, found, 0 if slow else found, min(slow, found))
        self.requests[self.last_number] = Waiting(stored, 1)
        self.tell(Requeued(self.last_number, stored, 0))
        if not self.machine.has_stored(self.last_number):
            del self.requests[self.last_number]

    @precondition(lambda self: any(one.available for one in self.requests.values()))
    @rule(data=st.data())
    def load(self, data):
        ready = [number for number, one in self.requests.items() if one.available and number not in self.loads]
        if not ready:
            return
        number = data.draw(st.sampled_from(ready))
        request = self.requests[number]
        pages = request.available // PAGE
        start = data.draw(st.integers(request.stored.first * BLOCK // PAGE, pages - 1)) * PAGE
        load = Load(number, start, np.arange(pages - start // PAGE, dtype=np.int32))
        self.loads[number] = load
        self.tell(load)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(list(self.requests)))
        request = self.requests.pop(number)
        self.gates.difference_update(range(number + 1, number + request.answers))
        self.tell(Ended(number))

    @rule(blocks=st.integers(0, 9), spare=st.integers(0, 3))
    def offer(self, blocks, spare):
        number = -len(self.answered) - len(self.offers) - 1000 * (self.last_number + 1)
        self.last_number += 1
        tokens = np.zeros(blocks * BLOCK + spare * PAGE, np.int32)
        self.offers[number] = Store(number, "", tokens, np.zeros(len(tokens) // PAGE, np.int32))
        self.tell(self.offers[number])

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        part=st.sampled_from([0.0, 0.3, 0.9, 1.0, 1.0, 1.0]),
        error=st.sampled_from([False, False, True]),
    )
    def some_op_ends(self, data, part, error):
        self.answer(data.draw(st.sampled_from(list(self.open))), part, error)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 2.0, 8.0, 40.0]))
    def time_passes(self, seconds):
        self.now += round(seconds * NS_PER_S)
        self.tell(Tick())
        assert self.machine.next_ns() > self.now, "a tick settles what is due"
        late = {op for op, until_ns in self.until_ns.items() if until_ns <= self.now}
        assert late & self.open.keys() <= self.cancelled, "nothing waits longer than allowed"

    @rule()
    def prefix_cache_is_flushed(self):
        self.tell(StoresDropped())
        busy = {one.offer.number for one in self.open.values() if isinstance(one, Gather)}
        assert {*self.offers} == busy

    @rule()
    def closes(self):
        self.tell(Closing())

    # ---- what holds -----------------------------------------------------------------------------------------------

    @invariant()
    def pages_are_held_for_what_is_open(self):
        if not hasattr(self, "machine"):
            return
        reading = {one.load.number for one in self.open.values() if isinstance(one, Read)}
        assert {*self.loads} == reading
        assert self.machine.offers == len(self.offers)
        assert self.machine.loading == len(self.requests)

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        for _ in range(1000):
            if self.open:
                self.answer(min(self.open), 1.0, error=False)
            elif self.machine.storing and self.machine.next_ns() < NEVER_NS:
                self.now = max(self.now, self.machine.next_ns())
                self.tell(Tick())
            else:
                break
        assert not self.open
        assert (self.machine.storing, self.offers, self.loads, self.staged) == (0, {}, {}, {})
        assert all(request.available for request in self.requests.values()), "nothing waits for ever"
        assert not self.gates
        for number in list(self.requests):
            del self.requests[number]
            self.tell(Ended(number))
        assert self.machine.loading == 0


TestAnyDriver = AnyDriver.TestCase
TestAnyDriver.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestAnyDriverForLonger(AnyDriver.TestCase):
    settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
