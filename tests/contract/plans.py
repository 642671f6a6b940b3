"""A tiny driver that makes plans by hand, one request a row."""

import numpy as np

from tokenyard.base import LAST_SAMPLED, LogprobOptions, RowStart, SamplingParams, StepPlan


def int32(*values):
    return np.array(values, dtype=np.int32)


def chunk(step, row, prompt, start, count, *, first=None, pages=(), sampled=None, sampling=None, logprobs=None):
    """Plan one chunk of `prompt` on `row`; `pages` is (column, page id) pairs; the row is taken at `first`."""
    begins = first is None or first == start
    sampling = sampling or SamplingParams(temperature=0.0)
    return StepPlan(
        step=step,
        pool_rows=int32(row),
        epochs=int32(0),
        starts=int32(start),
        counts=int32(count),
        samples=np.array([start + count == len(prompt) if sampled is None else sampled], dtype=np.int32),
        tokens=np.asarray(prompt[start : start + count], dtype=np.int32),
        page_rows=int32(*[row] * len(pages)),
        page_columns=int32(*[column for column, _ in pages]),
        page_ids=int32(*[page for _, page in pages]),
        row_starts=[RowStart(row, sampling, np.asarray(prompt, np.int32), len(prompt), logprobs)] if begins else [],
    )


def decode(step, rows, starts, *, pages=(), delay_sampling=False):
    """Plan one token for each of `rows`; `pages` is (row, column, page id) triples."""
    return StepPlan(
        step=step,
        pool_rows=int32(*rows),
        epochs=int32(*[0] * len(rows)),
        starts=int32(*starts),
        counts=int32(*[1] * len(rows)),
        samples=np.ones(len(rows), dtype=np.int32),
        tokens=np.full(len(rows), LAST_SAMPLED, dtype=np.int32),
        page_rows=int32(*[row for row, _, _ in pages]),
        page_columns=int32(*[column for _, column, _ in pages]),
        page_ids=int32(*[page for _, _, page in pages]),
        decode_rows=len(rows),
        delay_sampling=delay_sampling,
    )


def run(executor, plan):
    """Launch, sample if delayed, collect."""
    ticket = executor.launch(plan)
    if plan.delay_sampling:
        executor.sample(ticket)
    return executor.collect(ticket)


def all_pages(count, first=1):
    """Pages `first ..` for columns 0 .. count - 1."""
    return [(column, first + column) for column in range(count)]


ALL_LOGPROBS = LogprobOptions(output=True, top=2, prompt_from=0)
