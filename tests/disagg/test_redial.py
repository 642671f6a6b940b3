"""When prefill engines are looked up and dialled again."""

from tokenyard.base import NS_PER_S
from tokenyard.disagg.protocol.redial import MAX_BACKOFF_NS, MIN_BACKOFF_NS, WARN_INTERVAL_NS, RedialSchedule


def test_an_engine_is_looked_up_until_all_its_ranks_are_connected():
    schedule = RedialSchedule(["http://one", "http://two"])
    assert schedule.due(0) == ["http://one", "http://two"]
    assert schedule.found("http://one", ["a:1", "a:2"]) == ["a:1", "a:2"]
    schedule.connected("a:1")
    assert schedule.due(MIN_BACKOFF_NS) == ["http://one", "http://two"]
    assert schedule.found("http://one", ["a:1", "a:2"]) == ["a:2"]
    schedule.connected("a:2")
    assert schedule.due(NS_PER_S * 60) == ["http://two"]
    schedule.lost("a:1", "", NS_PER_S * 60)
    assert schedule.due(NS_PER_S * 60) == ["http://one"]


def test_the_backoff_grows_until_the_engine_was_stable():
    schedule, now, waits = RedialSchedule(["http://one"]), 0, []
    assert schedule.due(now)
    for _ in range(8):
        since = now
        while not schedule.due(now):
            now += MIN_BACKOFF_NS
        waits.append(now - since)
    assert waits[:3] == [MIN_BACKOFF_NS, 2 * MIN_BACKOFF_NS, 4 * MIN_BACKOFF_NS]
    assert waits[-1] == MAX_BACKOFF_NS
    now += 3 * MAX_BACKOFF_NS
    assert schedule.due(now)
    assert schedule.due(now + MIN_BACKOFF_NS)


def test_an_address_that_a_request_wants_is_dialled_once():
    schedule = RedialSchedule([])
    assert schedule.want("a:1")
    assert schedule.want("a:1")
    assert schedule.take_wanted() == ["a:1"]
    assert schedule.take_wanted() == []
    assert schedule.want("a:1"), "it is being dialled"
    schedule.connected("a:1")
    assert schedule.take_wanted() == []
    assert not schedule.want("a:1")
    schedule.lost("a:1", "closed", 0)
    assert schedule.want("a:1")


def test_a_problem_is_reported_now_and_then():
    schedule = RedialSchedule([])
    assert schedule.lost("a:1", "closed", 0)
    assert not schedule.lost("a:1", "closed", WARN_INTERVAL_NS - 1)
    assert schedule.lost("a:1", "reset", WARN_INTERVAL_NS - 1)
    assert schedule.lost("a:1", "closed", WARN_INTERVAL_NS + 1)
