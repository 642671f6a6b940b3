"""For each way in which a row loses its place: a quantity that every such step brings down, so that it ends.

| way | quantity |
|---|---|
| a more urgent request (priority, edf, slo) | the sum of the keys that hold a place, or have one reserved |
| mlfq | the level of the request that holds the place; a request's level only sinks |
| a share of the pool | tokens that tenants hold beyond their shares, then rows of these tenants |
| pages run out | tokens still to be computed: a row comes back after an end, or with a page for each running row |
| prefills that hold all pages | prefills; the oldest keeps its pages |
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tests.scheduler.program_runs import BrokenRun, ProgramRun
from tests.scheduler.random_programs import Job, make_program
from tokenyard.base import KvAvailable, SchedulerSettings, TenantSettings
from tokenyard.scheduler.row_state import RowState

SEEDS = 80
ENOUGH = 10
"""So many times of a way are looked at."""
PRIORITIES = {"enable_priority_scheduling": True}
URGENCY = {
    "aged": PRIORITIES | {"priority_scheduling_preemption_threshold": 1, "priority_aging_s": 0.01},
    "not aged": PRIORITIES | {"priority_scheduling_preemption_threshold": 0, "priority_aging_s": 0.0},
    "around lpm": PRIORITIES | {"schedule_policy": "lpm", "priority_scheduling_preemption_threshold": 0},
    "around lof": PRIORITIES | {"schedule_policy": "lof", "priority_scheduling_preemption_threshold": 0},
    "around random": PRIORITIES | {"schedule_policy": "random", "priority_scheduling_preemption_threshold": 0},
    "around vtc": PRIORITIES | {"schedule_policy": "vtc", "priority_aging_s": 0.001},
    "edf": PRIORITIES | {"schedule_policy": "edf", "priority_scheduling_preemption_threshold": 0},
    "slo": PRIORITIES | {"schedule_policy": "slo", "priority_scheduling_preemption_threshold": 0},
}
SHARES = {"tenants": {"x": TenantSettings(kv_share=0.5), "y": TenantSettings(kv_share=0.2)}}
SHORT = {"headroom": "none", "schedule_conservativeness": 0.01}


def programs(count=SEEDS, **settings):
    """Random programs with these settings, in which nothing happens but arrivals, of requests and of their KV."""
    dropped = ("schedule_policy", "policy_options", "tenants", "enable_service_levels", "max_overtaken_tokens")
    for seed in range(count):
        program = make_program(seed)
        if "enable_priority_scheduling" in program.settings and "enable_priority_scheduling" not in settings:
            continue
        kept = {name: value for name, value in program.settings.items() if name not in dropped}
        script = [entry for entry in program.script if isinstance(entry[1], Job | KvAvailable)]
        yield replace(program, settings=kept | settings, script=script)


class Watched(ProgramRun):
    """A run that counts how often the way that it watches was taken."""

    times = 0

    @property
    def state(self):
        return self.scheduler.state

    def holders(self):
        # A row whose last chunk this step has planned is in both lists until the step is planned.
        return np.unique(np.concatenate((self.state.running.rows, self.state.prefilling.rows)))


def times_watched(kind, **settings):
    """Run programs under the watch of `kind` until the way was taken often enough; how often it was."""
    times = 0
    for program in programs(**settings):
        run = kind(program)
        assert run.run().failure == "", program
        times += run.times
        if times > ENOUGH:
            break
    return times


class UrgencyWatch(Watched):
    """The place goes to a strictly better key, and no key changes; a victim returns after its preemptor."""

    def __init__(self, program):
        super().__init__(program)
        self.keys = {}
        self.waits_for = {}

    def key(self, row):
        (key,) = self.state.policy.urgency.keys(self.state.table, np.array([row], np.int32)).tolist()
        number = int(self.state.table.number[row])
        assert self.keys.setdefault(number, key) == key, "the key changes with the place"
        return key

    def on_preempt(self, victim, preemptor):
        self.times += 1
        held = sum(self.key(row) for row in self.holders())
        assert held - self.key(victim) + self.key(preemptor) < held
        self.waits_for[int(self.state.table.number[victim])] = int(self.state.table.number[preemptor])

    def on_admit(self, row):
        super().on_admit(row)
        preemptor = self.state.table.row_of(self.waits_for.pop(int(self.state.table.number[row]), -1))
        if preemptor is not None and self.state.table.state[preemptor] == RowState.WAITING:
            raise BrokenRun("undone: a victim is back before the request that preempted it")


@pytest.mark.part(9)
@pytest.mark.parametrize("way", URGENCY)
def test_the_keys_of_running_rows_get_more_urgent(way):
    # A request without a priority ranks below the lowest ever given, which each arrival may lower.
    assert times_watched(UrgencyWatch, default_priority_value=0, **URGENCY[way]) > 5


class LevelWatch(Watched):
    """mlfq: the place goes to a higher level, and no request ever rises."""

    def __init__(self, program):
        super().__init__(program)
        self.sunk = {}

    def level(self, row):
        (level,) = self.state.policy.levels(np.array([row], np.int32)).tolist()
        number = int(self.state.table.number[row])
        assert level >= self.sunk.get(number, 0), "a request rises, and may take back what was taken from it"
        self.sunk[number] = level
        return level

    def on_preempt(self, victim, preemptor):
        self.times += 1
        assert self.level(preemptor) < self.level(victim)


@pytest.mark.parametrize("quantum", [1, 4])
def test_mlfq_gives_the_place_to_a_higher_level_and_levels_only_sink(quantum):
    options = {"quantum_tokens": quantum, "promote_s": 0.02}
    assert times_watched(LevelWatch, schedule_policy="mlfq", policy_options=options) > 5


class ShareWatch(Watched):
    """A claim takes from a tenant beyond its share, for a request that borrows nothing, and brings down what is
    borrowed by what only the victim held of what its tenant holds.
    """

    def used(self, tenant, without=-1):
        """Tokens that rows of a tenant hold, each page of the tree once, seen from their page tables."""
        table, size, pages, private = self.state.table, self.state.memory.page_size, set(), 0
        rows = self.holders()
        for row in rows[(table.tenant[rows] == tenant) & (rows != without)].tolist():
            pages |= set(self.state.memory.pool.page_table[table.pool_row[row], : table.cached[row] // size].tolist())
            # Tokens of steps in flight do not count, as a row would lose them with its place.
            private += int(min(table.held[row], table.known[row]) - table.cached[row])
        return private + size * len(pages)

    def share(self, row):
        settings = SHARES["tenants"].get(self.state.table.request(row).tenant)
        return settings.kv_share * self.state.memory.num_pages * self.state.memory.page_size if settings else 0.0

    def borrowed(self):
        total = self.state.memory.num_pages * self.state.memory.page_size
        measures = self.state.limits.measures(self.state.table, self.holders(), total, self.state.holders)
        return measures["borrowed_tokens"]

    def on_preempt(self, victim, preemptor):
        self.times += 1
        tenant, share = self.state.table.tenant[victim], self.share(victim)
        used, left = self.used(tenant), self.used(tenant, victim)
        assert left <= used > share, "the victim's tenant is within its share"
        self.expected = self.borrowed() - (used - max(left, share))
        same = self.state.table.tenant[preemptor]
        assert self.used(same) + int(self.state.table.target[preemptor]) <= self.share(preemptor)

    def on_retracted(self, row):
        if self.expected is not None:
            assert self.borrowed() == pytest.approx(self.expected)
        self.expected = None

    expected = None


@pytest.mark.part(4)
@pytest.mark.parametrize("policy", ["fcfs", "vtc", "short-first", "lpm"])
def test_a_claim_reduces_what_is_borrowed(policy):
    assert times_watched(ShareWatch, schedule_policy=policy, **SHARES) > 5


class PageWatch(Watched):
    """A retracted row returns after an end, or when a page is free for each running row."""

    def __init__(self, program):
        super().__init__(program)
        self.short = {}

    def on_retract(self, row, why):
        super().on_retract(row, why)
        state, number = self.state, int(self.state.table.number[row])
        if state.table.state[row] == RowState.RUNNING:
            self.times += 1
            self.short[number] = state.observer.counters.finished + state.observer.counters.aborted
            assert len(state.running) + len(state.prefilling) > 1, "the last row gives its pages to no other"

    def on_admit(self, row):
        super().on_admit(row)
        state, table, memory = self.state, self.state.table, self.state.memory
        ended = self.short.pop(int(table.number[row]), None)
        if (
            ended is None
            or ended < state.observer.counters.finished + state.observer.counters.aborted
            or not len(self.holders())
        ):
            return
        # The pages of its first chunk are not taken yet; those of its prefix are locked, so not free.
        assert memory.free_tokens >= memory.page_size * len(state.running), "it takes what it has just given up"


@pytest.mark.part(3)
@pytest.mark.parametrize("retraction", ["length", "newest", "priority", "slack", "fewest-lost"])
@pytest.mark.parametrize("interval", [0, 8])
def test_a_retracted_row_is_resumed_when_it_takes_nothing_from_the_others(retraction, interval):
    settings = SHORT | {"retraction_policy": retraction, "prefill_decode_interval": interval, "context_length": 100}
    assert times_watched(PageWatch, schedule_policy="fcfs", **settings) > 5


def test_prefills_that_hold_all_pages_leave_them_to_the_oldest():
    """Admission reserves the rest of each prompt, so it takes pages that are lost on the way to come to this."""
    settings = SchedulerSettings(
        schedule_policy="edf", step_budget="tokens", max_partial_prefills=4, chunked_prefill_size=4, context_length=100
    )
    yard = Yard(settings, make_info(pages=88, rows=4, context=100))
    state, numbers = yard.scheduler.state, []
    for deadline_ms in (400, 300, 200, 100):
        numbers.append(yard.submit([5 + deadline_ms] * 20, max_new=2, deadline_ns=deadline_ms * 1_000_000))
        yard.advance()
    assert len(state.prefilling) == 4
    lost = state.memory.allocator.alloc(state.memory.allocator.available - 8)
    retract, left = state.retract, []

    def watched(row, why, now):
        if state.table.state[row] == RowState.PREFILL:
            assert row == state.prefilling.rows[-1]
            left.append(len(state.prefilling))
        retract(row, why, now)

    state.retract = watched
    while numbers[0] not in yard.finished:
        assert yard.advance()
    assert left
    assert left == list(range(4, 4 - len(left), -1)), "the number of prefills falls each time"
    state.memory.allocator.free(lost)
    yard.run()
    assert sorted(yard.finished) == numbers
    assert {finish.reason for finish in yard.finished.values()} == {"length"}
