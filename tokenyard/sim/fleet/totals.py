"""What schedulers did in all, over the lives of each."""

from dataclasses import asdict

from tokenyard.base import NS_PER_S
from tokenyard.sim.engine.sim_scheduler import SimScheduler
from tokenyard.sim.outcome import SchedulerRun


def run_of(lives: list[SimScheduler]) -> SchedulerRun:
    """What a scheduler did in all its lives, one after the other."""
    counters = [asdict(life.scheduler.snapshot(life.now).counters) for life in lives]
    return SchedulerRun(sum(life.busy_ns for life in lives) / NS_PER_S, sum_of(counters), len(lives) - 1)


def sum_of(counters: list[dict[str, int]]) -> dict[str, int]:
    """Their sums, by name."""
    totals: dict[str, int] = {}
    for one in counters:
        for name, number in one.items():
            totals[name] = totals.get(name, 0) + number
    return totals
