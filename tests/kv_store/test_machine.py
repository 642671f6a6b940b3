"""What the KV store's machine decides, event by event."""

from dataclasses import replace

import numpy as np
import pytest

from tokenyard.base import NS_PER_S, KvAvailable, KvLoaded, Load, OpenGate, PagesReleased, Store
from tokenyard.base.blocks import StoredPrefix
from tokenyard.base.kv_store_limits import KvStoreLimits
from tokenyard.cost import get_profile
from tokenyard.kv_store.machine import (
    FIND_INTERVAL_NS,
    MAX_BACKLOG,
    MAX_BACKOFF_NS,
    MIN_BACKOFF_NS,
    NEVER_NS,
    STAGED_BYTES,
    WRITE_TIMEOUT_NS,
    Apply,
    BlockSizes,
    Cancel,
    Closing,
    Discard,
    Ended,
    Find,
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

BLOCK, PAGE, GATE = 64, 16, 16
BLOCK_BYTES = STAGED_BYTES // 4
COST = get_profile("h100", "llama-3-8b").cost()
FAST_S, SLOW_S = 1e-5, 1e-4


def machine(*, in_store=False, **limits):
    given = KvStoreLimits(**{"write_mb_s": 0.0} | limits)
    return KvStoreMachine(given, BlockSizes(BLOCK, PAGE, BLOCK_BYTES, FAST_S, SLOW_S, in_store), COST, GATE)


def stored(found, fast=0, first=0):
    """A prefix of `found` blocks, the first `fast` of which are in host memory."""
    digests = [bytes([place]) for place in range(first + found)]
    return StoredPrefix(digests, first, found, (first + found) * BLOCK, fast, found - fast)


def offer(blocks, number=-1):
    return Store(number, "", np.zeros(blocks * BLOCK, np.int32), np.arange(blocks * BLOCK // PAGE, dtype=np.int32))


def load(number, blocks, start=0):
    return Load(number, start, np.arange(blocks * BLOCK // PAGE - start // PAGE, dtype=np.int32))


def test_a_request_is_prefetched_then_read():
    kv = machine()
    found = stored(10)
    (prefetch,) = kv.handle(Submitted(7, found, 0, answers=3), 0)
    assert prefetch == Prefetch(1, found.digests, 0)
    assert kv.awaits_kv(7)
    available = [Apply(KvAvailable(7, 640)), Apply(OpenGate(8, GATE)), Apply(OpenGate(9, GATE))]
    assert kv.handle(Prefetched(1, 10, 0.0), 1) == available
    wanted = load(7, 10, start=80)
    assert kv.handle(wanted, 2) == [Read(2, found.digests, 1, 10, wanted)]
    assert kv.handle(ReadEnded(2, 9, 0.0), 3) == [Apply(KvLoaded(7, 640))]
    assert (kv.counters.hit_requests, kv.counters.loaded_tokens, kv.loading) == (1, 560, 0)
    assert kv.next_ns() == NEVER_NS


@pytest.mark.parametrize("missing", [0, 1])
def test_kv_without_its_state_is_no_use(missing):
    kv = KvStoreMachine(
        KvStoreLimits(), BlockSizes(BLOCK, PAGE, BLOCK_BYTES, FAST_S, SLOW_S, state_blocks=2), COST, GATE
    )
    found = replace(stored(12), tokens=640, state_blocks=2)
    for number, ready in ((7, 12), (8, 11)):
        kv.handle(Submitted(number, found, 0), 0)
        expected = 640 if ready == 12 else 0
        assert kv.handle(Prefetched(number - 6, ready, 0.0), 1)[0] == Apply(KvAvailable(number, expected))
    wanted = replace(load(7, 10), state_slot=3)
    assert kv.handle(wanted, 2) == [Read(3, found.digests, 0, 12, wanted)]
    assert kv.handle(ReadEnded(3, 12 - missing, 0.0), 3) == [Apply(KvLoaded(7, 0 if missing else 640))]
    assert (kv.counters.failed_loads, kv.counters.loaded_tokens) == (missing, 0 if missing else 640)
    (gather,) = kv.handle(replace(offer(2), state_slot=3), 4)
    assert kv.handle(Gathered(gather.op, 4, 4), 5) == [Apply(PagesReleased(-1)), Write(gather.op)]


def test_best_effort_waits_for_nothing():
    kv = machine(prefetch_policy="best_effort")
    kv.handle(Submitted(7, stored(10), 0), 0)
    assert not kv.awaits_kv(7)
    assert kv.has_stored(7)


@pytest.mark.parametrize(("slow_s", "taken"), [(1e-4, 10), (1.0, 4)])
def test_only_what_is_in_host_memory_is_taken_where_the_rest_does_not_pay(slow_s, taken):
    kv = machine()
    kv.slow_s = slow_s
    (prefetch,) = kv.handle(Submitted(7, stored(10, fast=4), 0), 0)
    assert len(prefetch.digests) == taken
    assert kv.handle(Prefetched(1, taken, 0.0), 0) == [Apply(KvAvailable(7, taken * BLOCK))]


def test_what_does_not_pay_is_computed():
    kv = machine()
    kv.slow_s = 1.0
    assert kv.handle(Submitted(7, stored(10), 0), 0) == []
    assert (kv.awaits_kv(7), kv.counters.recomputed_requests) == (False, 1)
    assert kv.handle(Requeued(7, stored(10), 0), 0) == []


def test_a_timeout_cancels_and_the_answer_says_how_far_the_kv_reaches():
    kv = machine(timeout_s=0.5, timeout_per_1k_tokens_s=0.0)
    kv.handle(Submitted(7, stored(10), 0), 0)
    due = kv.next_ns()
    assert due == NS_PER_S // 2
    assert kv.handle(Tick(), due - 1) == [Find(8)]
    assert kv.handle(Tick(), due) == [Cancel(1)]
    assert kv.handle(Prefetched(1, 3, 0.5), due) == [Apply(KvAvailable(7, 192))]
    kv.handle(load(7, 3), due)
    late = kv.next_ns()
    assert Cancel(2) in kv.handle(Tick(), late)
    assert kv.handle(ReadEnded(2, 2, 0.5), late + 1) == [Apply(KvLoaded(7, 128))]
    assert (kv.counters.late_loads, kv.counters.failed_loads) == (1, 0)


def test_a_request_that_ends_keeps_its_pages_until_its_read_has_ended():
    kv = machine()
    kv.handle(Submitted(7, stored(10), 0), 0)
    kv.handle(Prefetched(1, 10, 0.0), 0)
    kv.handle(load(7, 10), 0)
    assert kv.handle(Ended(7), 1) == [Cancel(2)]
    assert kv.loading == 0
    assert kv.handle(Tick(), 100 * NS_PER_S) == [Find(8)]
    assert kv.handle(ReadEnded(2, 1, 0.0), 2) == [Apply(KvLoaded(7, 64))]
    assert (kv.counters.late_loads, kv.counters.failed_loads) == (0, 0)


def test_retracted_requests_are_looked_up_now_and_then():
    kv = machine()
    assert kv.handle(Tick(), 0) == [Find(8)]
    assert kv.handle(Tick(), FIND_INTERVAL_NS - 1) == []
    assert kv.handle(Tick(), FIND_INTERVAL_NS) == [Find(8)]
    assert kv.handle(Requeued(7, stored(2), 0), 0) == [Apply(KvAvailable(7, 128))]
    assert kv.counters.swapped_in_requests == 1


def test_it_learns_how_fast_blocks_come():
    kv = machine()
    kv.handle(Submitted(7, stored(10), 0), 0)
    kv.handle(Prefetched(1, 10, 10 * 11 * SLOW_S), 0)
    assert kv.slow_s == pytest.approx(3 * SLOW_S)
    kv.handle(load(7, 10), 0)
    kv.handle(ReadEnded(2, 10, 10 * 6 * FAST_S), 0)
    assert kv.fast_s == pytest.approx(2 * FAST_S)
    # A store that delivers nothing in time is slow, too.
    kv.handle(Submitted(8, stored(10), 0), 0)
    kv.handle(Tick(), 9 * NS_PER_S)
    kv.handle(Prefetched(3, 0, 5.0), 0)
    assert kv.slow_s > 1.0


def test_an_offer_goes_through_staging_run_by_run_and_its_pages_are_free_when_it_is_gathered():
    kv, offered = machine(), offer(10)
    assert kv.handle(offered, 0) == [Gather(1, offered, 0, 4)]
    assert kv.handle(Gathered(1, 5, 4), 0) == [Gather(2, offered, 5, 4), Write(1)]
    assert kv.handle(Gathered(2, 9, 4), 0) == [], "two runs are staged"
    assert kv.handle(Wrote(1, 4), 0) == [Gather(3, offered, 9, 4), Write(2)]
    assert kv.handle(Gathered(3, 10, 1), 0) == [Apply(PagesReleased(-1))]
    assert kv.handle(Wrote(2, 4), 0) == [Write(3)]
    assert kv.handle(Wrote(3, 1), 0) == []
    assert (kv.storing, kv.counters.written_bytes) == (0, 9 * BLOCK_BYTES)


def test_what_the_store_has_is_not_written():
    kv = machine()
    kv.handle(offer(10), 0)
    assert kv.handle(Gathered(1, 10, 0), 0) == [Apply(PagesReleased(-1))]
    assert kv.storing == 0


def test_writes_keep_to_their_limit_until_the_engine_ends():
    kv = machine(write_mb_s=BLOCK_BYTES / 1e6)
    kv.handle(offer(8), 0)
    kv.handle(Gathered(1, 4, 4), 0)
    kv.handle(Gathered(2, 8, 4), 0)
    assert kv.handle(Wrote(1, 4), 1) == []
    assert kv.next_ns() == 4 * NS_PER_S
    assert Write(2) not in kv.handle(Tick(), 4 * NS_PER_S - 1)
    assert kv.handle(Closing(), 5) == [Write(2)]


def test_after_a_write_that_failed_nothing_is_stored_for_a_while():
    kv, now, pauses = machine(), 0, []
    (gather,) = kv.handle(offer(2), now)
    assert Write(gather.op) in kv.handle(Gathered(gather.op, 2, 2), now)
    for _ in range(7):
        # What was gathered meanwhile is written when the pause is over; all else is dropped.
        (gather,) = kv.handle(offer(1), now)
        assert kv.handle(Wrote(gather.op - 1, 0, "full"), now) == [Cancel(gather.op)]
        kv.handle(Gathered(gather.op, 1, 1), now)
        assert kv.handle(offer(3, number=-9), now) == [Apply(PagesReleased(-9))]
        pauses.append(kv.next_ns() - now)
        now = kv.next_ns()
        assert Write(gather.op) in kv.handle(Tick(), now)
    assert (pauses[0], pauses[1], pauses[-1]) == (MIN_BACKOFF_NS, 2 * MIN_BACKOFF_NS, MAX_BACKOFF_NS)
    assert (kv.counters.failed_writes, kv.counters.dropped_blocks) == (7, 7 * 3 + 2 + 6)
    kv.handle(Wrote(gather.op, 1), now)
    (gather,) = kv.handle(offer(2), now)
    kv.handle(Gathered(gather.op, 2, 2), now)
    kv.handle(Wrote(gather.op, 0, "full"), now)
    kv.handle(Tick(), now + MIN_BACKOFF_NS)
    assert isinstance(kv.handle(offer(1), now + MIN_BACKOFF_NS)[0], Gather), (
        "a write that succeeds ends the longer pauses"
    )


def test_a_write_that_hangs_holds_no_pages():
    kv = machine()
    kv.handle(offer(4, number=-1), 0)
    assert Apply(PagesReleased(-1)) in kv.handle(Gathered(1, 4, 4), 0)
    kv.handle(offer(4, number=-2), 0)
    kv.handle(offer(4, number=-3), 0)
    assert kv.next_ns() == WRITE_TIMEOUT_NS
    assert kv.handle(Tick(), WRITE_TIMEOUT_NS)[:2] == [Cancel(2), Apply(PagesReleased(-3))]
    assert kv.handle(Gathered(2, 0, 0), WRITE_TIMEOUT_NS) == [Apply(PagesReleased(-2))]
    assert kv.handle(offer(4, number=-4), WRITE_TIMEOUT_NS) == [Apply(PagesReleased(-4))]
    assert kv.next_ns() == NEVER_NS
    kv.handle(Wrote(1, 4), 2 * WRITE_TIMEOUT_NS)
    assert isinstance(kv.handle(offer(4, number=-5), 2 * WRITE_TIMEOUT_NS)[0], Gather)


def test_host_memory_in_front_of_a_store_does_not_wait_for_it():
    kv, discarded = machine(in_store=True), []
    for number in range(1, MAX_BACKLOG + 5):
        (gather,) = (one for one in kv.handle(offer(4, number=-number), 0) if isinstance(one, Gather))
        actions = kv.handle(Gathered(gather.op, 4, 4), WRITE_TIMEOUT_NS)
        assert Apply(PagesReleased(-number)) in actions
        discarded += [one.op for one in actions if isinstance(one, Discard)]
    # The first run is being written and hangs.
    assert discarded == [2, 3, 4]
    assert kv.counters.dropped_blocks == 3 * 4
    assert Write(5) not in kv.handle(Wrote(1, 0, "full"), WRITE_TIMEOUT_NS)
    assert isinstance(kv.handle(offer(4), WRITE_TIMEOUT_NS)[0], Gather), "a pause is for the disk alone"
    assert kv.counters.dropped_blocks == 4 * 4


def test_offers_are_dropped_before_a_flush():
    kv = machine()
    kv.handle(offer(4, number=-1), 0)
    kv.handle(offer(4, number=-2), 0)
    assert kv.handle(StoresDropped(), 0) == [Cancel(1), Apply(PagesReleased(-2))]
    assert kv.handle(StoresDropped(), 0) == []
    assert kv.handle(Gathered(1, 0, 0), 0) == [Apply(PagesReleased(-1))]


def test_an_answer_that_nothing_asked_for_is_refused():
    kv = machine()
    for event in (Prefetched(1, 0, 0.0), ReadEnded(1, 0, 0.0), Gathered(1, 0, 0), Wrote(1, 0), load(7, 1)):
        with pytest.raises(ValueError, match=r"not open|no stored KV"):
            kv.handle(event, 0)
