"""Traces of BLIS (github inference-sim/inference-sim), the CSV of its trace v2.

Detected by `input_tokens`, `output_tokens` and `arrival_time_us` (microseconds). Also read where they are there:
`prefix_group` and `prefix_length` (a beginning that all prompts of a group share and that `input_tokens` does not
count), `server_input_tokens` (the whole prompt as the server counted it, where there is no prefix), `tenant_id`,
`slo_class`, `slo_target_us`, `vllm_priority` (0 is the most urgent) and `status` (other than `ok`: the answer was cut
off). Not read: the header file, `session_id` and `round_index` (turns arrive at their recorded times), `deadline_us`
(when the client gives up), `adapter` and the times that the server took.
"""

from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.sim.traces.csv_table import CsvHeader, csv_number, csv_tokens
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import read_lines
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

COLUMNS = ("input_tokens", "output_tokens", "arrival_time_us")
US_PER_S = 1e6


def read_blis(path: Path, options: ReadOptions) -> Workload:
    """The requests. Raises ConfigError, in one line, for a file that does not fit."""
    builder, lines, header = WorkloadBuilder(path.name), read_lines(path), CsvHeader(path, COLUMNS)
    groups: dict[str, int] = {}

    def take(where: str, line: str) -> None:
        record = header.record(where, line)
        own, name = csv_tokens(record, "input_tokens", where), record.get("prefix_group", "")
        shared = _optional(record, "prefix_length", where) if name else 0
        if not name:
            own = _optional(record, "server_input_tokens", where) or own
        # Group n has the stream 2 n, the rest of request m the stream 2 m + 1.
        group = 2 * groups.setdefault(name, len(groups))
        rest = [(2 * len(builder) + 1, own)] if own else []
        builder.add(
            where,
            csv_number(record, "arrival_time_us", where) / US_PER_S,
            shared + own,
            csv_tokens(record, "output_tokens", where),
            segments=[(group, shared), *rest] if shared else rest,
            tenant=record.get("tenant_id", ""),
            service_class=record.get("slo_class", ""),
            slo_ttft_s=_optional(record, "slo_target_us", where) / US_PER_S or None,
            priority=-_optional(record, "vllm_priority", where) if record.get("vllm_priority") else None,
            complete=record.get("status", "ok") in ("", "ok"),
        )

    header.read(lines)
    return build_workload(builder, options, lines, take)


def _optional(record: dict[str, str], key: str, where: str) -> int:
    """A whole number that need not be there, 0 if it is not."""
    if not record.get(key):
        return 0
    value = csv_number(record, key, where)
    if not value.is_integer() or value < 0:
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a whole number from 0 on")
    return int(value)


BLIS = TraceFormat("blis", read_blis, columns=COLUMNS)
