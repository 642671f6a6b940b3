"""How well a scheduler says that it knows step times."""

from types import SimpleNamespace

import pytest

from tokenyard.base import StepWork
from tokenyard.cost import LinearCost, OnlineCost
from tokenyard.engine.scheduler_process.attachments import cost_report
from tokenyard.engine.scheduler_process.attachments.cost_report import CostReport
from tokenyard.routing.gpu_seconds import EngineCost
from tokenyard.scheduler.scheduler_state import prior_cost_model

PRIOR = prior_cost_model(SimpleNamespace(device="cpu"))


def learned(steps):
    cost = OnlineCost(PRIOR)
    for _ in range(steps):
        cost.learn(StepWork(tokens=8, rows=8, decode_rows=8), 0.01)
    return cost


@pytest.mark.parametrize(
    ("cost", "origin", "known"),
    [
        (None, "", None),
        (PRIOR, "", None),
        (learned(5), "", None),
        (learned(20), "", "learned from steps"),
        (PRIOR, "profile p", "profile p"),
        (learned(5), "profile p", "profile p, corrected by steps"),
    ],
)
def test_a_guess_is_not_reported(monkeypatch, cost, origin, known):
    monkeypatch.setattr(cost_report, "LEARNED_STEPS", 20)
    found = CostReport(SimpleNamespace(cost=cost), origin, 2).describe(0)
    if known is None:
        assert found == {}
        return
    read = EngineCost.from_report(found["cost_model"])
    assert (read.origin, read.devices, read.terms) == (known, 2, cost.terms)
    assert (read.error is None) == isinstance(cost, LinearCost)
