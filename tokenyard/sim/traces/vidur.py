"""Vidur's processed traces (github microsoft/vidur, data/processed_traces): lengths, mostly without times.

A CSV with the columns `num_prefill_tokens` and `num_decode_tokens`, by which it is detected, and `arrived_at` (seconds)
in some files. Not read: `num_total_tokens`, `pd_ratio` and any other column. No two prompts share a prefix.
"""

from pathlib import Path

import numpy as np

from tokenyard.sim.traces.csv_table import CsvHeader, csv_number, csv_tokens
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import read_lines
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

PROMPT, OUTPUT, ARRIVAL = "num_prefill_tokens", "num_decode_tokens", "arrived_at"


def read_vidur(path: Path, options: ReadOptions) -> Workload:
    """The requests.

    Without the column `arrived_at`, arrivals are a Poisson process of one request per second, drawn by the seed.
    """
    builder, rng, drawn_s = WorkloadBuilder(path.name), np.random.default_rng(options.seed), 0.0
    lines, header = read_lines(path), CsvHeader(path, (PROMPT, OUTPUT))

    def take(where: str, line: str) -> None:
        nonlocal drawn_s
        record = header.record(where, line)
        drawn_s += float(rng.exponential(1.0))
        arrival_s = csv_number(record, ARRIVAL, where) if ARRIVAL in record else drawn_s
        builder.add(where, arrival_s, csv_tokens(record, PROMPT, where), csv_tokens(record, OUTPUT, where))

    header.read(lines)
    return build_workload(builder, options, lines, take)


VIDUR = TraceFormat("vidur", read_vidur, columns=(PROMPT, OUTPUT))
