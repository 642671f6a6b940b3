"""The requests of a run as a table: one row per request, one column per property."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.base import NS_PER_S, ConfigError, Float64Array, Int64Array
from tokenyard.sim.outcome import FINISHED, REJECTED, UNFINISHED, Outcome
from tokenyard.sim.traces.workload import NO_PRIORITY

Column = npt.NDArray[Any]
STATUS_NAMES = {UNFINISHED: "unfinished", FINISHED: "finished", REJECTED: "rejected"}
ARROW_SUFFIXES, PARQUET_SUFFIXES, CSV_SUFFIXES = (".arrow", ".feather"), (".parquet",), (".csv",)


def request_columns(outcome: Outcome) -> dict[str, Column]:
    """The columns by name, each with one entry per request in order of its number (docs/simulator.md lists them).

    Times are float64 seconds from the start of the trace, NaN for a stage never reached.
    """
    workload, sessions = outcome.workload, outcome.workload.sessions
    status = np.array([STATUS_NAMES[kind] for kind in range(len(STATUS_NAMES))])[outcome.status]
    columns: dict[str, Column] = {
        "number": np.arange(len(workload)),
        "arrival_s": outcome.arrival_ns / NS_PER_S,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "status": status,
        "completion_tokens": outcome.completion_tokens,
        "cached_tokens": outcome.cached_tokens,
        "sent_s": _reached(outcome.sent_ns, outcome.place >= 0),
        "admitted_s": _reached(outcome.admitted_ns, outcome.first_token_ns > 0),
        "first_token_s": _reached(outcome.first_token_ns),
        "finished_s": _reached(outcome.finished_ns),
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.tpot_s,
        "e2e_s": outcome.e2e_s,
        "unloaded_s": outcome.unloaded_s,
        "wait_s": outcome.ttft_s - outcome.unloaded_s,
        "ttft_slo_s": outcome.ttft_slo_s,
        "late_s": outcome.late_s,
        "met": outcome.met,
        "retractions": outcome.retractions,
        "engine": outcome.replica,
        "rank": np.where(outcome.place >= 0, outcome.place % outcome.setup.dp_size, -1),
        "tenant": np.array(workload.tenants)[workload.tenant],
        "class": np.array(workload.classes)[workload.service_class],
        "priority": np.where(workload.priority == NO_PRIORITY, 0, workload.priority),
    }
    if sessions is not None:
        columns |= {"session": np.array(sessions.names)[sessions.conversation], "turn": sessions.turn}
    return columns


def _reached(stage_ns: Int64Array, reached: npt.NDArray[np.bool_] | None = None) -> Float64Array:
    """Seconds; NaN where the stage was not reached, by default where it is 0."""
    times: Float64Array = np.where(stage_ns > 0 if reached is None else reached, stage_ns / NS_PER_S, np.nan)
    return times


def stacked(tables: Mapping[str, Mapping[str, Column]], name: str) -> dict[str, Column]:
    """Several tables below each other, with a first column `name` that holds the key of each row's table.

    Columns that not all tables have are left out.
    """
    first = next(iter(tables.values()))
    shared = [column for column in first if all(column in table for table in tables.values())]
    keys = np.repeat(list(tables), [len(table["number"]) for table in tables.values()])
    return {name: keys} | {column: np.concatenate([table[column] for table in tables.values()]) for column in shared}


def check_table_path(path: Path) -> None:
    """Raise ConfigError if there is no table of this kind, or it needs a package that is not installed."""
    kinds = CSV_SUFFIXES + ARROW_SUFFIXES + PARQUET_SUFFIXES
    if path.suffix not in kinds:
        raise ConfigError(f"{path} has none of the endings {', '.join(kinds)}, which say how the table is written")
    if path.suffix in ARROW_SUFFIXES + PARQUET_SUFFIXES:
        _pyarrow(path)


def write_table(path: Path, columns: Mapping[str, Column]) -> None:
    """Write columns as Arrow (`.arrow`, `.feather`), Parquet (`.parquet`), or CSV (`.csv`), with NaN as an empty field.

    Raises ConfigError as `check_table_path` does, and if the file cannot be written.
    """
    check_table_path(path)
    try:
        if path.suffix in ARROW_SUFFIXES + PARQUET_SUFFIXES:
            _write_arrow(path, columns)
        else:
            _write_csv(path, columns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def arrow_table(columns: Mapping[str, Column]) -> Any:
    """The columns as a `pyarrow.Table`. Raises ConfigError if pyarrow is not installed."""
    return _pyarrow().table(dict(columns))


def _write_arrow(path: Path, columns: Mapping[str, Column]) -> None:
    _pyarrow(path)
    table = arrow_table(columns)
    if path.suffix in PARQUET_SUFFIXES:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,unused-ignore]

        parquet.write_table(table, path)
    else:
        import pyarrow.feather as feather  # type: ignore[import-not-found,unused-ignore]

        feather.write_feather(table, str(path), compression="uncompressed")


def _pyarrow(path: Path | None = None) -> Any:
    try:
        import pyarrow  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        what = "an Arrow table" if path is None else f"{path}: a {path.suffix} file"
        raise ConfigError(f"{what} needs pyarrow; pip install 'tokenyard[analysis]', or write .csv") from None
    return pyarrow


def _write_csv(path: Path, columns: Mapping[str, Column]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(column: Column) -> Iterator[object]:
    if column.dtype.kind != "f":
        return iter(column.tolist())
    return ("" if value != value else round(value, 9) for value in column.tolist())
