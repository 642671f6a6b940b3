"""One run from Python: `run(workload, engine)` returns a `Result` with numbers, per-request columns and plots."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenyard.sim.api.engine import Engine, policy_name
from tokenyard.sim.api.plots import axes_or_new, plot_distribution
from tokenyard.sim.engine.sim_scheduler import StepObserver
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.kv.disagg_settings import DisaggSettings
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.comparison import trust
from tokenyard.sim.report.comparison import write_report as write_page
from tokenyard.sim.report.intervals import figure
from tokenyard.sim.report.request_table import Column, arrow_table, request_columns, write_table
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.report.timeline import Timeline
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.workload import Workload

LINES: tuple[tuple[str, str, float, str], ...] = (
    ("SLO attainment", "slo_attainment", 100.0, "{:.2f} %"),
    ("TTFT p50", "ttft_s.p50", 1.0, "{:.3g} s"),
    ("TTFT p99", "ttft_s.p99", 1.0, "{:.3g} s"),
    ("TPOT p50", "tpot_s.p50", 1e3, "{:.3g} ms"),
    ("TPOT p99", "tpot_s.p99", 1e3, "{:.3g} ms"),
    ("output tokens/s", "throughput_tokens_per_s", 1.0, "{:.0f}"),
    ("prefix hit rate", "prefix_hit_rate", 100.0, "{:.2f} %"),
    ("preemptions", "preemptions", 1.0, "{:.0f}"),
    ("rejected", "rejected", 1.0, "{:.0f}"),
    ("device busy", "utilisation", 100.0, "{:.1f} %"),
)
"""What a printed result shows: label, figure, factor, form."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    outcome: everything that was recorded, as numpy columns by request number.
    timeline: state and step times of the first scheduler over time.
    """

    outcome: Outcome
    timeline: Timeline

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of the run, as `simulate --json` writes them. Times are in seconds, shares from 0 to 1."""
        return fleet_summary(self.outcome)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """One numpy column per property, with one entry per request (docs/simulator.md lists them)."""
        return request_columns(self.outcome)

    def __getitem__(self, name: str) -> float | None:
        """The figure at a dotted path of `summary`, such as "ttft_s.p99". Raises KeyError if there is none."""
        return figure(self.summary, name)

    def to_pandas(self) -> Any:
        """The columns as a `pandas.DataFrame`. Raises ImportError without pandas (`tokenyard[analysis]`)."""
        import pandas  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return pandas.DataFrame(self.columns)

    def to_arrow(self) -> Any:
        """The columns as a `pyarrow.Table`. Raises ConfigError without pyarrow (`tokenyard[analysis]`)."""
        return arrow_table(self.columns)

    def save(self, path: Path | str) -> None:
        """Write the columns as .arrow, .feather, .parquet or .csv. Raises ConfigError if that is impossible."""
        write_table(Path(path), self.columns)

    def report(self, path: Path | str) -> None:
        """Write an HTML page with charts."""
        write_report(path, {self.name: self})

    @property
    def name(self) -> str:
        """The policy that decided."""
        return self.outcome.setup.settings.schedule_policy

    def plot(self, column: str = "ttft_s", ax: Any = None, **style: Any) -> Any:
        """Draw the distribution of a column: the share of the requests at or below each value, over a log axis.

        ax: axes of matplotlib; None makes new ones. `style` goes to `Axes.plot`.
        Returns the axes. Raises ConfigError without matplotlib (`tokenyard[analysis]`), KeyError for no such column.
        """
        values = self.columns[column]
        return plot_distribution(axes_or_new(ax), np.asarray(values, float), column, {"label": self.name, **style})

    def plot_timeline(self, measure: str = "waiting", ax: Any = None, **style: Any) -> Any:
        """Draw a measure of the first scheduler over time, a field of `TimelineSample` such as `waiting`.

        Returns the axes. Raises ConfigError without matplotlib, AttributeError for another measure.
        """
        values = [getattr(sample, measure) for sample in self.timeline.samples]
        ax = axes_or_new(ax)
        ax.plot([sample.at_s for sample in self.timeline.samples], values, **{"label": self.name, **style})
        ax.set(xlabel="time (s)", ylabel=measure.replace("_", " "))
        ax.grid(alpha=0.3)
        ax.legend()
        return ax

    def _rows(self) -> Iterator[tuple[str, str]]:
        for label, path, factor, form in LINES:
            value = self[path]
            yield label, "-" if value is None else form.format(factor * value)

    def __str__(self) -> str:
        setup, numbers = self.outcome.setup, self.summary
        error = trust(setup.profile.error, setup.profile.measured)
        lines = [
            f"{numbers['trace']}: {numbers['requests']} requests at {numbers['rate_per_s']:.4g}/s on {setup.engines} x "
            f"{setup.profile.name} (cost model error: {error}), {self.name}"
        ]
        lines += [f"  {label:<18}{text:>12}" for label, text in self._rows()]
        lines += [f"  note: {note}" for note in (numbers["warning"], *numbers["trace_notes"]) if note]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>" for label, text in self._rows())
        return f"<p>{escape(str(self).splitlines()[0])}</p><table>{rows}</table>"


def run(
    workload: Workload,
    engine: Engine | None = None,
    *,
    replicas: int = 1,
    router: str | type = "round_robin",
    fleet: Fleet | None = None,
    disagg: DisaggSettings | None = None,
    seed: int = 0,
    observer: StepObserver | None = None,
    progress: bool = False,
) -> Result:
    """Serve `workload` in virtual time.

    engine: what each engine is; None for an H100 with Llama-3-8B and Tokenyard's defaults.
    replicas: number of engines behind the router.
    router: routing policy.
    fleet: routers, faults, drains and devices that differ, None for one router and no events.
    disagg: prefill engines, None for none.
    seed: of the router's draws and of speculation.
    observer: called with each step of the first scheduler.
    progress: show a progress bar on standard error.
    Raises ConfigError for settings that cannot work, and, with file and line, for a policy of one's own that fails.
    """
    setup = (engine or Engine()).setup(
        workload,
        replicas=replicas,
        router=policy_name(router),
        fleet=fleet or Fleet(),
        disagg=disagg,
        seed=seed,
    )
    timeline = Timeline()

    def observe(*step: Any) -> None:
        timeline(*step)
        if observer is not None:
            observer(*step)

    with progress_bar(progress) as bar:
        report = _reporting(bar, setup.settings.schedule_policy, len(workload))
        return Result(simulate(workload, setup, observe if observer else timeline, report), timeline)


def write_report(path: Path | str, results: Mapping[str, Result]) -> None:
    """Write one HTML page that compares results of the same workload, by name."""
    outcomes = {name: result.outcome for name, result in results.items()}
    write_page(Path(path), outcomes, {name: result.timeline for name, result in results.items()})


@contextmanager
def progress_bar(shown: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error, if `shown` and on a terminal or in a notebook."""
    console = Console(stderr=True)
    if not (shown and (console.is_terminal or console.is_jupyter)):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


def _reporting(bar: Progress | None, name: str, total: int) -> Callable[[int, int], None] | None:
    if bar is None:
        return None
    task = bar.add_task(name, total=total)
    return lambda done, _: bar.update(task, completed=done)
