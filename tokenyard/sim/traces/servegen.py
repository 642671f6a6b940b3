"""ServeGen's client models (Xiang et al. 2025; github alibaba/ServeGen, data), from which requests are drawn.

A folder or tar archive with, per client, `chunk-N-trace.csv`, a line per window of 600 s (begin, rate, coefficient of
variation, distribution of the gaps and its two arguments), and `chunk-N-dataset.json`, histograms of `input_tokens` and
`output_tokens` by time of day. Detected by files whose names end with `-trace.csv`. Not read: the coefficient of
variation, which the arguments say too, and `reason_ratio`. No two prompts share a prefix.
"""

import json
import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from tokenyard.base import ConfigError, Float64Array, Int32Array
from tokenyard.sim.traces.prompt_ids import UniqueContent
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.trace_files import read_members
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, uniform_columns

TRACE_SUFFIX = "-trace.csv"
WINDOW_S = 600.0
MODEL_COLUMNS = 6
DRAWN_AT_ONCE = 64
MAX_IN_WINDOW = 1_000_000

_PAIR = re.compile(r"(\d+):\s*([-+.\deE]+)")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths with their probabilities, as ascending cumulative sums."""

    values: Int32Array
    cumulative: Float64Array

    def draw(self, count: int, rng: np.random.Generator) -> Int32Array:
        """`count` lengths."""
        drawn: Int32Array = self.values[np.searchsorted(self.cumulative, rng.random(count) * self.cumulative[-1])]
        return drawn


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its windows (start, rate, distribution, two arguments) and its lengths from each time of day on."""

    name: str
    windows: dict[float, tuple[float, str, float, float]]
    lengths: list[tuple[float, Histogram, Histogram]]

    def draw(self, start_s: float, rng: np.random.Generator) -> tuple[Float64Array, Int32Array, Int32Array]:
        """Arrivals, prompts and answers in the window that begins at `start_s`; empty if the client is idle then."""
        rate, distribution, first, second = self.windows.get(start_s, (0.0, "", 0.0, 0.0))
        lengths = [item for item in self.lengths if item[0] <= start_s]
        if not rate or not distribution or not lengths:
            return np.empty(0), np.empty(0, np.int32), np.empty(0, np.int32)
        arrivals = start_s + _renewals(distribution, first, second, rng, self.name)
        _, prompts, outputs = lengths[-1]
        return arrivals, prompts.draw(len(arrivals), rng), outputs.draw(len(arrivals), rng)


def _renewals(distribution: str, shape: float, scale: float, rng: np.random.Generator, where: str) -> Float64Array:
    """Sums of gaps drawn from the distribution, up to the end of one window."""
    elapsed, parts = 0.0, []
    while elapsed < WINDOW_S:
        if distribution == "Gamma":
            gaps = rng.gamma(shape, scale, DRAWN_AT_ONCE)
        elif distribution == "Weibull":
            gaps = scale * rng.weibull(shape, DRAWN_AT_ONCE)
        else:
            raise ConfigError(f"{where}: unknown distribution {distribution!r}; known are Gamma and Weibull")
        parts.append(elapsed + np.cumsum(gaps))
        elapsed = float(parts[-1][-1])
        if len(parts) * DRAWN_AT_ONCE > MAX_IN_WINDOW:
            raise ConfigError(
                f"{where}: over {MAX_IN_WINDOW} requests in a window of {WINDOW_S:g} s; are the gaps right?"
            )
    times = np.concatenate(parts)
    within: Float64Array = times[times < WINDOW_S]
    return within


def read_servegen(path: Path, options: ReadOptions) -> Workload:
    """Draw a day of requests, or its first `options.limit`, by the seed.

    The day begins with its first window that has traffic. Raises ConfigError for files of another form; with
    `options.skip_bad` the clients with such files are left out and counted.
    """
    clients, remarks = _read_clients(path, options.skip_bad)
    rng = np.random.default_rng(options.seed)
    parts: list[tuple[Float64Array, Int32Array, Int32Array]] = []
    drawn = 0
    for start_s in sorted({start for client in clients for start in client.windows}):
        window = [client.draw(start_s, rng) for client in clients]
        parts.extend(window)
        drawn += sum(len(arrivals) for arrivals, _, _ in window)
        if options.limit is not None and drawn >= options.limit:
            break
    if not drawn:
        raise ConfigError("; ".join([f"{path.name}: no client sends anything", *remarks]))
    arrivals, prompts, outputs = (np.concatenate([part[i] for part in parts]) for i in range(3))
    order = np.argsort(arrivals, kind="stable")
    begin = arrivals[order[0]]
    drawn_day = uniform_columns(path.name, arrivals[order] - begin, prompts[order], outputs[order], UniqueContent())
    return replace(drawn_day, remarks=tuple(remarks))


def _read_clients(path: Path, skip_bad: bool) -> tuple[list[Client], list[str]]:
    """The clients, and a sentence about those that were left out, if any."""
    traces = dict(read_members(path, TRACE_SUFFIX))
    datasets = dict(read_members(path, "-dataset.json"))
    if not traces:
        raise ConfigError(f"{path.name} holds no chunk-N-trace.csv; is this the right --trace-format?")
    clients, wrong = [], []
    for name, raw in traces.items():
        try:
            dataset = datasets.get(name.replace(TRACE_SUFFIX, "-dataset.json"))
            if dataset is None:
                raise ConfigError(f"{path.name}: {name} has no dataset.json next to it")
            clients.append(Client(name, _windows(raw, name), _lengths(dataset, name)))
        except ConfigError as error:
            if not skip_bad:
                raise
            wrong.append(error.message)
    return clients, [f"{len(wrong)} of {len(traces)} clients are left out; the first: {wrong[0]}"] if wrong else []


def _windows(raw: bytes, name: str) -> dict[float, tuple[float, str, float, float]]:
    windows = {}
    for line_number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
        cells = line.split(",")
        try:
            if len(cells) != MODEL_COLUMNS:
                raise ValueError
            start_s, rate, first, second = (float(cells[place]) for place in (0, 1, 4, 5))
            if not all(0.0 <= value < inf for value in (start_s, rate, first, second)):
                raise ValueError
            windows[start_s] = (rate, cells[3], first, second)
        except ValueError:
            raise ConfigError(f"{name}, line {line_number}: cut off or no window of a client model") from None
    return windows


def _lengths(raw: bytes, name: str) -> list[tuple[float, Histogram, Histogram]]:
    """Histograms by time of day; steps in which a client sent nothing are left out."""
    try:
        steps = json.loads(raw)
        found = [
            (float(start), _histogram(step["input_tokens"]), _histogram(step["output_tokens"]))
            for start, step in steps.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{name}: its dataset.json is cut off or lacks usable input_tokens and output_tokens"
        ) from None
    filled = [item for item in found if len(item[1].values) and len(item[2].values)]
    return sorted(filled, key=lambda item: item[0])


def _histogram(text: str) -> Histogram:
    pairs = _PAIR.findall(text)
    values, shares = [int(value) for value, _ in pairs], [float(share) for _, share in pairs]
    if pairs and not (max(values) < MAX_TOKENS and min(shares) >= 0.0 and 0.0 < sum(shares) < inf):
        raise ValueError
    return Histogram(np.array(values, np.int32), np.cumsum(shares))


SERVEGEN = TraceFormat("servegen", read_servegen, members=TRACE_SUFFIX)
