"""Random programs on the core: each run ends within bounds that follow from its tokens (`scheduler/program_runs.py`).

`python -m benchmarks.livelock_search` runs as many more of them as one likes.
"""

import pytest

from benchmarks.livelock_search import shrink
from tests.examples import examples
from tests.scheduler.program_runs import run_program
from tests.scheduler.random_programs import Job, Program, make_program
from tokenyard.policy.wrappers import NonPreemptive, Wrapper

MAX_TOKENS = 200
BLOCKS, SEEDS = examples(600) // 100, 100


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_programs_end(block):
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        program = make_program(seed)
        if sum(job.most_tokens for job in program.jobs) <= MAX_TOKENS:
            outcome = run_program(program)
            assert not outcome.failure, f"python -m benchmarks.livelock_search --one {seed}"


def two_levels(**more):
    """Two requests of which the priorities name one first and the levels the other."""
    settings = {"enable_priority_scheduling": True, "enable_service_levels": True, "max_in_flight": 3} | more
    jobs = [Job(0, 9, 8, 8), Job(1, 5, 30, 30, fields={"service_class": "low", "priority": 30})]
    return Program(settings, pages=64, pool_rows=1, script=[(2 * job.number, job) for job in jobs])


def test_two_rules_that_undo_each_other_are_found_and_shrunk(monkeypatch):
    assert not run_program(two_levels()).failure
    monkeypatch.setattr(NonPreemptive, "outranked", Wrapper.outranked)
    program = two_levels(enable_mixed_chunk=True, page_size=2)
    kind = run_program(program).kind
    assert kind in ("livelock:", "thrash:", "recomputed:")
    small = shrink(program, kind)
    assert run_program(small).kind == kind
    assert "page_size" not in small.settings
    assert sum(job.most_tokens for job in small.jobs) < 20


def test_a_request_that_lacks_pages_waits_until_a_reader_outside_returns_some():
    """One that is alone would otherwise try again and again, and compute the same tokens each time."""
    jobs = [
        Job(0, 6, 4, 6),
        Job(1, 5, 1, 6, fields={"service_class": "high", "handover": True}),
        Job(4, 1, 1, 2),
        Job(5, 1, 1, 5),
    ]
    settings = {"max_in_flight": 2, "page_size": 4, "enable_service_levels": True}
    script = [(0, job) for job in (*jobs, Job(6, 1, 1, 1))]
    outcome = run_program(Program(settings, pages=4, pool_rows=2, script=script))
    assert not outcome.failure
    assert outcome.retracted == 1
