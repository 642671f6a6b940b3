"""Steps that compile a device's kernels before the first request does.

Triton compiles a kernel at the first launch of each of its specialisations, which takes seconds, and libraries load
theirs at the first product of a shape. The rows of these steps have no pages, so they read and write page 0, which no
request owns, and a row that starts later takes over everything that is kept by pool row.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np

from tokenyard.base import NO_TOKENS, Int32Array, RowStart, SamplingParams, StepPlan
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.runner import ModelExecutor, Ticket

logger = logging.getLogger(__name__)

CHUNKS = (1, 2, 3, 5, 9, 17, 129)
"""Tokens of a chunk of each kind: attention is compiled for runs of up to 1, 2, 4, 8 and 16 queries, and for longer
ones."""
SAMPLING = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, seed=0)


def wait(ticket: Ticket) -> None:
    """Wait for a step without collecting it: its time and its drafts must not count."""
    ticket.clock.wait()


def warm_up(executor: ModelExecutor, finish: Callable[[Ticket], object] = wait) -> None:
    """Run a step of each kind on an executor that has no requests yet, and finish it; drafters do the same."""
    begin_s, model = time.perf_counter(), executor.model
    if executor.drafter is not None:
        executor.drafter.warm_up(CHUNKS)
    # Captured steps were warm before their capture; these are those that are too large for one.
    with model.eager_buckets() if isinstance(model, CudaGraphRunner) else nullcontext():
        for plan in plans(executor.info.context_length):
            finish(executor.launch(plan))
    logger.info("compiled kernels of all kinds of steps in %.1f s", time.perf_counter() - begin_s)


def plans(context_length: int) -> Iterator[StepPlan]:
    """A chunk of each kind, each of which completes a prompt, and a decode after it; at last a chunk on a prefix, as
    prompts without one may have kernels of their own.
    """
    for tokens in (count for count in CHUNKS if count < context_length):
        known = np.zeros(tokens, np.int32)
        yield _plan(0, known, 0, [RowStart(0, SAMPLING, known, tokens)])
        yield _plan(tokens, known[:1], 1, [])
    last = next((count for count in CHUNKS[::-1] if 2 * count < context_length), 0)
    if last:
        yield _plan(0, np.zeros(last, np.int32), 0, [RowStart(0, SAMPLING, np.zeros(2 * last, np.int32), 2 * last)])
        yield _plan(last, np.zeros(last, np.int32), 0, [])


def _plan(start: int, tokens: Int32Array, decode_rows: int, row_starts: list[RowStart]) -> StepPlan:
    def column(value: int) -> Int32Array:
        return np.full(1, value, np.int32)

    return StepPlan(
        step=0,
        pool_rows=column(0),
        epochs=column(0),
        starts=column(start),
        counts=column(len(tokens)),
        samples=column(1),
        tokens=tokens,
        page_rows=NO_TOKENS,
        page_columns=NO_TOKENS,
        page_ids=NO_TOKENS,
        row_starts=row_starts,
        decode_rows=decode_rows,
    )
