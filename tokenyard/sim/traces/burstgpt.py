"""BurstGPT's traces (Wang et al. 2024; github HPMLL/BurstGPT).

A CSV with the columns `Timestamp` (whole seconds), `Request tokens` and `Response tokens`, by which it is detected.
Not read: `Model`, `Total tokens`, `Log Type` and any other column. No two prompts share a prefix.
"""

from pathlib import Path

from tokenyard.sim.traces.csv_table import read_csv
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path, options: ReadOptions) -> Workload:
    """The requests. Those that share a whole second are spread over it with the seed."""
    return read_csv(path, options, COLUMNS, spread=True)


BURSTGPT = TraceFormat("burstgpt", read_burstgpt, columns=COLUMNS)
