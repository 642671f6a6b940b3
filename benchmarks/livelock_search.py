"""Searches for livelocks: random programs on the scheduler core, until `--events` events were handled.

An event is a verb of the scheduler: what arrives, a plan that is asked for, a commit. Each program has random settings,
a small pool, one to three plans in flight and a few requests with cancels, pauses and changes between; the invariants
of a run are in `tests/scheduler/program_runs.py`. Prints counts, every seed that breaks a bound, and for each kind of
failure the first ones shrunk to a small program.

Run: python -m benchmarks.livelock_search [--events 10000000] [--seed 0] [--shrink 3] [--one SEED]
"""

import argparse
import collections
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, replace

from tests.scheduler.program_runs import Outcome, run_program
from tests.scheduler.random_programs import Job, Program, make_program
from tokenyard.base import ConfigError

MAX_TRIALS = 3000
REPORT_INTERVAL = 250_000


def shrink(program: Program, kind: str) -> Program:
    """The smallest program found that fails in the same way."""
    trials, smaller = 0, True
    while smaller and trials < MAX_TRIALS:
        smaller = False
        for candidate in _smaller(program):
            trials += 1
            if _kind(candidate) == kind:
                program, smaller = candidate, True
                break
    return program


def _kind(program: Program) -> str:
    try:
        return run_program(program).kind
    except ConfigError:
        return ""


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a little less in them, the greatest steps first."""
    count = len(program.script)
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield replace(program, script=program.script[:start] + program.script[start + size :])
        size //= 2
    for name in program.settings:
        yield replace(program, settings={other: program.settings[other] for other in program.settings if other != name})
    tenants = program.settings.get("tenants", {})
    for name in tenants:
        yield _with(program, tenants={other: tenants[other] for other in tenants if other != name})
        default = type(tenants[name])()
        for column in fields(default):
            if getattr(tenants[name], column.name) != getattr(default, column.name):
                plain = replace(tenants[name], **{column.name: getattr(default, column.name)})
                yield _with(program, tenants=tenants | {name: plain})
    depth, rows = program.settings.get("max_in_flight", 1), program.settings.get("max_running_requests", 256)
    if depth > 1:
        yield _with(program, max_in_flight=depth - 1)
    if 1 < rows < 256:
        yield _with(program, max_running_requests=rows - 1)
    if program.windows is not None:
        yield replace(program, windows=None)
    for name in ("noise", "drafts"):
        if getattr(program, name):
            yield replace(program, **{name: 0})
    if program.step_ns > 1_000_000:
        yield replace(program, step_ns=program.step_ns // 10)
    for place, (turn, entry) in enumerate(program.script):
        if turn:
            for earlier in {0, turn // 2, turn - 1}:
                yield _at(program, place, earlier, entry)
        if isinstance(entry, Job):
            for job in _smaller_jobs(entry):
                yield _at(program, place, turn, job)


def _smaller_jobs(job: Job) -> Iterator[Job]:
    for name in job.fields:
        yield replace(job, fields={other: job.fields[other] for other in job.fields if other != name})
    for name, least in (("prompt_tokens", 1), ("max_new", 1), ("n", 1), ("shared", 0), ("family", 0), ("begun", 0)):
        value = getattr(job, name)
        for less in sorted({least, (value + least) // 2, value - 1}):
            if least <= less < value and (name != "prompt_tokens" or less >= job.shared):
                yield replace(job, **{name: less})
    if job.answer_tokens < job.max_new:
        yield replace(job, answer_tokens=job.max_new)


def _with(program: Program, **settings) -> Program:
    return replace(program, settings=program.settings | settings)


def _at(program: Program, place: int, turn: int, entry) -> Program:
    script = deepcopy(program.script)
    script[place] = (turn, entry)
    return replace(program, script=sorted(script, key=lambda pair: pair[0]))


def show(program: Program) -> str:
    """The program, a line for each part."""
    lines = [f"    settings {program.settings}", f"    pages {program.pages} rows {program.pool_rows}"]
    lines[-1] += f" step_ns {program.step_ns} noise {program.noise} drafts {program.drafts} {program.windows}"
    return "\n".join([*lines, *(f"    turn {turn}: {entry}" for turn, entry in program.script)])


class Search:
    """Runs seeds one after the other and keeps count."""

    def __init__(self, shrunk: int) -> None:
        self._to_shrink = shrunk
        self.programs = 0
        self.total: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, list[int]] = {}
        self.most_recomputed = (0.0, 0)

    def run(self, seed: int) -> Outcome:
        """Run one seed, and tell of it if it fails."""
        program = make_program(seed)
        outcome = run_program(program)
        self.programs += 1
        for name in ("events", "steps", "tokens", "recomputed", "preempted", "retracted"):
            self.total[name] += getattr(outcome, name)
        if outcome.failure:
            seeds = self.failures.setdefault(outcome.kind, [])
            seeds.append(seed)
            print(f"seed {seed}: {outcome.failure}", flush=True)
            if len(seeds) <= self._to_shrink:
                small = shrink(program, outcome.kind)
                print(f"  shrunk: {run_program(small).failure}\n{show(small)}", flush=True)
        else:
            self.most_recomputed = max(self.most_recomputed, (outcome.recomputed_share, seed))
        return outcome

    def report(self, seconds: float) -> str:
        """Counts so far."""
        total = ", ".join(f"{value} {name}" for name, value in self.total.items())
        failed = ", ".join(f"{kind} {len(seeds)}" for kind, seeds in self.failures.items()) or "none"
        share, seed = self.most_recomputed
        return (
            f"{self.programs} programs, {total} in {seconds:.0f} s; failures: {failed}; most recomputed of a run that "
            f"passed: {share:.2f} of its tokens (seed {seed})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000, help="events to handle")
    parser.add_argument("--seed", type=int, default=0, help="first seed; the others follow it")
    parser.add_argument("--shrink", type=int, default=3, help="failures of each kind to shrink")
    parser.add_argument("--one", type=int, help="run and show this seed only")
    args = parser.parse_args()
    search, begin = Search(args.shrink), time.monotonic()
    if args.one is not None:
        print(f"{show(make_program(args.one))}\n{search.run(args.one)}")
        return
    seed, tell_at = args.seed, REPORT_INTERVAL
    while search.total["events"] < args.events:
        search.run(seed)
        seed += 1
        if search.total["events"] >= tell_at:
            tell_at += REPORT_INTERVAL
            print(search.report(time.monotonic() - begin), flush=True)
    print(search.report(time.monotonic() - begin))
    for kind, seeds in search.failures.items():
        print(f"{kind} {seeds}")


if __name__ == "__main__":
    main()
