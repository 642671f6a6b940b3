"""Workloads for the Python API: recorded traces and synthetic traffic."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenyard.sim.traces.formats import detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions, Tokenize
from tokenyard.sim.traces.sessions import SessionOptions
from tokenyard.sim.traces.synthetic import synthetic as draw
from tokenyard.sim.traces.workload import Workload


def trace(
    path: Path | str,
    format: str | None = None,
    *,
    limit: int | None = None,
    rate_scale: float = 1.0,
    seed: int = 0,
    skip_bad_lines: bool = False,
    tokenize: Tokenize | None = None,
    sessions: SessionOptions | None = None,
    share_system_prompt: bool = False,
) -> Workload:
    """Read a trace file in any of the formats of docs/simulator.md; None detects the format from the first lines.

    limit: read only the first requests.
    rate_scale: factor on the arrival rate.
    seed: of everything that is drawn, such as arrivals within the tick of a coarse clock.
    tokenize: text to token ids, for traces that contain text.
    sessions: which sessions run and when they start, for traces of sessions.
    share_system_prompt: see `simulate --share-system-prompt`.
    Raises ConfigError, in one line, for a file that cannot be read.
    """
    path = Path(path)
    found = format or detect_format(path)
    options = ReadOptions(
        seed,
        tokenize,
        limit,
        skip_bad_lines,
        sessions=sessions or SessionOptions(),
        share_system_prompt=share_system_prompt,
    )
    workload = read_trace(path, found, options).scaled(rate_scale)
    guess = () if format else (f"{path.name} is read as {found}, by its first lines",)
    return replace(workload, remarks=guess + workload.remarks)


def synthetic(kind: str = "plain", requests: int = 1000, rate: float = 5.0, seed: int = 0) -> Workload:
    """Draw synthetic traffic: `plain`, `shared-prefix`, `multi-turn`, `bursts`, `tenants` or `classes`.

    rate: requests per second.
    Raises ConfigError for an unknown kind or numbers out of range.
    """
    return draw(kind, requests, rate, seed)


WorkloadOfSeed = Callable[[int], Workload]
"""Draws or reads the workload of a seed."""
