"""Traces of Qwen on Aliyun Bailian (Wang et al., KVCache Cache in the Wild, ATC 2025).

From github alibaba-edu/qwen-bailian-usagetraces-anon. Mooncake's lines, with `timestamp` in seconds and `hash_ids` of
blocks of 16 tokens. Detected by `chat_id` in addition to Mooncake's fields. Not read: `chat_id`, `parent_chat_id`,
`turn` and `type`, so a request arrives at its recorded time, whenever the answer before it in its chat ends.
"""

from functools import partial
from pathlib import Path

from tokenyard.sim.traces.mooncake import HASHED_FIELDS, add_hashed
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import read_lines
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

BLOCK_TOKENS = 16
TICKS_PER_S = 1.0


def read_bailian(path: Path, options: ReadOptions) -> Workload:
    """The requests, at their recorded times."""
    builder = WorkloadBuilder(path.name)
    take = partial(add_hashed, builder, TICKS_PER_S, BLOCK_TOKENS)
    return build_workload(builder, options, read_lines(path), take)


BAILIAN = TraceFormat("bailian", read_bailian, fields=(HASHED_FIELDS | {"chat_id"},))
