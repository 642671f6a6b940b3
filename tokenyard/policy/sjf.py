"""Shortest job first: the request with the least predicted work goes first."""

from collections.abc import Iterator
from typing import ClassVar

from typing_extensions import override

from tokenyard.base import SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.output_lengths import OutputLengthPredictor
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.views import Views


class ShortestJobFirst(Policy):
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
        self._predictor = OutputLengthPredictor(float(self.chosen["quantile"]))
        self._output_weight = float(self.chosen["output_weight"])

    @override
    def order(self, views: Views) -> Iterator[int]:
        columns, waiting = views.columns, views.waiting
        prefill = columns.target[waiting] - columns.matchable[waiting]
        return best_first(waiting, prefill + self._output_weight * self._predictor.rest(columns, waiting))

    @override
    def finished(self, row: int) -> None:
        if self.views is not None:
            self._predictor.learn(self.views.columns, row)


POLICIES: list[type[Policy]] = [ShortestJobFirst]
