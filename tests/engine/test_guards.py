"""Changing the policy while an engine runs, and what becomes of one that stalls."""

import asyncio
import sys
import threading
import time
import types

import numpy as np
import pytest

from tests.engine.engines import mock_config, watched_mock
from tests.engine.test_driver import LOOPS, ScriptedPort, both_loops, run, submit
from tests.engine.verb_calls import choose, replies, snapshot
from tokenyard.base import ConfigError, SchedulerSettings, SetPolicy
from tokenyard.engine.processes.launch import running_engine
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.scheduler_process.health.user_code_guards import (
    MAX_VIOLATIONS,
    STALL_NS,
    WINDOW_CALLS,
    StalledError,
    StallGuard,
    interrupt_after,
)
from tokenyard.policy import Policy
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay


def refusals_of(port):
    return {call_id: reply.refusal for call_id, reply in replies(port).items()}


@both_loops
def test_a_policy_is_changed_while_requests_wait(loop, depth):
    burst = [submit(number, prompt=(5,) * number, tokens=6) for number in range(1, 6)]
    port = ScriptedPort([*burst, choose(1, "lof")], [snapshot(2)])
    run(loop, depth, port, max_running_requests=2)
    state = port.sent[-1].value
    assert (state["policy"], state["policy_note"], state["policy_options"]) == ("lof", "", {})
    assert state["overtaking"].startswith("none")
    assert refusals_of(port)[1] == ""
    assert len(port.finished()) == 5


@both_loops
def test_a_refused_policy_is_answered_and_leaves_the_old_one(loop, depth, caplog):
    choices = [choose(1, "lmp"), choose(2, "random", {"sed": 1}), choose(3, "random", {"seed": "x"})]
    port = ScriptedPort(choices, [SetPolicy("nothing")], [snapshot(4)])
    run(loop, depth, port, schedule_policy="hrrn")
    refusals = refusals_of(port)
    assert "did you mean lpm" in refusals[1]
    assert "it has seed" in refusals[2]
    assert "must be a int" in refusals[3]
    assert port.sent[-1].value["policy"] == "hrrn"
    assert "there is no schedule policy 'nothing'" in caplog.text


@both_loops
def test_a_policy_that_contradicts_other_settings_is_refused(loop, depth):
    port = ScriptedPort([choose(1, "priority")])
    run(loop, depth, port, abort_on_priority_when_disabled=True)
    assert "drop one of the two" in refusals_of(port)[1]


def test_a_policy_that_needs_the_cache_says_what_it_does_without(caplog):
    port = ScriptedPort([choose(1, "dfs-weight")], [snapshot(2)])
    run(*LOOPS[0], port, disable_radix_cache=True)
    note = "dfs-weight needs the prefix cache, which is disabled: using fcfs"
    assert (port.sent[-1].value["policy"], port.sent[-1].value["policy_note"]) == ("fcfs", note)
    assert note in caplog.messages


def test_the_answer_crosses_the_processes():
    async def main():
        async with running_engine(mock_config()) as manager:
            await manager.set_policy("mlfq", {"quantum_tokens": 64})
            state = await manager.snapshot()
            with pytest.raises(ConfigError, match="did you mean mlfq"):
                await manager.set_policy("mlfp", {})
            return state

    state = asyncio.run(main())
    assert (state["policy"], state["policy_options"]["quantum_tokens"]) == ("mlfq", 64)


@pytest.fixture
def own_policies():
    class Slow(Policy):
        def order(self, views):
            time.sleep(2 * STALL_NS / 1e9)
            return super().order(views)

    class Endless(Policy):
        def order(self, views):
            while True:
                pass

    class Stubborn(Policy):
        def order(self, views):
            try:
                while True:
                    pass
            except Exception:
                return super().order(views)

    made = types.ModuleType("my_policies")
    made.Stubborn = Stubborn
    made.Slow, made.Endless, made.Quick = Slow, Endless, type("Quick", (Policy,), {})
    sys.modules["my_policies"] = made
    yield
    del sys.modules["my_policies"]


class Sink:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data

    def flush(self):
        pass


@both_loops
def test_a_stalling_policy_is_replaced_by_fcfs_and_a_tape_shows_when(loop, depth, own_policies, caplog):
    executor = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    settings = SchedulerSettings(
        max_in_flight=depth,
        max_running_requests=1,
        schedule_policy="my_policies:Slow",
        policy_options={},
        enable_priority_scheduling=True,
    )
    sink = Sink()
    core = RecordingScheduler(Origin(settings, executor.info), sink, None, "test")
    port = ScriptedPort([submit(number, tokens=2) for number in range(1, 10)], [snapshot(1)])
    loop(Driver(core, executor, port, log=StepLog(0), state=LoopState()))
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    assert len(port.finished()) == 9
    state = port.sent[-1].value
    assert state["policy"] == "priority+fcfs"
    assert "my_policies:Slow repeatedly took longer than 50 ms" in state["policy_note"]
    assert state["policy_note"] in caplog.messages
    tape = Tape(sink.data, "tape")
    (change,) = [record.body for record in tape.records() if isinstance(record.body, SetPolicy)]
    assert change.name == "fcfs"
    report = replay(tape, own_policies=True)
    assert (report.difference, report.plans) == (None, report.equal)


@both_loops
def test_a_slow_tape_is_not_counted_as_the_policys_time(loop, depth, own_policies):
    class SlowSink(Sink):
        def write(self, data):
            time.sleep(2 * STALL_NS / 1e9)
            super().write(data)

    executor = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    settings = SchedulerSettings(max_in_flight=depth, schedule_policy="my_policies:Quick", policy_options={})
    core = RecordingScheduler(Origin(settings, executor.info), SlowSink(), None, "test")
    port = ScriptedPort([submit(number, tokens=4) for number in range(1, 4)], [snapshot(1)])
    loop(Driver(core, executor, port, log=StepLog(0), state=LoopState()))
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    state = port.sent[-1].value
    assert (state["policy"], state["policy_note"], state["policy_failure"]) == ("my_policies:Quick", "", "")


@both_loops
@pytest.mark.parametrize("name", ["Endless", "Stubborn"])
def test_a_policy_that_never_returns_is_interrupted(loop, depth, name, own_policies):
    port = ScriptedPort([submit(number, tokens=2) for number in range(1, 5)], [snapshot(1)])
    run(loop, depth, port, schedule_policy=f"my_policies:{name}")
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    state = port.sent[-1].value
    assert f"fcfs (my_policies:{name} failed: it raised StalledError" in state["policy"]


def test_only_what_the_guarded_function_calls_is_interrupted():
    def guarded(work):
        try:
            work()
        except StalledError as error:
            return str(error)

    def spin(seconds=0.12):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    with interrupt_after(0.01, inside=guarded.__code__):
        spin()
        assert "longer than 0.01 s" in guarded(spin)
    spin()
    with pytest.raises(StalledError), interrupt_after(0.01):
        spin()


def test_outside_the_main_thread_nothing_is_interrupted():
    def work():
        with interrupt_after(0.001):
            time.sleep(0.02)
        done.append(True)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


@both_loops
def test_a_chosen_policy_ends_the_note_on_the_stalled_one(loop, depth, own_policies):
    burst = [submit(number, tokens=2) for number in range(1, 6)]
    port = ScriptedPort(burst, [choose(1, "my_policies:Quick")], [snapshot(2)])
    run(loop, depth, port, max_running_requests=1, schedule_policy="my_policies:Slow")
    assert (port.sent[-1].value["policy"], port.sent[-1].value["policy_note"]) == ("my_policies:Quick", "")


class Clock:
    def __init__(self, steps_ns):
        self.times = iter(np.cumsum([0, *(time for step in steps_ns for time in (step, 0))]).tolist())

    def __call__(self):
        return next(self.times)


def stalls(policy, steps_ns):
    """After how many steps the policy counts as stalled; None for never."""
    guard = StallGuard(clock=Clock(steps_ns))
    guard.begin(policy)
    for count in range(1, len(steps_ns) + 1):
        with guard.watch():
            guard.asked()
            guard.answered()
        if guard.stalled:
            return count
    return None


def test_only_user_policies_are_watched_and_only_for_repeated_stalls():
    slow, fine = STALL_NS + 1, STALL_NS
    assert stalls("my:Policy", [slow] * 9) == MAX_VIOLATIONS
    assert stalls("priority+my:Policy", [slow, fine] * 9) == 2 * MAX_VIOLATIONS - 1
    assert stalls("lpm", [slow] * 9) is None
    assert stalls("my:Policy", [fine] * 9) is None
    assert stalls("my:Policy", [slow, *[fine] * (WINDOW_CALLS // 2)] * 9) is None
