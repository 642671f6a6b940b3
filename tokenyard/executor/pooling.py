"""Vectors of prompts, made of the hidden states that the model's head reads.

The last token's state is what embedding models on top of decoders use (E5-Mistral, arXiv 2401.00368; Qwen3-Embedding);
the mean of all is the plain way for models that were not trained for it.
"""

from collections.abc import Callable

import numpy as np
import torch

from tokenyard.base import RowStart, StepPlan

Hidden = Callable[[int, int], torch.Tensor]
"""Gives float32[last - first, hidden] of tokens first .. last - 1 of the step."""


class PooledRows:
    """The pool rows whose prompts become vectors, and the sums of those that are between two chunks."""

    def __init__(self) -> None:
        self._starts: dict[int, RowStart] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def take(self, starts: list[RowStart]) -> None:
        """Register rows that start; a retracted row starts again."""
        for start in starts:
            self._starts.pop(start.pool_row, None)
            self._sums.pop(start.pool_row, None)
            if start.pooling:
                self._starts[start.pool_row] = start

    def vectors(self, plan: StepPlan, hidden: Hidden) -> list[tuple[int, torch.Tensor]]:
        """(place in the plan, float32[hidden]) of the prompts that a step completes, on the device."""
        if not self._starts:
            return []
        found = []
        ends = np.cumsum(plan.counts)
        for place, row in enumerate(plan.pool_rows.tolist()):
            start = self._starts.get(row)
            if start is None:
                continue
            count, end = int(plan.counts[place]), int(ends[place])
            complete = int(plan.starts[place]) + count == start.prompt_tokens
            if start.pooling == "mean":
                total = hidden(end - count, end).sum(0)
                self._sums[row] = total = self._sums[row] + total if row in self._sums else total
                if complete:
                    found.append((place, total / start.prompt_tokens))
            elif complete:
                found.append((place, hidden(end - 1, end)[0]))
            if complete:
                del self._starts[row]
                self._sums.pop(row, None)
        return found
