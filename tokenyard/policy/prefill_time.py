"""The time that prefill adds to a step: a parabola fitted to any cost model, which is inverted in closed form."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from tokenyard.base import CostModel, Float64Array, Int32Array, StepWork

PROBE_TOKENS = 8192
"""Large enough that reading the weights no longer bounds the step and its time is linear in the tokens."""

MIN_TOKEN_S = 1e-9


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A chunk of x tokens after `prefix` adds x * (token_s + area_s * (prefix + x / 2)) seconds to a step.

    Three calls of the cost model give the two factors. They are exact for models of that form, which measurements of
    many engines fit well, and a local fit for others.
    """

    token_s: float
    area_s: float

    @classmethod
    def of(cls, cost: CostModel) -> Self:
        """The factors that fit `cost`."""
        area = PROBE_TOKENS * PROBE_TOKENS / 2
        once = cost.step(_probe(PROBE_TOKENS, 0.0))
        token_s = (cost.step(_probe(2 * PROBE_TOKENS, 0.0)) - once) / PROBE_TOKENS
        area_s = (cost.step(_probe(PROBE_TOKENS, area)) - once) / area
        return cls(max(token_s, MIN_TOKEN_S), max(area_s, 0.0))

    def chunk_s(self, prefix: int, tokens: int) -> float:
        """Seconds that a chunk of `tokens` after `prefix` adds."""
        return tokens * (self.token_s + self.area_s * (prefix + tokens / 2))

    def rest_s(self, prefix: Int32Array, tokens: Int32Array) -> Float64Array:
        """`chunk_s` of many prefills at once, float64[n]."""
        counts = tokens.astype(np.float64)
        seconds: Float64Array = counts * (self.token_s + self.area_s * (prefix + counts / 2))
        return seconds

    def tokens(self, prefix: int, budget_s: float) -> int:
        """The most tokens after `prefix` that add at most `budget_s`."""
        if budget_s <= 0.0:
            return 0
        slope = self.token_s + self.area_s * prefix
        # The usual form of the root loses precision where area_s is tiny compared with slope; this one does not.
        return int(2.0 * budget_s / (slope + math.sqrt(slope * slope + 2.0 * self.area_s * budget_s)))

    def base_s(self, cost: CostModel, decodes: StepWork) -> float:
        """Seconds that a step's `decodes` take when chunks fill the rest of the step."""
        work = _probe(PROBE_TOKENS, 0.0)
        work.tokens += decodes.tokens
        work.rows += decodes.rows
        work.decode_rows, work.decode_context = decodes.decode_rows, decodes.decode_context
        return cost.step(work) - PROBE_TOKENS * self.token_s


def _probe(tokens: int, area: float) -> StepWork:
    return StepWork(tokens=tokens, rows=1, prefill_tokens=tokens, chunk_area=area)
