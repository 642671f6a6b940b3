"""Plans for benchmarks of an executor alone: rows of equal length, no scheduler."""

import numpy as np

from tokenyard.base import LAST_SAMPLED, ExecutorInfo, RowStart, SamplingParams, StepPlan

GREEDY = SamplingParams(temperature=0.0)


class EqualRows:
    """Makes plans for `rows` requests that all have the same number of tokens.

    Pages are dealt out in a shuffled order, because after some hours of serving that is what they are like.
    """

    def __init__(self, info: ExecutorInfo, rows: int, max_tokens: int, sampling: SamplingParams = GREEDY) -> None:
        pages_per_row = -(-max_tokens // info.page_size)
        if rows * pages_per_row > info.num_pages or rows > info.max_pool_rows:
            raise ValueError(f"{rows} rows of {max_tokens} tokens do not fit {info.num_pages} pages")
        pages = np.random.default_rng(0).permutation(info.num_pages)[: rows * pages_per_row] + 1
        self._rows = np.arange(rows, dtype=np.int32)
        self._table = pages.reshape(rows, pages_per_row)
        self._page_size = info.page_size
        self._sampling = sampling
        self._step = 0
        self._length = 0

    def prefill(self, row: int, prompt: np.ndarray) -> StepPlan:
        """Plan the whole prompt (int32) of one row; rows must all get prompts of one length."""
        self._length = len(prompt)
        plan = self._plan(self._rows[row : row + 1], 0, prompt, decode_rows=0)
        self._write(plan, self._rows[row : row + 1], 0, len(prompt))
        plan.row_starts = [self._start(row, prompt)]
        return plan

    def pretend(self, tokens: int) -> StepPlan:
        """Plan nothing, but hand out rows and pages as if each row had `tokens` tokens in the cache."""
        self._length = tokens
        plan = self._plan(self._rows[:0], 0, np.zeros(0), decode_rows=0)
        known = np.ones(tokens, dtype=np.int32)
        plan.row_starts = [self._start(row, known) for row in self._rows.tolist()]
        self._write(plan, self._rows, 0, tokens)
        return plan

    def decode(self) -> StepPlan:
        """Plan one more token for every row, with a new page for each where one begins."""
        tokens = np.full(len(self._rows), LAST_SAMPLED)
        plan = self._plan(self._rows, self._length, tokens, decode_rows=len(self._rows))
        self._write(plan, self._rows, self._length, self._length + 1)
        self._length += 1
        return plan

    def _write(self, plan: StepPlan, rows: np.ndarray, begin: int, end: int) -> None:
        """Add the writes of the pages that begin at positions from `begin` to before `end`."""
        columns = np.arange(-(-begin // self._page_size), -(-end // self._page_size), dtype=np.int32)
        plan.page_rows = np.repeat(rows, len(columns))
        plan.page_columns = np.tile(columns, len(rows))
        plan.page_ids = self._table[rows][:, columns].ravel().astype(np.int32)

    def _start(self, row: int, known: np.ndarray) -> RowStart:
        return RowStart(row, self._sampling, known.astype(np.int32), len(known))

    def _plan(self, rows: np.ndarray, start: int, tokens: np.ndarray, decode_rows: int) -> StepPlan:
        self._step += 1
        none = np.zeros(0, dtype=np.int32)
        counts = np.ones(len(rows), dtype=np.int32) if decode_rows else np.full(len(rows), len(tokens), dtype=np.int32)
        return StepPlan(
            step=self._step,
            pool_rows=rows,
            epochs=np.zeros(len(rows), dtype=np.int32),
            starts=np.full(len(rows), start, dtype=np.int32),
            counts=counts,
            samples=np.ones(len(rows), dtype=np.int32),
            tokens=tokens.astype(np.int32),
            page_rows=none,
            page_columns=none,
            page_ids=none,
            decode_rows=decode_rows,
        )
