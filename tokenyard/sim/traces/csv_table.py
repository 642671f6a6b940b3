"""Reads tables of numbers (CSV): a header that names the columns, and a request a line."""

import csv
from collections.abc import Iterator
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.time_stamps import seconds_of
from tokenyard.sim.traces.trace_files import read_lines
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder


def read_csv(path: Path, options: ReadOptions, columns: tuple[str, str, str], spread: bool = False) -> Workload:
    """A table with a column of time stamps, one of prompt lengths and one of answer lengths, in this order.

    `spread` draws the arrivals of requests that share a tick of a coarse clock (see `WorkloadBuilder`).
    """
    stamp, prompt, output = columns
    builder = WorkloadBuilder(path.name, options.seed, spread)
    lines, header = read_lines(path), CsvHeader(path, columns)

    def take(where: str, line: str) -> None:
        record = header.record(where, line)
        arrival_s = seconds_of(record[stamp], where)
        builder.add(where, arrival_s, csv_tokens(record, prompt, where), csv_tokens(record, output, where))

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


def csv_tokens(record: dict[str, str], key: str, where: str) -> int:
    """A number of tokens. Raises ConfigError if the value is not a whole number."""
    value = csv_number(record, key, where)
    if not value.is_integer():
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number of tokens")
    return int(value)


def csv_number(record: dict[str, str], key: str, where: str) -> float:
    """A number. Raises ConfigError if the value is something else."""
    try:
        return float(record[key])
    except ValueError:
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number") from None
