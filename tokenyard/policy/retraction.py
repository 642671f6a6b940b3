"""Which running requests are retracted when pages run out: orders of rows, the first victim first."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tokenyard.base import ConfigError, Int32Array, SchedulerSettings
from tokenyard.policy.slo_targets import tpot_slack_ns
from tokenyard.policy.urgency import Urgency
from tokenyard.policy.views import Views, tokens_generated

IndexArray = npt.NDArray[np.intp]


class VictimRule(Protocol):
    """Orders the running rows for retraction when pages run out."""

    def victims(self, views: Views) -> Iterator[int]:
        """Running rows, the first to retract first. All rows are yielded."""


class FewestTokens(VictimRule):
    """SGLang's retraction order: the row with the fewest output tokens goes first; among equals the longest prompt."""

    @override
    def victims(self, views: Views) -> Iterator[int]:
        columns, rows = views.columns, views.running
        keys = (columns.seq[rows], -columns.prompt_tokens[rows], tokens_generated(columns, rows))
        return _in_order(rows, np.lexsort(keys))


class Newest(VictimRule):
    """vLLM's order under fcfs: the latest arrival goes first, so the oldest request always progresses."""

    @override
    def victims(self, views: Views) -> Iterator[int]:
        rows = views.running
        return _in_order(rows, np.argsort(-views.columns.seq[rows], kind="stable"))


class LowestPriority(VictimRule):
    """The least urgent row goes first, among equals the latest arrival: the row that the queue would serve last."""

    def __init__(self, urgency: Urgency) -> None:
        self._urgency = urgency

    @override
    def victims(self, views: Views) -> Iterator[int]:
        columns, rows = views.columns, views.running
        return _in_order(rows, np.lexsort((-columns.seq[rows], -self._urgency.keys(columns, rows))))


class MostSlack(VictimRule):
    """The row that is furthest ahead of its time per output token goes first: it can best afford to wait."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings

    @override
    def victims(self, views: Views) -> Iterator[int]:
        rows = views.running
        slack = tpot_slack_ns(views.columns, rows, self._settings, views.now)
        return _in_order(rows, np.lexsort((-views.columns.seq[rows], -slack)))


class FewestLost(VictimRule):
    """The row that loses the least work goes first: the fewest tokens computed beyond its first cache hit."""

    @override
    def victims(self, views: Views) -> Iterator[int]:
        columns, rows = views.columns, views.running
        return _in_order(rows, np.lexsort((-columns.seq[rows], columns.planned[rows] - columns.hit[rows])))


def create_victim_rule(settings: SchedulerSettings, urgency: Urgency) -> VictimRule:
    """The rule that `settings.retraction_policy` names. Raises ConfigError for an unknown name."""
    rules: dict[str, Callable[[], VictimRule]] = {
        "length": FewestTokens,
        "newest": Newest,
        "priority": lambda: LowestPriority(urgency),
        "slack": lambda: MostSlack(settings),
        "fewest-lost": FewestLost,
    }
    if settings.retraction_policy not in rules:
        raise ConfigError(f"--retraction-policy is {settings.retraction_policy!r}; choose one of {', '.join(rules)}")
    return rules[settings.retraction_policy]()


def _in_order(rows: Int32Array, order: IndexArray) -> Iterator[int]:
    return iter(rows[order].tolist())
