"""Many runs from Python: every combination of parameters, each with several seeds, over processes, resumable."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError
from tokenyard.base.version import __version__
from tokenyard.sim.api.engine import Engine, policy_name
from tokenyard.sim.api.plots import axes_or_new, plot_lines
from tokenyard.sim.api.run import progress_bar
from tokenyard.sim.api.workloads import WorkloadOfSeed
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.outcome import Setup
from tokenyard.sim.planner.trial import reseeded
from tokenyard.sim.report.intervals import Interval, figure, interval
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.workload import COLUMNS, Workload

RUNS_FILE = "runs.jsonl"
DIGEST_BYTES = 16
METRICS = ("slo_attainment", "ttft_s.p50", "ttft_s.p99", "tpot_s.p99")
FLEET_PARAMETERS = ("replicas", "router", "fleet", "disagg")
"""Parameters of a sweep that are fields of the fleet's `Setup`."""

_workloads: Mapping[int, Workload] = {}
"""In a worker process: the workload of each seed."""


@dataclass(frozen=True)
class SweepRun:
    """One run: its parameters, its seed and its figures (as `Result.summary`)."""

    parameters: dict[str, Any]
    seed: int
    summary: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, in the order of the combinations, the seeds of each one after the other."""

    runs: tuple[SweepRun, ...]

    def combinations(self) -> list[tuple[dict[str, Any], list[SweepRun]]]:
        """The parameters of each combination with its runs, one per seed."""
        found: dict[str, tuple[dict[str, Any], list[SweepRun]]] = {}
        for one in self.runs:
            found.setdefault(_text(one.parameters), (one.parameters, []))[1].append(one)
        return list(found.values())

    def interval(self, metric: str, **parameters: Any) -> Interval:
        """The mean of a figure over the seeds of one combination, with its 95 % interval.

        metric: a dotted path of the summary, such as "ttft_s.p99".
        Raises KeyError for an unknown figure, and if `parameters` do not select exactly one combination.
        """
        return _interval(self._of(parameters), metric)

    def difference(self, metric: str, ours: Mapping[str, Any], base: Mapping[str, Any]) -> Interval:
        """The mean over the seeds of the difference of a figure between two combinations, paired by seed.

        Its interval is narrower than what the two intervals suggest, because both serve the same requests. Raises
        KeyError as `interval` does.
        """
        first, second = ({run.seed: figure(run.summary, metric) for run in self._of(given)} for given in (ours, base))
        pairs = [(first[seed], second[seed]) for seed in first if seed in second]
        return interval([one - other for one, other in pairs if one is not None and other is not None])

    def table(self, *metrics: str) -> list[dict[str, Any]]:
        """A row per combination: its parameters, and mean, `.low` and `.high` of each metric."""
        rows = []
        for parameters, runs in self.combinations():
            row = dict(parameters)
            for metric in metrics or METRICS:
                found = _interval(runs, metric)
                row |= {metric: found.mean, f"{metric}.low": found.low, f"{metric}.high": found.high}
            rows.append(row)
        return rows

    def to_pandas(self, *metrics: str) -> Any:
        """A `pandas.DataFrame` of all runs: parameters, seed and metrics. Raises ImportError without pandas."""
        import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]

        wanted = metrics or METRICS
        return pandas.DataFrame(
            {**run.parameters, "seed": run.seed, **{metric: figure(run.summary, metric) for metric in wanted}}
            for run in self.runs
        )

    def plot(self, metric: str, x: str, ax: Any = None, **style: Any) -> Any:
        """Draw `metric` over parameter `x`, a line with 95 % intervals for each combination of the other parameters.

        Returns the axes. Raises ConfigError without matplotlib.
        """
        lines: dict[str, list[tuple[Any, float, float]]] = {}
        for parameters, runs in self.combinations():
            others = ", ".join(str(value) for name, value in parameters.items() if name != x)
            found = _interval(runs, metric)
            lines.setdefault(others, []).append((parameters[x], found.mean, found.half))
        return plot_lines(axes_or_new(ax), lines, x, metric, **style)

    def _of(self, parameters: Mapping[str, Any]) -> list[SweepRun]:
        """The runs of the one combination that has these parameters."""
        wanted = {name: _name(value) for name, value in parameters.items()}
        chosen = [runs for given, runs in self.combinations() if wanted.items() <= given.items()]
        if len(chosen) != 1:
            raise KeyError(f"{len(chosen)} combinations have {dict(parameters)}; name one")
        return chosen[0]

    def __str__(self) -> str:
        seeds = {run.seed for run in self.runs}
        rows = self.table()
        names = list(self.runs[0].parameters)
        cells = [[*names, *METRICS]]
        cells += [[*(str(row[name]) for name in names), *(_cell(row, metric) for metric in METRICS)] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([f"{len(rows)} combinations x {len(seeds)} seeds; mean ± half of the 95 % interval", *lines])

    __repr__ = __str__


def sweep(
    workload: Workload | WorkloadOfSeed,
    engine: Engine | None = None,
    *,
    over: Mapping[str, Sequence[Any]],
    seeds: int = 1,
    jobs: int | None = None,
    folder: Path | str | None = None,
    progress: bool = True,
    **common: Any,
) -> Sweep:
    """Run every combination of parameters with `seeds` seeds.

    workload: a function of the seed (0, 1, ...), or one workload. Of one workload, seed 0 is as it is; further seeds
        shuffle the gaps between the arrivals of each minute, as `tokenyard plan` does.
    over: values by parameter: a field of `Engine`, a scheduler setting, `rate_scale`, `replicas`, `router`, `fleet` or
        `disagg`.
    common: values of such parameters for all runs.
    jobs: processes; None for one per core. Runs of a policy that is defined in a notebook work where processes are
        forked (Linux).
    folder: where every finished run is written at once, as a line of `runs.jsonl`. Runs that are already there are not
        repeated, so that a sweep continues where it was interrupted, and can be extended.
    progress: show a progress bar, on a terminal or in a notebook.
    Raises ConfigError for settings that cannot work, before the first run.
    """
    if seeds < 1 or not all(over.values()):
        raise ConfigError("a sweep needs at least 1 seed and a value for each parameter")
    workloads = {seed: _of_seed(workload, seed) for seed in range(seeds)}
    combinations = [dict(zip(over, values, strict=True)) for values in product(*over.values())]
    engine, jobs_left = engine or Engine(), []
    digests = {seed: workload_digest(one) for seed, one in workloads.items()}
    done = _read_runs(folder)
    keys: list[tuple[str, dict[str, Any], int]] = []
    for parameters in combinations:
        shown = {name: _name(value) for name, value in parameters.items()}
        for seed, one in workloads.items():
            rate, setup = _setup(engine, {**common, **parameters}, one, seed)
            key = _digest(f"{__version__} {digests[seed]} {seed} {rate} {setup!r}")
            keys.append((key, shown, seed))
            if key not in done:
                jobs_left.append((key, seed, rate, setup))
    with _run_writer(folder) as write:
        for key, summary in _runs(workloads, jobs_left, jobs or multiprocessing.cpu_count(), progress):
            done[key] = summary
            write(key, summary)
    return Sweep(tuple(SweepRun(shown, seed, done[key]) for key, shown, seed in keys))


Job = tuple[str, int, float, Setup]
"""Key, seed, rate scale, setup."""


def _setup(engine: Engine, given: Mapping[str, Any], workload: Workload, seed: int) -> tuple[float, Setup]:
    """The rate scale and the setup of a combination."""
    rate = float(given.get("rate_scale", 1.0))
    fleet = {name: given[name] for name in FLEET_PARAMETERS if name in given}
    if "router" in fleet:
        fleet["router"] = policy_name(fleet["router"])
    changes = {name: value for name, value in given.items() if name not in (*FLEET_PARAMETERS, "rate_scale")}
    return rate, engine.with_(**changes).setup(workload.scaled(rate), seed=seed, **{"fleet": Fleet(), **fleet})


def _runs(
    workloads: Mapping[int, Workload], jobs: Sequence[Job], processes: int, progress: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs as they end, as (key, summary)."""
    if processes == 1 or len(jobs) <= 1:
        _take(workloads)
        with progress_bar(progress) as bar:
            for job in jobs if bar is None else bar.track(jobs, description="runs"):
                yield _run_one(job)
        return
    # A forked process has the caller's modules, so that a policy of a notebook is found.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(min(processes, len(jobs)), context, _take, (workloads,)) as pool:
        futures = [pool.submit(_run_one, job) for job in jobs]
        try:
            with progress_bar(progress) as bar:
                ended = as_completed(futures)
                for future in ended if bar is None else bar.track(ended, total=len(jobs), description="runs"):
                    yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _take(workloads: Mapping[int, Workload]) -> None:
    global _workloads
    _workloads = workloads


def _run_one(job: Job) -> tuple[str, dict[str, Any]]:
    key, seed, rate, setup = job
    return key, fleet_summary(simulate(_workloads[seed].scaled(rate), setup))


class _run_writer:
    """Appends runs to the file of a folder; does nothing without one."""

    def __init__(self, folder: Path | str | None) -> None:
        self._path = None if folder is None else Path(folder) / RUNS_FILE

    def __enter__(self) -> Callable[[str, Mapping[str, Any]], None]:
        return self._write

    def __exit__(self, *_: object) -> None:
        pass

    def _write(self, key: str, summary: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "summary": summary}) + "\n")


def _read_runs(folder: Path | str | None) -> dict[str, dict[str, Any]]:
    """The runs that a folder has, by key. The folder is made; a line that is cut off is left out and removed."""
    if folder is None:
        return {}
    path = Path(folder) / RUNS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another folder") from None
    runs, whole = {}, []
    for line in lines:
        try:
            entry = json.loads(line)
            runs[entry["key"]] = entry["summary"]
        except (ValueError, KeyError, TypeError):
            continue
        whole.append(line)
    if len(whole) < len(lines):
        path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return runs


def _of_seed(workload: Workload | WorkloadOfSeed, seed: int) -> Workload:
    if not isinstance(workload, Workload):
        return workload(seed)
    if seed and workload.sessions is not None:
        raise ConfigError("sessions of a trace cannot be drawn again; give a function of the seed that reads the trace")
    return reseeded(workload, seed)


def workload_digest(workload: Workload) -> str:
    """A digest of all that a run reads of a workload."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(getattr(workload, name)).tobytes())
    _add(digest, (workload.tenants, workload.classes, workload.adapters, workload.adapter))
    _add(digest, workload.content)
    _add(digest, workload.sessions)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a value made of arrays, sequences, mappings and plain objects."""
    if isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    elif isinstance(value, dict):
        _add(digest, list(value.items()))
    elif hasattr(value, "__dict__"):
        digest.update(type(value).__name__.encode())
        _add(digest, vars(value))
    elif hasattr(value, "__dataclass_fields__"):
        _add(digest, [getattr(value, item.name) for item in fields(value)])
    else:
        digest.update(repr(value).encode())


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _interval(runs: Sequence[SweepRun], metric: str) -> Interval:
    values = [figure(run.summary, metric) for run in runs]
    known = [value for value in values if value is not None]
    return interval(known) if known else Interval(float("nan"), float("nan"), float("nan"))


def _name(value: Any) -> Any:
    """A value as it is shown: numbers and words as they are, classes as `module:Class`, others as text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return policy_name(value) if isinstance(value, type) else str(value)


def _text(parameters: Mapping[str, Any]) -> str:
    return json.dumps(parameters, default=str)


def _cell(row: Mapping[str, Any], metric: str) -> str:
    mean, half = row[metric], (row[f"{metric}.high"] - row[f"{metric}.low"]) / 2
    return f"{mean:.4g}" if half != half else f"{mean:.4g} ± {half:.2g}"
