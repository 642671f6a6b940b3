"""The timeline of a run: samples for charts, and slices for Perfetto."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.base import NS_PER_S, StepPlan, StepWork
from tokenyard.tape.recorder import Core

MAX_SAMPLES = 2048
MAX_SLICES = 200_000
NS_PER_US = 1000.0


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """The state of the engine after a step. Times in seconds, KV and prefill in tokens."""

    at_s: float
    step_s: float
    decode_rows: int
    prefill_tokens: int
    waiting: int
    running: int
    kv_tokens: int


class Timeline:
    """A step observer that keeps at most `MAX_SAMPLES` samples, evenly spaced, for a run of any length."""

    def __init__(self) -> None:
        self.samples: list[TimelineSample] = []
        self.total_kv_tokens = 0
        self._stride = 1
        self._seen = 0

    def __call__(self, begin_ns: int, end_ns: int, plan: StepPlan, work: StepWork, scheduler: Core) -> None:
        """Record one committed step; see `StepObserver` for the arguments."""
        self._seen += 1
        if self._seen % self._stride:
            return
        snapshot = scheduler.snapshot(end_ns)
        self.total_kv_tokens = snapshot.total_tokens
        self.samples.append(
            TimelineSample(
                at_s=end_ns / NS_PER_S,
                step_s=(end_ns - begin_ns) / NS_PER_S,
                decode_rows=work.decode_rows,
                prefill_tokens=work.prefill_tokens,
                waiting=snapshot.waiting,
                running=snapshot.running + snapshot.prefilling,
                kv_tokens=snapshot.used_tokens,
            )
        )
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[::2]
            self._stride *= 2


class PerfettoTrace:
    """A step observer that keeps the first `MAX_SLICES` steps as slices in Chrome's trace format."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._slices = 0
        self._left_out = 0

    def __call__(self, begin_ns: int, end_ns: int, plan: StepPlan, work: StepWork, scheduler: Core) -> None:
        """Record one committed step; see `StepObserver` for the arguments."""
        if self._slices >= MAX_SLICES:
            self._left_out += 1
            return
        self._slices += 1
        begin_us = begin_ns / NS_PER_US
        args = {"step": plan.step, "decode_rows": work.decode_rows, "prefill_tokens": work.prefill_tokens}
        slice_ = {"name": plan.forward_mode, "ph": "X", "ts": begin_us, "dur": (end_ns - begin_ns) / NS_PER_US}
        self._events.append({**slice_, "pid": 1, "tid": 1, "args": args})
        batch = {"name": "batch", "ph": "C", "ts": begin_us, "pid": 1}
        self._events.append(
            {**batch, "args": {"decode_rows": work.decode_rows, "chunks": work.rows - work.decode_rows}}
        )

    def write(self, path: Path) -> None:
        """Write the JSON that ui.perfetto.dev opens; steps left out for size are counted in its metadata."""
        names = (("process_name", "scheduler"), ("thread_name", "steps on the device"))
        named = [{"name": key, "ph": "M", "pid": 1, "tid": 1, "args": {"name": name}} for key, name in names]
        document = {
            "traceEvents": named + self._events,
            "displayTimeUnit": "ms",
            "metadata": {"steps_left_out": self._left_out},
        }
        path.write_text(json.dumps(document), encoding="utf-8")
