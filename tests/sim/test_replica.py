"""One engine in virtual time: what it does where there is work and none of it can be planned."""

from types import SimpleNamespace

from tokenyard.base import NS_PER_S
from tokenyard.sim.engine.sim_scheduler import MAX_RETRIES, NEVER_NS, SimScheduler


class Stuck:
    """A scheduler with work that it cannot plan, until some time."""

    has_work, has_output = True, False

    def __init__(self, until_ns):
        self.until_ns, self.asked = until_ns, []

    def plan(self, now):
        self.asked.append(now)
        self.has_work = now < self.until_ns

    def wakeup_ns(self):
        return None

    def idle(self):
        return None

    def drain(self):
        return SimpleNamespace(finished=[])


def test_a_failed_step_is_retried_as_in_a_server():
    scheduler = Stuck(5 * NS_PER_S)
    replica = SimScheduler(scheduler, None, lambda finish: None)
    replica.advance(NEVER_NS)
    assert scheduler.asked == [second * NS_PER_S for second in range(6)]


def test_what_never_can_be_planned_does_not_keep_the_simulator_for_ever():
    scheduler = Stuck(NEVER_NS)
    replica = SimScheduler(scheduler, None, lambda finish: None)
    replica.advance(NEVER_NS)
    assert len(scheduler.asked) == MAX_RETRIES + 1
