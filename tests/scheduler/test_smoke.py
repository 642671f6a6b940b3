from tests.scheduler.harness import Yard, make_info

from tokenyard.base import SchedulerSettings


def test_one_request_runs_to_its_length():
    yard = Yard(SchedulerSettings(context_length=64), make_info())
    number = yard.submit([5, 6, 7], max_new=4)
    yard.run()
    assert yard.finished[number].reason == "length"
    assert len(yard.tokens[number]) == 4
    assert yard.scheduler.idle() is None
