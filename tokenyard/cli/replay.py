"""`tokenyard replay`: runs the scheduler on a tape again, with the recorded or with other settings."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.cli.flags import Flag, all_flags
from tokenyard.cli.simulation_arguments import (
    check_output,
    print_notes,
    print_outcomes,
    scheduler_flags,
    write_numbers,
)
from tokenyard.cli.terminal import command_line
from tokenyard.cost import find_profile
from tokenyard.sim.report.comparison import write_report
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.tape_workload import TapeHistory, write_trace
from tokenyard.sim.traces.trace_files import read_bytes
from tokenyard.sim.traces.workload import Workload
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.replay import Replay, ReplayReport

DIFFERENT = 1
OVERLAP_FLAG = "disable_overlap_schedule"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The changes to try: settings of the scheduler, and another device ("" for the tape's own)."""

    settings: dict[str, Any]
    profile: str


def replay(namespace: argparse.Namespace) -> int:
    """Replay the tape, then write or simulate the requested outputs. Returns 1, and does neither, if a plan differs
    from the tape's.
    """
    what_if = read_what_if(namespace)
    if namespace.json and what_if is None:
        raise ConfigError("--json writes the numbers of a simulation; give scheduler flags or --profile as well")
    if namespace.report and what_if is None:
        raise ConfigError("--report shows a simulation; give scheduler flags or --profile as well")
    outputs = {"--json": namespace.json, "--to-trace": namespace.to_trace, "--report": namespace.report}
    for flag, out in outputs.items():
        check_output(Path(out) if out else None, flag)
    path = Path(namespace.file)
    tape = Tape(read_bytes(path), path.name)
    history = TapeHistory(tape.header.origin)
    run = Replay(tape, history, namespace.user_policies)
    report = run.run()
    print_report(tape, report)
    if report.difference is not None:
        return DIFFERENT
    if namespace.to_trace or what_if is not None:
        workload = history.workload(path.name)
        if namespace.to_trace:
            write_trace(workload, Path(namespace.to_trace))
            print(f"wrote {len(workload)} requests to {namespace.to_trace}{_unknown(workload)}")
        if what_if is not None:
            workload.check_lengths()
            was = as_setup(tape.header.origin, history)
            lived = history.outcome(workload, was, run.scheduler.snapshot(0).counters)
            compare(history, lived, was, what_if, namespace)
    return 0


def _unknown(workload: Workload) -> str:
    unknown = workload.unknown_lengths
    return f"; {unknown} were refused or broken off: their length stays unknown (complete: false)" if unknown else ""


def read_what_if(namespace: argparse.Namespace) -> WhatIf | None:
    """The settings on the command line, None if there are none. Raises ConfigError for one that changes no plan."""
    given = [flag for flag in all_flags() if getattr(namespace, flag.name) is not None]
    if namespace.config is not None:
        raise ConfigError("replay starts from the settings on the tape; give changes as flags, not in a --config file")
    usable = {flag.name for flag in scheduler_flags()} | {OVERLAP_FLAG}
    for flag in given:
        if flag.name not in usable:
            raise ConfigError(f"{flag.positive[0]} does not change what the scheduler decides; replay cannot try it")
    settings = {flag.name: _value(flag, namespace) for flag in given}
    return WhatIf(settings, namespace.profile) if settings or namespace.profile else None


def _value(flag: Flag, namespace: argparse.Namespace) -> Any:
    return flag.read(getattr(namespace, flag.name), flag.positive[0])


def print_report(tape: Tape, report: ReplayReport) -> None:
    """Print the result of the replay."""
    header = tape.header
    print(f"{tape.name}: written by Tokenyard {header.written_by}, {'anonymized' if header.anonymized else 'plain'}")
    seconds = report.span_ns / 1e9
    print(f"{report.records} records over {seconds:.3f} s; {report.equal} of {report.plans} plans are identical")
    if tape.truncated_bytes:
        print(f"the tape is cut off: its last {tape.truncated_bytes} bytes are not a complete record")
    if report.last_error:
        print(f"the last call raised an error here: {report.last_error}")
    if (found := report.difference) is not None:
        print(f"the first difference is at record {found.record}, {found.after_ns / 1e9:.6f} s after the start:")
        print(f"  tape: {found.tape}")
        print(f"  here: {found.here}")


def as_setup(origin: Origin, history: TapeHistory) -> Setup:
    """The setup that reproduces the tape: its settings, and a device fitted to its steps."""
    profile = history.profile()
    if profile.error is not None:
        print(f"the cost model is fitted to the tape; its error is {100 * profile.error:.1f} % of a step on average")
    drafts = history.speculation
    return Setup(profile, origin.settings, host_s=history.host_s, learn=origin.learns, speculation=drafts)


def changed(setup: Setup, what_if: WhatIf) -> Setup:
    """The setup with the changes to try. Raises ConfigError for settings that cannot work."""
    given = dict(what_if.settings)
    pool_tokens = given.pop("max_total_tokens", None)
    if (serial := given.pop(OVERLAP_FLAG, None)) is not None:
        given["max_in_flight"] = 1 if serial else 2
    settings = replace(setup.settings, **given)
    settings.validate()
    if not what_if.profile:
        return replace(setup, settings=settings, kv_pool_tokens=pool_tokens)
    return replace(setup, profile=find_profile(what_if.profile), settings=settings, kv_pool_tokens=pool_tokens)


def compare(history: TapeHistory, lived: Outcome, was: Setup, what_if: WhatIf, namespace: argparse.Namespace) -> None:
    """Simulate the tape's traffic with its own and with other settings; print both next to the recorded results."""
    workload: Workload = lived.workload
    outcomes = {
        "on the tape": lived,
        "simulated": simulate(workload, was),
        "what if": simulate(workload, changed(was, what_if)),
    }
    results = {name: summary(outcome) for name, outcome in outcomes.items()}
    print_notes(history.notes())
    print_outcomes(results)
    write_numbers(Path(namespace.json) if namespace.json else None, results)
    if namespace.report:
        write_report(Path(namespace.report), outcomes, title=f"{workload.name}: what if", command=command_line())
