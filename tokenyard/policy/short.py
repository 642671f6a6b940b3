"""Orders that favour short requests: shortest predicted work first, and multi-level feedback."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.answers import AnswerPredictor
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.order import best_first
from tokenyard.policy.views import Columns, Views

MOST_LEVELS = 16
MANTISSA_BITS, EXPONENT_OF_ONE = 52, 1023
"""Of a float64."""


class ShortFirst(Policy):
    """Least work to come first: uncached prompt tokens, and predicted output tokens times `output_weight`.

    Shortest job first with predicted lengths, as in Fu et al. 2024 (learning to rank), but from history alone.
    """

    name = "short-first"
    uses_hits = True
    overtaking = "none: a long request can wait as long as shorter ones keep coming"
    options: ClassVar[dict[str, Option]] = {"quantile": 0.5, "output_weight": 1.0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"quantile": (0, 1), "output_weight": (0, 1e6)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._predictor = AnswerPredictor(float(self.chosen["quantile"]))
        self._output_weight = float(self.chosen["output_weight"])

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        columns, waiting = views.columns, views.waiting
        prefill = columns.target[waiting] - columns.matchable[waiting]
        return best_first(waiting, prefill + self._output_weight * self._predictor.rest(columns, waiting))

    def finished(self, row: int) -> None:
        """See `Policy.finished`."""
        if self.views is not None:
            self._predictor.learn(self.views.columns, row)


class MultiLevelFeedback(Policy):
    """Skip-join multi-level feedback queues (FastServe, Wu et al. 2023), in tokens.

    The top level lasts `quantum_tokens`, each further one twice as long. A request joins the first level that lasts for
    its uncached prompt and sinks as it is served. Where rows or pages run out, a request on a higher level takes them
    from the lowest. Who has waited for `promote_s` since he came in or last ran starts over at the top.
    """

    name = "mlfq"
    uses_hits = True
    charges_decode = True
    options: ClassVar[dict[str, Option]] = {"quantum_tokens": 512, "promote_s": 30.0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"quantum_tokens": (1, 2**40), "promote_s": (0, 1e6)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._quantum = int(self.chosen["quantum_tokens"])
        self._promote_ns = int(float(self.chosen["promote_s"]) * NS_PER_S)
        self.overtaking = f"arrivals of the next {float(self.chosen['promote_s']):g} s, then nobody"
        self._served = np.zeros(0, np.int64)
        self._idle_since = np.zeros(0, np.int64)

    def begin_step(self, views: Views) -> None:
        """See `Policy.begin_step`."""
        super().begin_step(views)
        missing = len(views.columns.seq) - len(self._served)
        if missing > 0:
            self._served = np.concatenate((self._served, np.zeros(missing, np.int64)))
            self._idle_since = np.concatenate((self._idle_since, np.zeros(missing, np.int64)))

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        waiting = views.waiting
        return best_first(waiting, np.where(self._promoted(views, waiting), 0, self._levels(views.columns, waiting)))

    def outranked(self, views: Views, asker: int) -> Iterator[int]:
        """See `Policy.outranked`. Promotion gives a place in line, not the right to take somebody's pages."""
        columns, rows = views.columns, views.running
        levels = self._levels(columns, rows)
        below = levels > self._levels(columns, np.array([asker], np.int32))[0]
        rows, levels = rows[below], levels[below]
        return iter(rows[np.lexsort((-columns.seq[rows], -levels))].tolist())

    def charge(self, row: int, prefill_tokens: int) -> None:
        """See `Policy.charge`."""
        assert self.views is not None
        if self._promoted(self.views, np.array([row], np.int32))[0]:
            self._served[row] = 0
        self._served[row] += prefill_tokens
        self._idle_since[row] = self.views.now

    def charge_decode(self, rows: Int32Array) -> None:
        """See `Policy.charge_decode`."""
        if self.views is None:
            return
        self._served[rows] += 1
        self._idle_since[rows] = self.views.now

    def removed(self, row: int) -> None:
        """See `Policy.removed`."""
        if row < len(self._served):
            self._served[row] = self._idle_since[row] = 0

    def _promoted(self, views: Views, rows: Int32Array) -> BoolArray:
        since = np.maximum(self._idle_since[rows], views.columns.arrival_ns[rows])
        promoted: BoolArray = views.now - since >= self._promote_ns
        return promoted

    def _levels(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """0 is the top; level k is left after (2^(k+1) - 1) quanta."""
        join = columns.target[rows] - columns.matchable[rows]
        fits = _doublings_up(np.maximum(join / self._quantum, 1.0))
        sunk = _doublings_down(self._served[rows] / self._quantum + 1.0)
        return np.minimum(np.maximum(fits, sunk), MOST_LEVELS)


def _doublings_down(ratio: Float64Array) -> Int64Array:
    """The whole part of log2 of float64[n] from 1 on, int64[n]: their exponents, which are far cheaper to read off."""
    return (ratio.view(np.int64) >> MANTISSA_BITS) - EXPONENT_OF_ONE


def _doublings_up(ratio: Float64Array) -> Int64Array:
    """log2 of float64[n] from 1 on, rounded up, int64[n]: one more than of the next smaller number, rounded down."""
    return (ratio.view(np.int64) - 1 >> MANTISSA_BITS) - (EXPONENT_OF_ONE - 1)


POLICIES: list[type[Policy]] = [ShortFirst, MultiLevelFeedback]
