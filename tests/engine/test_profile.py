"""Timelines of the event loop."""

import itertools
import json
from collections import defaultdict

import pytest

from tests.engine.engines import watched_mock
from tests.engine.test_driver import ScriptedPort, both_loops, run, submit
from tests.engine.verb_calls import replies
from tokenyard.engine.processes.messages import RpcRequest
from tokenyard.engine.scheduler_process.health import profiler


def start(call_id):
    return RpcRequest(call_id, "start_profile")


def stop(call_id):
    return RpcRequest(call_id, "stop_profile")


def profiled(loop, depth):
    port = ScriptedPort([start(1), submit(1), submit(2, (9, 9))], [stop(2)], [submit(3)])
    executor = watched_mock(step_ms=2.0, max_total_tokens=128, max_pool_rows=8)
    run(loop, depth, port, executor=executor)
    assert len(port.tokens()[3]) == 4, "the driver goes on without the profile"
    return replies(port)[2].value


@both_loops
def test_steps_and_what_the_host_does_are_on_the_timeline(loop, depth):
    spans = defaultdict(list)
    for event in json.loads(profiled(loop, depth)):
        if event["ph"] == "X":
            spans[event["tid"], event["name"]].append(event)
    host = {name for tid, name in spans if tid == profiler.LOOP}
    assert {"plan", "launch", "wait for the device", "commit", "send"} <= host
    steps = [event for (tid, _), found in spans.items() if tid == profiler.DEVICE for event in found]
    assert {event["name"] for event in steps} >= {"EXTEND", "DECODE"}
    assert sum(event["args"]["tokens"] for event in steps) == 3 + 2 + 2 * 3
    assert len(spans[profiler.LOOP, "commit"]) == len(steps)
    for event in steps:
        assert event["dur"] >= 0
        commits = [one["ts"] for one in spans[profiler.LOOP, "commit"]]
        assert any(start >= event["ts"] + event["dur"] for start in commits), "a step is done before its commit"


@both_loops
def test_device_steps_do_not_overlap(loop, depth):
    events = json.loads(profiled(loop, depth))
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == profiler.DEVICE)
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(steps))


@both_loops
def test_one_profile_at_a_time(loop, depth):
    port = ScriptedPort([stop(1), start(2), start(3), stop(4), stop(5)])
    run(loop, depth, port)
    found = [reply.value for _, reply in sorted(replies(port).items())]
    assert [found[0], found[1], found[2], found[4]] == [None, True, False, None]
    assert json.loads(found[3])


@both_loops
def test_a_long_profile_is_bounded(loop, depth, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_EVENTS", 10)
    events = json.loads(profiled(loop, depth))
    assert len(events) == 11
    assert "events dropped" in events[-1]["args"]["name"]


def test_nothing_is_left_on_the_driver():
    class Bare:
        def __getattr__(self, name):
            if name not in profiler.VERBS:
                raise AttributeError(name)
            return lambda: None

    bare = Bare()
    timeline = profiler.StepProfile(bare)
    assert set(vars(bare)) == set(profiler.VERBS)
    timeline.stop()
    assert vars(bare) == {}
    with pytest.raises(AttributeError):
        timeline.stop()
