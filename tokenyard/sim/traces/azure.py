"""Azure's LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024; github Azure/AzurePublicDataset).

A CSV with the columns `TIMESTAMP` (a date, or plain seconds), `ContextTokens` and `GeneratedTokens`, by which it is
detected. Other columns are not read. It says nothing about contents, so no two prompts share a prefix.
"""

from pathlib import Path

from tokenyard.sim.traces.csv_table import read_csv
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, options: ReadOptions) -> Workload:
    """The requests, at their recorded times."""
    return read_csv(path, options, COLUMNS)


AZURE = TraceFormat("azure", read_azure, columns=COLUMNS)
