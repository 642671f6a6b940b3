"""The output of the scheduler, collected until the engine drains it: one `TokenBatch` a step."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenyard.base import (
    BoolArray,
    Finish,
    Int32Array,
    Int64Array,
    KvMove,
    RowLogprobs,
    Started,
    TokenBatch,
    TokenLogprobs,
)

_NO_NUMBERS = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)


class Outbox:
    """Token columns and single events since the last `drain`."""

    def __init__(self) -> None:
        self._clear()
        self._moves: list[KvMove] = []

    def _clear(self) -> None:
        self._numbers: list[Int64Array] = []
        self._tokens: list[Int32Array] = []
        self._hits: list[Int32Array] = []
        self.started: list[Started] = []
        self.finished: list[Finish] = []
        self.logprobs: list[TokenLogprobs] = []

    def tokens(self, numbers: Int64Array, tokens: Int32Array, hits: Int32Array) -> None:
        """One new token for each of these requests; all columns have the same length."""
        self._numbers.append(numbers)
        self._tokens.append(tokens)
        self._hits.append(hits)

    def add_logprobs(self, entries: list[RowLogprobs], numbers: Int64Array, alive: BoolArray) -> None:
        """Log-probabilities from a step; `numbers` and `alive` are columns over the rows of its plan."""
        for entry in entries:
            if alive[entry.index]:
                self.logprobs.extend(_per_token(int(numbers[entry.index]), entry))

    def transfer(self, wanted: KvMove) -> None:
        """KV to load into pages, to hand over from them, or to store."""
        self._moves.append(wanted)

    def drain_moves(self) -> list[KvMove]:
        """What is to be done with KV since the last call."""
        transfers, self._moves = self._moves, []
        return transfers

    @property
    def empty(self) -> bool:
        """Whether `drain` would give nothing."""
        return not (self._numbers or self.finished or self.started or self.logprobs)

    def drain(self) -> TokenBatch:
        """Everything since the last call."""
        batch = TokenBatch(
            numbers=_one(self._numbers, _NO_NUMBERS),
            tokens=_one(self._tokens, _NO_TOKENS),
            hits=_one(self._hits, _NO_TOKENS),
            started=self.started,
            finished=self.finished,
            logprobs=self.logprobs,
        )
        self._clear()
        return batch


def _per_token(number: int, entry: RowLogprobs) -> Iterator[TokenLogprobs]:
    for offset, token in enumerate(entry.tokens):
        top = entry.top_tokens[offset] if entry.top_tokens else []
        top_logprobs = entry.top_logprobs[offset] if entry.top_logprobs else []
        yield TokenLogprobs(number, entry.position + offset, token, entry.logprobs[offset], top, top_logprobs)


def _one(parts: list[Any], empty: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty
