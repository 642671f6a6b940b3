"""Bounds on waiting speak of progress: they hold again each time that a request has lost its place.

One long request in a pool that is too small stands against a flood of requests that its policy prefers. Each time that
it waits, what has passed it stays within the bound that the policy states (docs/policies.md).
"""

import random
from dataclasses import dataclass

import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import NS_PER_S, SchedulerSettings
from tokenyard.scheduler.row_state import RowState

PRIORITIES = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 1}
AGING_S, PROMOTE_S, MAX_WAIT_S = 0.005, 0.05, 0.2
DEADLINE_S = 0.2
ALONE_S = 0.16
"""What its prefill takes alone, by the cost model of a small CPU."""

MAX_OVERTAKEN, MAX_TURNS = 100, 2000
SHORT = (
    {"headroom": "ratio"},
    {"headroom": "none", "retraction_policy": "length"},
    {"headroom": "none", "retraction_policy": "newest"},
)


@dataclass
class Passed:
    """A later arrival that took a place for `tokens` tokens, while the long request waited with `long_tokens`."""

    since_ns: int
    now: int
    arrival_ns: int
    tokens: int
    long_tokens: int


class Flood:
    """A long request, and others that keep arriving. `passed` counts those that overtook it."""

    def __init__(self, depth, own, others, **settings):
        chosen = SchedulerSettings(context_length=120, max_running_requests=4, max_in_flight=depth, **settings)
        self.yard = Yard(chosen, make_info(110, 1, 4, 120))
        self.depth = depth
        self.draw = random.Random(1)
        self.others = others
        self.passed = []
        for _ in range(4):
            self.add()
        self.long = self.yard.submit([5] * 60, 40, **own)
        self.arrival_ns = self.since_ns = self.yard.now
        self.watch()

    def add(self):
        prompt, answer = [self.draw.randint(9, 90)] * self.draw.randint(6, 20), self.draw.randint(4, 20)
        self.yard.submit(prompt, answer, **self.others)

    def watch(self):
        state = self.yard.scheduler.state
        table, admit, retract = state.table, state.admit, state.retract

        def watched_admit(row, hit, now):
            long = table.row_of(self.long)
            if table.state[long] == RowState.WAITING and table.seq[row] > table.seq[long]:
                tokens = int(table.target[row]) - hit
                long_tokens = int(table.target[long] - table.matchable[long])
                self.passed.append(Passed(self.since_ns, now, int(table.arrival_ns[row]), tokens, long_tokens))
            admit(row, hit, now)

        def watched_retract(row, why, now):
            if table.number[row] == self.long:
                self.since_ns = now
            retract(row, why, now)

        state.admit, state.retract = watched_admit, watched_retract

    def run(self):
        """Run until the long request has its answer; what passed it."""
        for _ in range(MAX_TURNS):
            while len(self.yard.scheduler.state.waiting) < 4:
                self.add()
            self.yard.advance(self.depth)
            if self.long in self.yard.finished:
                assert self.yard.finished[self.long].completion_tokens == 40
                return self.passed
        raise AssertionError("the long request does not come to its end")


def none(flood, passed):
    assert not passed


def anything(flood, passed):
    """A share of the service: what passes has no bound but that the long request comes to its end."""


def shorter(flood, passed):
    """Those that have waited longer for each of their tokens."""
    for other in passed:
        waited_ns, long_waited_ns = other.now - other.arrival_ns, other.now - flood.arrival_ns
        assert waited_ns * other.long_tokens >= long_waited_ns * other.tokens


def within_aging(levels):
    def look(flood, passed):
        for other in passed:
            assert other.arrival_ns <= flood.arrival_ns + levels * AGING_S * NS_PER_S

    return look


def none_after_promotion(flood, passed):
    for other in passed:
        assert other.now - other.since_ns < PROMOTE_S * NS_PER_S


def none_after(seconds):
    def look(flood, passed):
        for other in passed:
            assert other.arrival_ns <= flood.arrival_ns + seconds * NS_PER_S

    return look


def bounded(flood, passed):
    for since_ns in {other.since_ns for other in passed}:
        assert sum(other.tokens for other in passed if other.since_ns == since_ns) <= MAX_OVERTAKEN


MLFQ = {"schedule_policy": "mlfq", "policy_options": {"quantum_tokens": 8, "promote_s": PROMOTE_S}}
SLO = {"slo_chunk_tokens": 4, "slo_ttft_ms": 1.0, "slo_ttft_scale": 0.0, "slo_max_wait_s": MAX_WAIT_S}
HITS_FIRST = {"schedule_policy": "hits-first", "policy_options": {"cheap_s": 0.05}, "session_max_wait_s": MAX_WAIT_S}
SESSION = HITS_FIRST | {"schedule_policy": "session"}
LEVELS = {"enable_service_levels": True, "service_level_quantum_tokens": 16}
BOUND = {"max_overtaken_tokens": MAX_OVERTAKEN}
CASES = {
    "fcfs": ({}, {}, {}, none),
    "hrrn": ({"schedule_policy": "hrrn"}, {}, {}, shorter),
    "mlfq": (MLFQ, {}, {}, none_after_promotion),
    "hits-first": (HITS_FIRST, {}, {}, none_after(MAX_WAIT_S)),
    "aged hits-first": (
        HITS_FIRST | PRIORITIES | {"priority_aging_s": AGING_S},
        {"priority": 0},
        {"priority": 10},
        within_aging(11),
    ),
    "bounded hits-first": (BOUND | HITS_FIRST, {}, {}, bounded),
    "session": (
        HITS_FIRST | {"schedule_policy": "session"},
        {"session": "a"},
        {"session": "b"},
        none_after(MAX_WAIT_S),
    ),
    "aged": (PRIORITIES | {"priority_aging_s": AGING_S}, {"priority": 0}, {"priority": 10}, within_aging(10)),
    "aged lof": (
        PRIORITIES | {"priority_aging_s": AGING_S, "schedule_policy": "lof"},
        {"priority": 0},
        {"priority": 10},
        within_aging(11),
    ),
    "edf": (
        {"schedule_policy": "edf", "slo_chunk_tokens": 4},
        {"deadline_ns": int(DEADLINE_S * NS_PER_S)},
        {"deadline_ns": 5_000_000},
        none_after(DEADLINE_S),
    ),
    "slo": (SLO | {"schedule_policy": "slo"}, {}, {}, none_after(MAX_WAIT_S + ALONE_S)),
    "vtc": ({"schedule_policy": "vtc"}, {"tenant": "a"}, {"tenant": "b"}, anything),
    "dlpm": ({"schedule_policy": "dlpm"}, {"tenant": "a"}, {"tenant": "b"}, anything),
    "levels": (LEVELS, {"service_class": "low"}, {"service_class": "high"}, anything),
    "strict level": (LEVELS, {"service_class": "low"}, {"service_class": "priority"}, anything),
    "bounded lof": (BOUND | {"schedule_policy": "lof"}, {}, {}, bounded),
    "bounded short-first": (BOUND | {"schedule_policy": "short-first"}, {}, {}, bounded),
    "bounded lpm": (BOUND | {"schedule_policy": "lpm"}, {}, {}, bounded),
    "bounded mlfq": (BOUND | MLFQ, {}, {}, bounded),
    "bounded priorities": (
        BOUND | PRIORITIES | {"priority_aging_s": 0.0},
        {"priority": 0},
        {"priority": 10},
        bounded,
    ),
}


@pytest.mark.part(10)
@pytest.mark.parametrize(
    ("case", "depth"), [(case, depth) for place, case in enumerate(CASES) for depth in (1, 2 + place % 2)]
)
def test_overtaking_of_a_long_request_stays_within_the_bound_each_time_it_waits(case, depth):
    settings, own, others, look = CASES[case]
    # One plan at a time meets each way of running out of pages with some of the cases, several plans with all of them.
    for short in SHORT if depth > 1 else [SHORT[[*CASES].index(case) % len(SHORT)]]:
        flood = Flood(depth, own, others, **settings, **short)
        look(flood, flood.run())
