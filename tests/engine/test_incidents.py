"""Lines about refusals and lost places: at once, then rate-limited, and no count is lost."""

from tokenyard.base import NS_PER_S, Finish
from tokenyard.engine.scheduler_process.health.incidents import Incidents


def refused(cause, count=1):
    return [Finish(number, "abort", cause=cause) for number in range(count)]


def said(caplog):
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_first_is_logged_at_once_and_the_rest_together(caplog):
    incidents = Incidents()
    incidents.on_finished([*refused("queue_full"), *refused("client_gone"), Finish(5, "stop")])
    incidents.log_due(0)
    assert said(caplog) == ["1 requests were refused, as the queue is full (--max-queued-requests)"]
    for second in range(1, 10):
        incidents.on_finished(refused("queue_full", 3))
        incidents.log_due(second * NS_PER_S)
    assert said(caplog) == []
    incidents.log_due(10 * NS_PER_S)
    assert said(caplog)[0].startswith("27 requests were refused, as the queue is full")
    incidents.log_due(60 * NS_PER_S)
    assert said(caplog) == []


def test_kinds_do_not_hide_each_other_and_totals_count_as_differences(caplog):
    incidents = Incidents()
    incidents.on_finished(refused("overdue"))
    incidents.on_counters({"retracted": 2, "preempted": 0})
    incidents.log_due(0)
    incidents.on_counters({"retracted": 2, "preempted": 4})
    incidents.log_due(1)
    lines = said(caplog)
    assert len(lines) == 3
    assert any(line.startswith("2 requests were retracted for lack of KV pages") for line in lines)
    assert lines[2].startswith("4 requests were preempted")
