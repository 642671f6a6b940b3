"""Weights that a restarted scheduler process goes on with."""

import asyncio
import queue
from types import SimpleNamespace

import pytest

from tokenyard.base import ConfigError, Pause, Resume, WeightSource, WeightsUpdated
from tokenyard.base.request import weights_key
from tokenyard.engine.frontend.weight_updates import WeightUpdate, WeightUpdates
from tokenyard.engine.scheduler_process.attachments.weights import WeightUpdater


def restoring(prepare=lambda source: "digest", swap=lambda: None):
    """An updater that restores weights, the state of its core, and the call of its thread."""
    state, calls = SimpleNamespace(paused=False), queue.Queue()
    executor = SimpleNamespace(prepare_weights=prepare, drop_weights=lambda: None, swap_weights=swap)
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


def fails(*args):
    raise ConfigError("the folder is gone")


@pytest.mark.parametrize("failing", ["prepare", "swap"])
def test_no_step_is_planned_with_the_weights_of_the_start_where_others_cannot_be_restored(failing):
    updater, state, call = restoring(**{failing: fails})
    updater.verbs()[call.verb](0, **call.arguments)
    for state.paused in (False, True, False):
        events = updater.poll(0)
        assert not any(isinstance(event, Resume | WeightsUpdated) for event in events)
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


@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_outlasts_an_update_that_ends_the_hold_of_a_rank(paused):
    said = []

    async def call(verb, *args, **arguments):
        said.append(verb)
        return ["digest"]

    balancer = SimpleNamespace(flushed=lambda: None)
    ranks = SimpleNamespace(on_join=[], clients=[], paused=paused, call=call, pause=said.append, balancer=balancer)
    updates = WeightUpdates(ranks)
    asyncio.run(updates.update(WeightUpdate(WeightSource(files=("tensors",)))))
    assert said == ["prepare_weights", "use_weights", *([Pause()] if paused else [])]
