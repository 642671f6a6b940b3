"""Workloads of the vLLM runs that LLMServingSim measured (github casys-kaist/LLMServingSim, workloads).

JSON lines with `input_tok_ids`, `input_toks`, `output_toks` and `arrival_time_ns`. Detected by `input_tok_ids` and
`output_toks`. Not read: `output_tok_ids` and any other field.
"""

from pathlib import Path

from tokenyard.base import NS_PER_S
from tokenyard.sim.traces.prompt_fields import token_ids
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import json_object, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder


def read_vllm_measured(path: Path, options: ReadOptions) -> Workload:
    """The requests, with their recorded prompts."""
    builder = WorkloadBuilder(path.name)

    def take(where: str, line: str) -> None:
        record = json_object(line, where)
        ids = token_ids(record, "input_tok_ids", "input_toks", where)
        arrival_s = number(record, "arrival_time_ns", where) / NS_PER_S
        builder.add(where, arrival_s, len(ids), whole(record, "output_toks", where), ids=ids)

    return build_workload(builder, options, read_lines(path), take)


VLLM_MEASURED = TraceFormat("vllm-measured", read_vllm_measured, fields=(frozenset({"input_tok_ids", "output_toks"}),))
