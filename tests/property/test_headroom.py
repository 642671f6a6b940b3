"""`--headroom limit` retracts no request, whatever prefixes requests share and however steps are made up."""

import random
from dataclasses import replace

import pytest

from tests.examples import examples
from tests.scheduler.program_runs import ProgramRun
from tests.scheduler.random_programs import Job, Program, make_program

LEFT_OUT = ("schedule_conservativeness", "enable_hierarchical_cache", "hicache_write_policy")
SEEDS = [*range(max(examples(120), 60)), 136, 336]
"""In 136 the newcomer raises the peak of the rows that are left more than it raises that of all before a preemption. In
336 a row starts on a prefix that a preempted one releases once its step has committed."""


def sharing(seed: int) -> Program:
    """A random program with prefixes in common and prompts that repeat, without what the bound excludes:
    drafts, windows, and pages that others hold after their request.
    """
    program, draw, script = make_program(seed), random.Random(f"headroom {seed}"), []
    settings = {name: value for name, value in program.settings.items() if name not in LEFT_OUT}
    for turn, entry in program.script:
        if isinstance(entry, Job):
            fields = {name: value for name, value in entry.fields.items() if name != "handover"}
            shared = min(draw.choice((0, 8, 16, 30)), entry.prompt_tokens)
            entry = replace(entry, fields=fields, shared=shared, family=draw.randint(0, 2))
        script.append((turn, entry))
    jobs = [entry for _, entry in script if isinstance(entry, Job)]
    first = max(job.number + job.n for job in jobs)
    for number in range(first, first + draw.choice((0, 6, 14))):
        again = draw.choice(jobs)
        fields = {name: value for name, value in again.fields.items() if name not in ("awaits_kv", "grammar")}
        script.append((draw.randint(0, 40), replace(again, number=number, n=1, begun=0, fields=fields)))
    script.sort(key=lambda entry: entry[0])
    return replace(program, settings=settings, script=script, drafts=0, windows=None)


def retracted(program: Program, headroom: str) -> int:
    outcome = ProgramRun(replace(program, settings=program.settings | {"headroom": headroom})).run()
    assert outcome.failure == "", program
    return outcome.retracted


@pytest.mark.part(4)
@pytest.mark.parametrize("part", range(4))
def test_limit_retracts_no_request(part):
    for seed in SEEDS[part::4]:
        assert retracted(sharing(seed), "limit") == 0, f"seed {seed}"


@pytest.mark.slow
def test_the_same_programs_retract_requests_without_it():
    assert sum(retracted(sharing(seed), "none") for seed in range(12)) > 3
