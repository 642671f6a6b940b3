"""Which cost models learn how long steps took."""

import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SchedulerSettings
from tokenyard.executor.mock import FixedStepCost


class Pupil(FixedStepCost):
    def __init__(self, learns):
        super().__init__(0.001)
        self.learns = learns
        self.learned = []

    def learn(self, work, seconds):
        self.learned.append((work.tokens, seconds))


@pytest.mark.parametrize("learns", [True, False])
def test_only_a_learning_cost_model_gets_steps(learns):
    cost = Pupil(learns)
    yard = Yard(SchedulerSettings(context_length=64), make_info(), cost=cost)
    yard.submit([5, 6, 7], max_new=2)
    yard.run()
    assert cost.learned == ([(3, 0.001), (1, 0.001)] if learns else [])
