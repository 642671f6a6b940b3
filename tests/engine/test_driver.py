"""The event loops and their driver, in one process: failures, liveness, log lines."""

import logging
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.engines import watched_mock
from tests.engine.verb_calls import flush, replies, snapshot
from tokenyard.base import (
    NS_PER_S,
    Cancel,
    DeviceLostError,
    OpenGate,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    Submit,
)
from tokenyard.engine.processes.messages import RpcReply
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.engine.scheduler_process.driver import (
    FIRST_RETRY_NS,
    MAX_RETRY_NS,
    DeviceBrokenError,
    Driver,
)
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal, event_loop_overlap
from tokenyard.engine.scheduler_process.health.liveness import HeartbeatThread, LoopState, heartbeat_age_s
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.scheduler import Scheduler
from tokenyard.scheduler.row_state import Gate

LOOPS = [(event_loop_normal, 1), (event_loop_overlap, 2)]
both_loops = pytest.mark.parametrize(("loop", "depth"), LOOPS, ids=["normal", "overlap"])


def submit(number, prompt=(5, 6, 7), tokens=4, **options):
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True, **options)
    return Submit(Request(number, f"r{number}", np.array(prompt, np.int32), sampling))


class ScriptedPort:
    """Gives out the next group of messages each time the loop has nothing to do, and stops after the last."""

    def __init__(self, *groups):
        self.groups = list(groups)
        self.sent = []

    def receive(self, timeout_ns):
        if not timeout_ns:
            return []
        return self.groups.pop(0) if self.groups else None

    def send(self, message):
        self.sent.append(message)

    def tokens(self):
        found = {}
        for message in self.sent:
            for number, token in zip(getattr(message, "numbers", ()), getattr(message, "tokens", ()), strict=True):
                found.setdefault(int(number), []).append(int(token))
        return found

    def finished(self):
        return {finish.number: finish for message in self.sent for finish in getattr(message, "finished", ())}


class FailingExecutor:
    """A mock that fails at the given launches or collects."""

    def __init__(self, inner, *, launches=(), collects=(), error=None):
        self.inner, self.info = inner, inner.info
        self.launches, self.collects = set(launches), set(collects)
        self.error = error or RuntimeError("out of luck")
        self.launched = self.collected = 0

    def launch(self, plan):
        self.launched += 1
        if self.launched in self.launches:
            raise self.error
        return self.inner.launch(plan)

    def sample(self, ticket):
        self.inner.sample(ticket)

    def collect(self, ticket):
        self.collected += 1
        if self.collected in self.collects:
            raise self.error
        return self.inner.collect(ticket)

    def close(self):
        self.inner.close()


class NanExecutor(FailingExecutor):
    """A mock that reports NaN logits for the first row of the given collects."""

    def collect(self, ticket):
        result = self.inner.collect(ticket)
        self.collected += 1
        if self.collected in self.collects:
            result.nan_rows = (0,)
        return result


def run(loop, depth, port, *, executor=None, log=None, state=None, **settings):
    executor = executor or watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    scheduler = Scheduler(SchedulerSettings(max_in_flight=depth, **settings), executor.info)
    driver = Driver(scheduler, executor, port, log=log or StepLog(0), state=state or LoopState())
    loop(driver)
    return scheduler


@both_loops
def test_the_loops_answer_and_stop(loop, depth):
    port = ScriptedPort([submit(1), submit(2, (9, 9))], [submit(3)])
    scheduler = run(loop, depth, port)
    assert {number: len(tokens) for number, tokens in port.tokens().items()} == {1: 4, 2: 4, 3: 4}
    assert port.tokens()[1] == port.tokens()[3]
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    assert not scheduler.has_work


class LookingPort(ScriptedPort):
    """Waits as long as it may while that is short, and stops at the first long wait."""

    def receive(self, timeout_ns):
        if not timeout_ns or self.groups:
            return super().receive(timeout_ns)
        if timeout_ns > NS_PER_S:
            return None
        time.sleep(timeout_ns / NS_PER_S)
        return []


@both_loops
def test_an_idle_engine_is_seen_as_idle(loop, depth):
    state = LoopState()
    run(loop, depth, LookingPort([submit(1)]), state=state)
    assert (state.counters["running"], state.counters["used_tokens"]) == (0, 0)
    assert state.counters["counters"]["finished"] == 1


@both_loops
def test_control_messages_are_answered(loop, depth):
    port = ScriptedPort([submit(1)], [flush(5), snapshot(6)])
    run(loop, depth, port)
    found = replies(port)
    assert found[5] == RpcReply(5, True)
    assert found[6].value["running"] == 0


@both_loops
def test_a_pause_holds_everything_until_resume(loop, depth):
    port = ScriptedPort([Pause()], [submit(1)], [Resume()])
    run(loop, depth, port)
    assert len(port.tokens()[1]) == 4


@both_loops
@pytest.mark.parametrize("where", ["launches", "collects"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_after_a_failed_step_all_requests_continue(loop, depth, where, step):
    def answers(**failing):
        executor = FailingExecutor(watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8), **failing)
        port = ScriptedPort([submit(1), submit(2, (9, 9))], [submit(3)], [snapshot(1)])
        run(loop, depth, port, executor=executor)
        state = port.sent[-1].value
        assert (state["running"], state["used_tokens"], state["paused"]) == (0, 0, False)
        return port.tokens(), [finish.reason for finish in port.finished().values()]

    assert answers(**{where: [step]}) == answers()


@both_loops
def test_a_pause_outlives_a_failed_step(loop, depth):
    executor = FailingExecutor(watched_mock(step_ms=0.0, max_total_tokens=128), collects=[2])
    port = EagerPort([submit(1)], [Pause()], [snapshot(1)], [Resume()])
    run(loop, depth, port, executor=executor)
    assert len(port.tokens()[1]) == 4


class EagerPort(ScriptedPort):
    """Gives out a group at each turn, whether the loop has anything to do or not."""

    def receive(self, timeout_ns):
        return self.groups.pop(0) if self.groups else [] if not timeout_ns else None


@both_loops
@pytest.mark.parametrize("where", ["launches", "collects"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_fails_twice_in_a_row_ends_its_requests_and_no_more(loop, depth, where, step):
    inner = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    executor = FailingExecutor(inner, **{where: [step, step + 1]})
    port = ScriptedPort([submit(1), submit(2, (9, 9))], [submit(3)], [snapshot(1)])
    run(loop, depth, port, executor=executor)
    ends = port.finished()
    assert (ends[1].reason, ends[1].cause) == ("abort", "failed")
    assert "out of luck" in ends[2].message
    assert ends[3].reason == "length"
    assert len(port.tokens()[3]) == 4
    state = port.sent[-1].value
    assert (state["running"], state["used_tokens"]) == (0, 0)


@both_loops
def test_a_device_that_keeps_failing_ends_the_loop(loop, depth):
    executor = FailingExecutor(watched_mock(step_ms=0.0, max_total_tokens=128), launches=range(1, 9))
    port = ScriptedPort([submit(1)], [submit(2)])
    with pytest.raises(DeviceBrokenError, match="out of luck"):
        run(loop, depth, port, executor=executor)
    assert port.finished().keys() == {1}, "the second one is left to the process that comes in place of this one"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        DeviceLostError("a rank did an illegal memory access"),
    ],
)
def test_a_lost_device_ends_the_loop_at_once(error):
    executor = FailingExecutor(watched_mock(step_ms=0.0, max_total_tokens=128), collects=[1], error=error)
    port = ScriptedPort([submit(1)])
    with pytest.raises(DeviceBrokenError, match="illegal memory access"):
        run(event_loop_normal, 1, port, executor=executor)
    assert not port.finished()


class PatientPort(ScriptedPort):
    """Notes how long the loop would wait, and gives out its next group only after so many waits."""

    def __init__(self, waits, *groups):
        super().__init__(*groups)
        self.left, self.waited = waits, []

    def receive(self, timeout_ns):
        if timeout_ns and self.left and self.groups and not self.groups[0]:
            self.left -= 1
            self.waited.append(timeout_ns)
            return []
        return super().receive(timeout_ns)


@both_loops
def test_work_that_cannot_be_planned_is_looked_at_again_soon(loop, depth, caplog):
    held = [submit(1), Pause(numbers=[1])]
    port = PatientPort(8, held, [], [Resume([1])])
    run(loop, depth, port)
    assert port.waited[0] == FIRST_RETRY_NS
    assert port.waited == sorted(port.waited)
    assert port.waited[-3:] == [MAX_RETRY_NS] * 3
    assert len(port.tokens()[1]) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no step can be planned although 1 requests wait: 1 paused;" in line


class Adapters(Attachment):
    """As much of a LoraLoader as the driver needs; all adapters are being read."""

    def submitted(self, request, now):
        return replace(request, awaits_adapter=bool(request.lora))

    def held_reasons(self):
        return {"adapter": "until an adapter has been read (reading slow#1)"}


@both_loops
def test_what_requests_wait_for_is_named_and_no_policy_blamed(loop, depth, caplog):
    executor = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    settings = SchedulerSettings(max_in_flight=depth, enable_lora=True, max_loras_per_batch=1)
    scheduler = Scheduler(settings, executor.info)
    requests = [submit(1, n=2), submit(3)]
    for event in requests:
        event.request.lora = "slow#1"
    requests[1].request.grammar = 'start: "a"'
    opened = [OpenGate(number, gate) for number in (1, 2, 3) for gate in (Gate.ADAPTER, Gate.GRAMMAR)]
    port = PatientPort(8, [*requests, submit(4), Pause(numbers=[4])], [], [*opened, Resume([4])])
    loop(Driver(scheduler, executor, port, log=StepLog(0), state=LoopState(), attachments=[Adapters()]))
    assert {number: len(tokens) for number, tokens in port.tokens().items()} == {1: 4, 2: 4, 3: 4, 4: 4}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "although 4 requests wait: 1 paused; 3 until an adapter has been read (reading slow#1);" in line
    assert "policy" not in line


@both_loops
def test_a_policy_that_starts_nothing_is_blamed(loop, depth, caplog):
    class Stubborn(Scheduler):
        def plan(self, now):
            return super().plan(now) if not port.left else None

    executor = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    scheduler = Stubborn(SchedulerSettings(max_in_flight=depth), executor.info)
    port = PatientPort(8, [submit(1), submit(2), Pause(numbers=[2])], [], [Resume([2])])
    loop(Driver(scheduler, executor, port, log=StepLog(0), state=LoopState()))
    assert len(port.tokens()[1]) == len(port.tokens()[2]) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert "although 2 requests wait: 1 of them may start, so this is a defect of the policy fcfs;" in line


@both_loops
def test_a_pause_of_everything_is_no_stall(loop, depth, caplog):
    port = PatientPort(8, [Pause(), submit(1)], [], [Resume()])
    run(loop, depth, port)
    assert len(port.tokens()[1]) == 4
    assert not caplog.records


def test_events_that_the_scheduler_refuses_do_not_end_the_loop(caplog):
    port = ScriptedPort([SetPolicy("no-such-policy"), submit(1), submit(1, (8,)), Cancel([77])], [submit(2)])
    run(event_loop_normal, 1, port)
    assert len(port.tokens()[2]) == 4
    assert "no-such-policy" in caplog.text


def test_a_long_device_step_is_alive_and_a_hung_loop_is_not():
    state = LoopState()
    state.enter("step")
    time.sleep(0.05)
    beat = state.beat(time.monotonic_ns())
    assert heartbeat_age_s(beat, beat.sent_ns) == 0.0
    state.enter("host")
    time.sleep(0.05)
    beat = state.beat(time.monotonic_ns())
    assert heartbeat_age_s(beat, beat.sent_ns + 1_000_000_000) >= 1.05


def test_heartbeats_continue_during_a_step(monkeypatch):
    monkeypatch.setattr("tokenyard.engine.scheduler_process.health.liveness.HEARTBEAT_INTERVAL_S", 0.02)
    state, beats = LoopState(), []
    thread = HeartbeatThread(state, beats.append, lambda: None)
    thread.start()
    executor = watched_mock(step_ms=300.0, max_total_tokens=128)
    run(event_loop_normal, 1, ScriptedPort([submit(1, tokens=2)]), executor=executor, state=state)
    thread.close()
    assert "step" in {beat.doing for beat in beats}
    assert beats[-1].steps >= 1
    assert beats[-1].counters["total_tokens"] == 128


def test_log_lines_keep_the_order_that_people_grep(caplog):
    caplog.set_level(logging.INFO)
    run(event_loop_normal, 1, ScriptedPort([submit(1, tokens=6)], [submit(2, tokens=1)]), log=StepLog(2))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0, token usage: ")
    assert ", #running-req: " in lines[0]
    assert lines[1].startswith("Decode batch, #running-req: 1, #token: ")
    assert "gen throughput (token/s): " in lines[1]
    assert "#cached-token: 2" in lines[-1]


@both_loops
def test_a_row_of_nan_ends_with_an_error_and_the_others_continue(loop, depth, caplog):
    port = ScriptedPort([submit(0, tokens=8), submit(1, tokens=8)])
    inner = watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8)
    run(loop, depth, port, executor=NanExecutor(inner, collects=[3]))
    ends = port.finished()
    assert [(ends[number].reason, ends[number].cause) for number in (0, 1)] == [("abort", "failed"), ("length", "")]
    assert "NaN" in ends[0].message
    assert (len(port.tokens()[0]), len(port.tokens()[1])) == (2, 8)
    assert "the model's logits are NaN for 1 requests" in caplog.text
