"""Readers of traces that are tables of numbers (CSV), and of time stamps."""

import csv
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import read_lines
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
VIDUR = ("num_prefill_tokens", "num_decode_tokens")
LAST_UNIX_SECOND = 1e11
"""Larger stamps count something smaller than seconds."""


def read_azure(path: Path, options: ReadOptions) -> Workload:
    """Azure's LLM inference traces (Patel et al., Splitwise, 2024)."""
    return _read_csv(path, options, AZURE)


def read_burstgpt(path: Path, options: ReadOptions) -> Workload:
    """BurstGPT's traces (Wang et al. 2024). Requests that share a whole second are spread over it."""
    return _read_csv(path, options, BURSTGPT, spread=True)


def _read_csv(path: Path, options: ReadOptions, columns: tuple[str, str, str], spread: bool = False) -> Workload:
    """A table with a column of time stamps, one of prompt lengths and one of answer lengths."""
    stamp, prompt, output = columns
    builder = WorkloadBuilder(path.name, options.seed, spread)
    lines, header = read_lines(path), CsvHeader(path, columns)

    def take(where: str, line: str) -> None:
        record = header.record(where, line)
        builder.add(
            where, seconds_of(record[stamp], where), _digits(record, prompt, where), _digits(record, output, where)
        )

    header.read(lines)
    return build_workload(builder, options, lines, take)


class CsvHeader:
    """The first line of a CSV file, which must name `columns`, in any case and order."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._path, self._columns = path, columns
        self._header: list[str] = []

    def read(self, lines: Iterator[tuple[str, str]]) -> None:
        """Read the header from `lines`. Raises ConfigError if a column is missing."""
        where, line = next(lines, (self._path.name, ""))
        wanted = {column.lower(): column for column in self._columns}
        self._header = [wanted.get(value.strip().lower(), value.strip()) for value in csv_values(where, line)]
        missing = [column for column in self._columns if column not in self._header]
        if missing:
            raise ConfigError(
                f"{self._path.name} lacks the columns {', '.join(missing)}; is this the right --trace-format?"
            )

    def record(self, where: str, line: str) -> dict[str, str]:
        """A later line as column name -> value. Raises ConfigError if it has another number of values."""
        values = csv_values(where, line)
        if len(values) != len(self._header):
            raise ConfigError(f"{where}: {len(values)} columns instead of {len(self._header)}; is the file cut off?")
        return dict(zip(self._header, values, strict=True))


def csv_values(where: str, line: str) -> list[str]:
    """The values of one line of a CSV file. Raises ConfigError if the line is not CSV."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise ConfigError(f"{where}: no line of a CSV file: {error}") from None


def _digits(record: dict[str, str], key: str, where: str) -> int:
    value = _float(record, key, where)
    if not value.is_integer():
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number of tokens")
    return int(value)


def _float(record: dict[str, str], key: str, where: str) -> float:
    try:
        return float(record[key])
    except ValueError:
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number") from None


def read_vidur(path: Path, options: ReadOptions) -> Workload:
    """Vidur's processed traces.

    Without the column `arrived_at` (s), arrivals are a Poisson process of one request per second, drawn by the seed.
    """
    builder, rng, drawn_s = WorkloadBuilder(path.name), np.random.default_rng(options.seed), 0.0
    lines, header = read_lines(path), CsvHeader(path, VIDUR)

    def take(where: str, line: str) -> None:
        nonlocal drawn_s
        record = header.record(where, line)
        drawn_s += float(rng.exponential(1.0))
        arrival_s = _float(record, "arrived_at", where) if "arrived_at" in record else drawn_s
        prompt, output = _digits(record, "num_prefill_tokens", where), _digits(record, "num_decode_tokens", where)
        builder.add(where, arrival_s, prompt, output)

    header.read(lines)
    return build_workload(builder, options, lines, take)


def seconds_of(stamp: str, where: str) -> float:
    """Seconds of a plain number, or of a stamp like `2023-11-16 18:15:46.6805900` with all its digits."""
    with suppress(ValueError):
        return in_seconds(float(stamp), where)
    whole_part, _, fraction = stamp.partition(".")
    zone = fraction.lstrip("0123456789")
    try:
        moment = datetime.fromisoformat(whole_part + zone)
        digits = fraction[: len(fraction) - len(zone)]
        part = float(f"0.{digits}") if digits else 0.0
    except ValueError:
        raise ConfigError(f"{where}: {stamp!r} is no time stamp") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + part


def in_seconds(stamp: float, where: str) -> float:
    """`stamp` itself. Raises ConfigError if its unit is smaller than seconds."""
    if stamp > LAST_UNIX_SECOND:
        raise ConfigError(f"{where}: the time stamp is {stamp:.15g}; Unix seconds are needed, not milliseconds or less")
    return stamp
