"""Which models are in memory: order, memory, idle time, and the bound of the wait."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.base import NS_PER_S
from tokenyard.multi_model.residency import (
    LOADED,
    LOADING,
    MAX_WAIT_NS,
    MIN_LOADED_NS,
    UNLOADED,
    UNLOADING,
    Load,
    Residency,
    Resume,
    Unload,
    Usage,
    Yield,
)


def usage(**models):
    found = defaultdict(Usage)
    found.update({name: Usage(*counts) for name, counts in models.items()})
    return found


@pytest.fixture
def machine():
    """Three models of 4 bytes where 8 fit, idle for 60 s at most."""
    found = Residency(8)
    for name in "abc":
        found.add(name, 4, 60 * NS_PER_S)
    return found


def load(machine, name, now):
    assert machine.plan(now, usage(**{name: (0, 1)})) == [Load(name)]
    machine.loaded(name, now)


def test_a_model_is_loaded_when_a_request_waits_and_unloaded_when_idle(machine):
    assert machine.plan(0, usage()) == []
    load(machine, "a", 0)
    assert machine.plan(61 * NS_PER_S, usage(a=(1, 0))) == []
    machine.ended("a", 61 * NS_PER_S)
    assert machine.plan(120 * NS_PER_S, usage()) == []
    (action,) = machine.plan(121 * NS_PER_S, usage())
    assert isinstance(action, Unload)
    assert machine["a"].phase == UNLOADING
    machine.stopped("a")
    assert machine["a"].phase == UNLOADED


def test_one_with_an_endless_keep_alive_stays_but_leaves_for_another(machine):
    load(machine, "a", 0)
    machine["a"].keep_alive_ns = None
    assert machine.plan(10**6 * NS_PER_S, usage()) == []
    load(machine, "b", 0)
    (action,) = machine.plan(5, usage(c=(0, 1)))
    assert action.name == "a"
    machine.stopped("a")
    assert machine["a"].keep_alive_ns == 60 * NS_PER_S


def test_the_longest_unused_leaves_first_and_its_memory_is_free_once_it_has_ended(machine):
    load(machine, "a", 0)
    load(machine, "b", 1)
    machine.ended("a", 5)
    (action,) = machine.plan(6, usage(c=(0, 1)))
    assert action.name == "b"
    assert machine.plan(7, usage(c=(0, 1))) == []
    machine.stopped("b")
    assert machine.plan(8, usage(c=(0, 1))) == [Load("c")]


def test_busy_models_yield_after_a_while_and_leave_when_their_requests_have_ended(machine):
    load(machine, "a", 0)
    load(machine, "b", 0)
    busy = usage(a=(2, 0), b=(1, 3), c=(0, 1))
    assert machine.plan(MIN_LOADED_NS, busy) == []
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS, busy) == [Yield("a")]
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS + 1, busy) == []
    (action,) = machine.plan(MIN_LOADED_NS + MAX_WAIT_NS + 2, usage(a=(0, 7), b=(1, 3), c=(0, 1)))
    assert action.name == "a"
    machine.stopped("a")
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS + 3, usage(a=(0, 7), b=(1, 3), c=(0, 1))) == [Load("c")]


def test_a_model_that_yielded_stays_if_the_one_that_waited_has_gone(machine):
    load(machine, "a", 0)
    load(machine, "b", 0)
    waits = usage(a=(1, 0), b=(1, 0), c=(0, 1))
    machine.plan(MIN_LOADED_NS, waits)
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS, waits) == [Yield("a")]
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS + 1, usage(a=(1, 2), b=(1, 0))) == [Resume("a")]
    assert machine.plan(MIN_LOADED_NS + MAX_WAIT_NS + 2, usage(a=(0, 2), b=(1, 0))) == []


def test_what_a_request_says_of_keep_alive_holds_for_the_load_that_it_waits_for(machine):
    machine.keep("a", 0)
    load(machine, "a", 0)
    assert machine["a"].keep_alive_ns == 60 * NS_PER_S
    machine.keep("a", 0)
    (action,) = machine.plan(1, usage())
    assert action.name == "a"
    machine["a"].keep_alive_ns = None
    machine.stopped("a")
    load(machine, "a", 2)
    assert machine["a"].keep_alive_ns is None


def test_no_more_than_max_loaded():
    machine = Residency(100, max_loaded=1)
    machine.add("a", 1, None)
    machine.add("b", 1, None)
    load(machine, "a", 0)
    (action,) = machine.plan(1, usage(b=(0, 1)))
    assert action.name == "a"


def test_a_load_that_hangs_is_given_up_once_another_model_waits(machine):
    assert machine.plan(0, usage(a=(0, 1))) == [Load("a")]
    late = machine.max_load_ns
    assert machine.plan(late + 1, usage(a=(0, 1))) == []
    assert machine.plan(late - 1, usage(a=(0, 1), b=(0, 1))) == []
    (action,) = machine.plan(late, usage(a=(0, 1), b=(0, 1)))
    assert (action.name, action.why) == ("a", "it was not loaded in 300 s, and b waits")
    machine.stopped("a")
    assert machine.plan(late + 1, usage(a=(0, 1), b=(0, 1))) == [Load("b")]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_sequence_keeps_memory_and_running_requests_and_ends_every_wait(data):
    names = "abcd"[: data.draw(st.integers(1, 4))]
    machine = Residency(10, data.draw(st.sampled_from([0, 0, 1, 2])))
    for name in names:
        machine.add(name, data.draw(st.integers(1, 10)), data.draw(st.sampled_from([None, 0, 3 * NS_PER_S])))
    running, waiting, now = dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0

    def step(*, quiet):
        use = usage(**{name: (running[name], waiting[name]) for name in names})
        for action in machine.plan(now, use):
            model = machine[action.name]
            match action:
                case Load():
                    assert waiting[action.name]
                case Unload():
                    assert not running[action.name]
                case Yield():
                    assert model.phase == LOADED
                case _:
                    assert model.phase == LOADED
                    assert not any(waiting[one] for one in names if machine[one].phase == UNLOADED)
        assert machine.used <= machine.budget
        for name in names:
            model = machine[name]
            if model.phase == LOADED and not model.yields:
                running[name], waiting[name] = running[name] + waiting[name], 0
            if quiet and running[name]:
                running[name] = 0
                machine.ended(name, now)
            if quiet or data.draw(st.booleans()):
                if model.phase == LOADING:
                    machine.loaded(name, now)
                elif model.phase == UNLOADING:
                    machine.stopped(name)

    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.integers(0, 8)) * NS_PER_S
        name = data.draw(st.sampled_from(names))
        kind = data.draw(st.sampled_from(["arrive", "end", "die"]))
        if kind == "arrive":
            waiting[name] += 1
        elif kind == "end" and running[name]:
            running[name] -= 1
            machine.ended(name, now)
        elif kind == "die" and machine[name].phase in (LOADED, LOADING):
            machine.stopped(name)
            running[name], waiting[name] = 0, waiting[name] + running[name]
        step(quiet=False)
    for _ in range(60):
        now += NS_PER_S
        step(quiet=True)
    assert not any(waiting.values())
