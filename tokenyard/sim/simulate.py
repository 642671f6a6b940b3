"""Runs a workload through one engine, or through a fleet behind routers, in virtual time."""

import time
from collections.abc import Callable

from tokenyard.sim.engine.sim_scheduler import StepObserver
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.outcome import (
    FINISHED,
    REJECTED,
    UNFINISHED,
    DefaultSlo,
    Outcome,
    SchedulerRun,
    Setup,
    blank_outcome,
    executor_info,
)
from tokenyard.sim.traces.workload import Workload
from tokenyard.tape.recorder import Sink

__all__ = [
    "FINISHED",
    "REJECTED",
    "UNFINISHED",
    "DefaultSlo",
    "Outcome",
    "Progress",
    "SchedulerRun",
    "Setup",
    "blank_outcome",
    "executor_info",
    "simulate",
]

PROGRESS_REQUESTS = 256

Progress = Callable[[int, int], None]


def simulate(
    workload: Workload,
    setup: Setup,
    observer: StepObserver | None = None,
    progress: Progress | None = None,
    tape: Sink | None = None,
) -> Outcome:
    """Serve `workload` with `setup` and return the outcome.

    `observer` sees every step of the first scheduler and `tape` records it; `progress` is called with (submitted, all)
    at intervals.

    Raises ConfigError for settings that cannot work, and, with file and line, for a user policy that fails: the results
        would be those of fcfs.
    """
    begin = time.perf_counter()
    run = Simulation(workload, setup, observer, tape)
    for before in run.until_end():
        if before % PROGRESS_REQUESTS == 0:
            run.check_policy()
            if progress is not None:
                progress(before, len(workload))
    run.check_policy()
    outcome = run.outcome()
    outcome.wall_seconds = time.perf_counter() - begin
    if progress is not None:
        progress(len(workload), len(workload))
    return outcome
