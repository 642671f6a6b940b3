"""What a format of recorded traffic is: a name, a reader, and what tells its files from those of other formats."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.trace_files import json_object
from tokenyard.sim.traces.workload import Workload

HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format. A file of it is detected by the fields of a JSON line, the columns of a CSV or the files it holds."""

    name: str
    """Its name for --trace-format."""
    read: Callable[[Path, ReadOptions], Workload]
    """Its reader, which raises ConfigError, in one line, for a file that does not fit."""
    fields: tuple[frozenset[str], ...] = ()
    """A JSON line that has all fields of one of these sets is of this format."""
    columns: tuple[str, ...] = ()
    """A CSV whose header has all these columns, in any case and order, is of this format; empty for no CSV."""
    members: str = ""
    """How the names of the files end that a folder or tar archive of this format holds; empty if it is one file."""
    member_head: bytes = b""
    """What the first HEAD_BYTES of the first of these files contain."""

    def has_fields(self, record: dict[str, Any]) -> bool:
        """Whether a JSON line is of this format."""
        return any(record.keys() >= fields for fields in self.fields)

    def has_columns(self, header: Collection[str]) -> bool:
        """Whether a CSV with these columns, in lower case, is of this format."""
        return bool(self.columns) and all(column.lower() in header for column in self.columns)

    def has_member(self, raw: bytes) -> bool:
        """Whether a folder or archive is, whose first file with a name that ends with `members` is `raw`."""
        first_line = raw.partition(b"\n")[0].decode("utf-8-sig", "replace")
        return self.member_head in raw[:HEAD_BYTES] and (not self.fields or self.has_fields(record_of(first_line)))


def record_of(line: str) -> dict[str, Any]:
    """The JSON object of a line, empty if the line holds something else."""
    try:
        return json_object(line, "")
    except ConfigError:
        return {}
