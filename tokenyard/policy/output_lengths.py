"""Predicts the lengths of answers from the lengths of earlier ones."""

from bisect import bisect_right, insort
from collections import deque

import numpy as np

from tokenyard.base import Int32Array, Int64Array
from tokenyard.policy.views import Columns

TENANT_SLOTS = 1024
LENGTH_BUCKETS = 32
MAX_LENGTHS_KEPT = 500
MIN_LENGTHS = 8


class OutputLengthHistory:
    """Lengths of the latest answers of one kind of request, and a prediction from them."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._latest: deque[int] = deque()
        self._ascending: list[int] = []

    def add(self, tokens: int) -> None:
        """Record an answer of `tokens` output tokens."""
        if len(self._latest) == MAX_LENGTHS_KEPT:
            oldest = self._latest.popleft()
            del self._ascending[bisect_right(self._ascending, oldest) - 1]
        self._latest.append(tokens)
        insort(self._ascending, tokens)

    def predict(self, written: int) -> int | None:
        """The quantile of the lengths among answers longer than `written`; None with too few of them to judge."""
        start = bisect_right(self._ascending, written)
        count = len(self._ascending) - start
        if count < MIN_LENGTHS:
            return None
        return self._ascending[start + min(int(self._quantile * count), count - 1)]


class OutputLengthPredictor:
    """Predicts answer lengths from earlier answers to the same tenant's prompts of similar length (powers of two).

    Without data the prediction is max_new_tokens, which also bounds every other prediction. With more than
    `TENANT_SLOTS` tenants, several share one history.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._histories: dict[int, OutputLengthHistory] = {}
        self._fresh = np.full(TENANT_SLOTS * LENGTH_BUCKETS, np.iinfo(np.int64).max)

    def learn(self, columns: Columns, row: int) -> None:
        """Record the complete answer in `row`."""
        kind = _kind(columns, row)
        history = self._histories.setdefault(kind, OutputLengthHistory(self._quantile))
        history.add(int(columns.known[row]) - int(columns.prompt_tokens[row]))
        predicted = history.predict(0)
        if predicted is not None:
            self._fresh[kind] = predicted

    def rest(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Output tokens still to come, int64[len(rows)]."""
        prompt = columns.prompt_tokens[rows]
        kinds = _kinds(columns.tenant[rows], prompt)
        written = columns.known[rows] - prompt
        total = self._fresh[kinds]
        for place in np.flatnonzero(written).tolist():
            history = self._histories.get(int(kinds[place]))
            predicted = None if history is None else history.predict(int(written[place]))
            total[place] = np.iinfo(np.int64).max if predicted is None else predicted
        allowed = columns.limit[rows].astype(np.int64) + 1 - prompt
        rest: Int64Array = np.minimum(total, allowed) - written
        return rest

    def predict_remaining(self, columns: Columns, row: int) -> int:
        """Output tokens still to come for one row; 0 while there is no data."""
        prompt, written = int(columns.prompt_tokens[row]), int(columns.known[row]) - int(columns.prompt_tokens[row])
        history = self._histories.get(_kind(columns, row))
        predicted = None if history is None else history.predict(written)
        return 0 if predicted is None else min(predicted, int(columns.limit[row]) + 1 - prompt) - written


def _kind(columns: Columns, row: int) -> int:
    """`_kinds` for one row."""
    return int(columns.tenant[row]) % TENANT_SLOTS * LENGTH_BUCKETS + int(columns.prompt_tokens[row]).bit_length()


def _kinds(tenants: Int32Array, prompt_tokens: Int32Array) -> Int32Array:
    """Indices into the table of kinds, int32[n]; a prompt's bucket is the number of binary digits of its length."""
    buckets = np.frexp(prompt_tokens.astype(np.float64))[1]
    # Slots are a power of two, and this is several times faster than a remainder.
    return (tenants & (TENANT_SLOTS - 1)) * LENGTH_BUCKETS + buckets
