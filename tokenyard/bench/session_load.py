"""Sessions against a server: each turn is sent when those before it have ended and its gap has passed."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S
from tokenyard.bench.backends import RequestBackend, RequestFuncOutput
from tokenyard.bench.datasets import DatasetRow, Vocabulary
from tokenyard.bench.load_generator import BenchResult, ServerClient
from tokenyard.sim.engine.sim_scheduler import NEVER_NS
from tokenyard.sim.report.session_figures import TurnTimes, figures_of
from tokenyard.sim.traces.arrival_queue import make_arrivals
from tokenyard.sim.traces.workload import Workload


def session_row(workload: Workload, vocabulary: Vocabulary, index: int) -> DatasetRow:
    """Turn `index` as a request: exactly as many tokens as in the trace, shared with other prompts as there."""
    sessions, tokens = workload.sessions, int(workload.prompt_tokens[index])
    assert sessions is not None
    places = workload.content.prompt_ids(index, tokens) % len(vocabulary.ordinary)
    name = sessions.names[sessions.conversation[index]]
    return DatasetRow(vocabulary.ordinary[places].tolist(), tokens, int(workload.output_tokens[index]), session=name)


async def run_sessions(
    target: ServerClient,
    backend: RequestBackend,
    workload: Workload,
    vocabulary: Vocabulary,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> BenchResult:
    """Run all sessions of `workload` and wait for their ends. Answers are in the order of the workload.

    The same arrivals as in the simulator decide what is sent when, with the server's ends in place of simulated ones.
    A turn that fails ends like any other, and its session goes on.
    """
    arrivals, changed = make_arrivals(workload), asyncio.Event()
    answers = [RequestFuncOutput() for _ in range(len(workload))]
    begin = time.perf_counter()

    def now_ns() -> int:
        return round((time.perf_counter() - begin) * NS_PER_S)

    async def turn(index: int, due_ns: int) -> None:
        row = session_row(workload, vocabulary, index)
        sent_s = time.perf_counter() - begin
        answers[index] = await target.stream(backend, row)
        answers[index].sent_s, answers[index].late_s = sent_s, sent_s - due_ns / NS_PER_S
        arrivals.ended(index, now_ns())
        changed.set()
        on_done()

    async with asyncio.TaskGroup() as turns:
        while arrivals.popped < len(workload):
            due_ns = arrivals.next_ns
            if due_ns <= now_ns():
                turns.create_task(turn(arrivals.pop(), due_ns))
                continue
            changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), None if due_ns == NEVER_NS else (due_ns - now_ns()) / NS_PER_S)
    return BenchResult(answers, time.perf_counter() - begin)


def measured_sessions(workload: Workload, run: BenchResult) -> dict[str, Any]:
    """The figures of the sessions of a run, as `sim.report.session_figures` has them.

    Hits are None if the server reported no cached token at all, as some do only if asked.
    """
    sessions, answers = workload.sessions, run.answers
    assert sessions is not None
    sent_s = np.array([answer.sent_s for answer in answers])
    cached = np.array([answer.cached_tokens for answer in answers], np.int32)
    found = figures_of(
        TurnTimes(
            sessions,
            workload.prompt_tokens,
            np.array([answer.output_tokens for answer in answers], np.int32),
            cached,
            np.array([not answer.error for answer in answers], np.bool_),
            sent_s,
            sent_s + np.array([answer.ttft_s for answer in answers]),
            sent_s + np.array([answer.latency_s for answer in answers]),
        )
    )
    return found if cached.any() else found | {"hit_share": None, "recomputed_tokens": None}


def session_lines(figures: dict[str, Any]) -> list[str]:
    """The main figures for people, one line each."""
    rows = (
        ("Sessions that ended:", f"{figures['finished']} of {figures['sessions']}"),
        ("Turns per hour:", f"{figures['turns_per_hour']:.1f}"),
        ("Mean session (s):", _number(figures["mean_session_s"])),
        ("TTFT of a turn p50 / p95 (s):", " / ".join(_number(figures["ttft_s"][name]) for name in ("p50", "p95"))),
        ("Cached share of prompt tokens:", _number(figures["hit_share"])),
        ("Recomputed tokens:", _number(figures["recomputed_tokens"])),
    )
    return [f"{name:<40} {value}" for name, value in rows]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
