"""Mooncake's traces (Qin et al., FAST 2025; github kvcache-ai/Mooncake, FAST25-release/traces).

JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids` (one per 512 tokens of the prompt;
equal leading ids mean an equal prefix). Detected by the two lengths and `hash_ids`; other fields are not read. A line
with `session_id` in addition is the turn of a session (`mooncake_sessions`), one with `chat_id` is Bailian's
(`bailian`).
"""

from functools import partial
from pathlib import Path

from tokenyard.sim.traces.prompt_fields import HASH_BLOCK_TOKENS, block_segments
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import json_object, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

MS_PER_S = 1000.0
HASHED_FIELDS = frozenset({"input_length", "output_length", "hash_ids"})


def read_mooncake(path: Path, options: ReadOptions) -> Workload:
    """The requests.

    Time stamps with a coarse tick, such as the 3 s of the published conversations, are spread over the tick with the
    seed.
    """
    builder = WorkloadBuilder(path.name, options.seed, spread=True)
    take = partial(add_hashed, builder, MS_PER_S, HASH_BLOCK_TOKENS)
    return build_workload(builder, options, read_lines(path), take, whole_file=True)


def add_hashed(builder: WorkloadBuilder, ticks_per_s: float, block_tokens: int, where: str, line: str) -> None:
    """Add the request of one line, with `ticks_per_s` of its `timestamp` and one hash per `block_tokens` tokens."""
    record = json_object(line, where)
    tokens = whole(record, "input_length", where)
    builder.add(
        where,
        number(record, "timestamp", where) / ticks_per_s,
        tokens,
        whole(record, "output_length", where),
        segments=block_segments(record, where, tokens, block_tokens),
    )


MOONCAKE = TraceFormat("mooncake", read_mooncake, fields=(HASHED_FIELDS,))
