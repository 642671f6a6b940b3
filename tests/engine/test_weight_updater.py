"""Weights that a restarted scheduler process goes on with."""

import queue
from types import SimpleNamespace

from tokenyard.base import Pause, Resume
from tokenyard.base.request import weights_key
from tokenyard.engine.scheduler_process.attachments.weights import WeightUpdater


def restoring():
    """An updater that restores weights, the state of its core, and the call of its thread."""
    state, calls = SimpleNamespace(paused=False), queue.Queue()
    executor = SimpleNamespace(
        prepare_weights=lambda source: "digest", drop_weights=lambda: None, swap_weights=lambda: None
    )
    core = SimpleNamespace(weights="", in_flight=0, snapshot=lambda now: state)
    updater = WeightUpdater(executor, core, calls.put)
    updater.verbs()["restore_weights"](0, folder="folder", version="7")
    return updater, state, calls.get(timeout=10)


def test_a_refused_update_drops_no_weights_that_are_restored():
    updater, _, call = restoring()
    verbs = updater.verbs()
    verbs["drop_weights"](0)
    verbs[call.verb](0, **call.arguments)
    assert updater.poll(0)[0].version == weights_key("7", "digest")


def test_no_step_is_planned_before_weights_are_restored_though_a_client_resumes():
    updater, state, _ = restoring()
    for state.paused in (False, True):
        events = updater.poll(0)
        assert [type(event) for event in events] == ([] if state.paused else [Pause])
    state.paused = False
    assert [type(event) for event in updater.poll(0)] == [Pause]


def test_a_process_whose_weights_came_as_tensors_plans_no_step_before_they_are_sent_again():
    calls, state = queue.Queue(), SimpleNamespace(paused=False)
    executor = SimpleNamespace(prepare_weights=lambda source: "digest", swap_weights=lambda: None)
    core = SimpleNamespace(weights="", in_flight=0, snapshot=lambda now: state)
    updater = WeightUpdater(executor, core, calls.put)
    verbs = updater.verbs()
    verbs["await_weights"](0)
    assert [type(event) for event in updater.poll(0)] == [Pause]
    verbs["prepare_weights"](0, folder="", files=["tensors"])
    call = calls.get(timeout=10)
    verbs[call.verb](0, **call.arguments)
    verbs["use_weights"](0, version="8", flush=True)
    update, resumed = updater.poll(0)
    assert update.version == weights_key("8", "digest")
    assert isinstance(resumed, Resume)
