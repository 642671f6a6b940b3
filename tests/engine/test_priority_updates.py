"""Priority functions of the user's: what they see, what comes of it, and what they cannot do to others."""

import sys
import time
import types
from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.engines import watched_mock
from tests.engine.test_driver import ScriptedPort, both_loops
from tests.engine.verb_calls import snapshot
from tokenyard.base import (
    ConfigError,
    Finish,
    OpenGate,
    Pause,
    Request,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SloTargets,
    Submit,
    TokenBatch,
    Update,
)
from tokenyard.config import Settings
from tokenyard.engine.scheduler_process.attachments.priority import (
    BUDGET_NS,
    PERIOD_NS,
    SLICE_NS,
    PriorityUpdates,
    create_priority_updates,
)
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.slo_attainment import SloAttainment
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.scheduler_process.health.user_code_guards import MAX_VIOLATIONS, WINDOW_CALLS, ViolationCounter
from tokenyard.scheduler import Scheduler
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay
from tokenyard.wiring import engine_config

SETTINGS = SchedulerSettings(enable_priority_scheduling=True, priority_aging_s=0.0, default_priority_value=0)


class Clock:
    """A clock that advances only when a function under test moves it."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


def request(number, prompt=3, tokens=4, **fields):
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True, n=fields.pop("n", 1))
    return Request(number, f"r{number}", np.arange(5, 5 + prompt, dtype=np.int32), sampling, **fields)


def scheduler(**settings):
    info = watched_mock(step_ms=0.0, max_total_tokens=64, max_pool_rows=8).info
    return Scheduler(SETTINGS, info) if not settings else Scheduler(SchedulerSettings(**settings), info)


class Bench:
    """A hook and a scheduler that does not run."""

    def __init__(self, function):
        self.clock = Clock()
        self.core = scheduler()
        self.priority_updates = PriorityUpdates(function, "mod:f", self.core, self.clock)

    def submit(self, made, now=0):
        self.core.apply(Submit(made), now)
        self.priority_updates.accepted(made, now)

    def poll(self, now=0):
        return [(update.number, update.boost) for update in self.priority_updates.while_device_runs(now)]


def test_a_function_sees_the_request_and_the_system():
    seen = []
    bench = Bench(lambda *views: seen.append(views) or 0)
    bench.submit(request(1, prompt=5, tokens=9, priority=7, tenant="t", service_class="high", arrival_ns=10**9))
    bench.submit(request(2, arrival_ns=10**9))
    bench.core.apply(Update(2, priority=-3), 0)
    assert bench.poll(3 * 10**9) == []
    assert len(seen) == 2
    (first, system), (second, _) = seen
    assert (first.priority, first.tenant, first.service_class) == (7, "t", "high")
    assert (first.prompt_tokens, first.max_new_tokens, first.waited_s) == (5, 9, 2.0)
    assert (second.priority, second.service_class) == (-3, None)
    assert (system.waiting, system.running, system.kv_free, system.attainment) == (2, 0, 1.0, {})


def test_every_request_is_asked_about_on_arrival_and_then_every_period():
    asked = []
    bench = Bench(lambda view, system: asked.append(view.tenant) or 0)
    bench.priority_updates.while_device_runs(0)
    bench.submit(request(1, tenant="a"))
    bench.submit(request(2, tenant="b", n=2))
    for now in (1, 2, PERIOD_NS - 1):
        bench.poll(now)
    assert asked == ["a", "b", "b"]
    bench.poll(PERIOD_NS)
    bench.poll(PERIOD_NS + 1)
    assert asked == ["a", "b", "b"] * 2


def test_only_changes_are_sent():
    bench = Bench(lambda view, system: view.waited_s // 2)
    bench.submit(request(1, arrival_ns=1))
    seconds = [PERIOD_NS * 4 * second + 1 for second in range(6)]
    assert [bench.poll(now) for now in seconds] == [[], [], [(1, 1)], [], [(1, 2)], []]


def test_a_slice_is_short_and_the_rest_follows():
    def slow(view, system):
        bench.clock.now += BUDGET_NS
        return 1

    bench = Bench(slow)
    for number in range(1, 26):
        bench.submit(request(number))
    polled = [bench.poll() for _ in range(4)]
    assert [len(updates) for updates in polled] == [SLICE_NS // BUDGET_NS] * 2 + [5, 0]
    assert [number for updates in polled for number, _ in updates] == list(range(1, 26))


def test_newcomers_go_before_the_round():
    def slow(view, system):
        bench.clock.now += BUDGET_NS
        return PERIOD_NS if view.tenant == "new" else 1

    bench = Bench(slow)
    for number in range(1, 26):
        bench.submit(request(number))
    bench.poll(0)
    bench.submit(request(99, tenant="new"))
    while not bench.poll(1):
        pass
    bench.poll(PERIOD_NS * 2)
    bench.submit(request(100, tenant="new"))
    assert bench.poll(PERIOD_NS * 2 + 1)[0][0] == 100


def test_requests_that_do_not_wait_are_skipped():
    asked = []
    bench = Bench(lambda view, system: asked.append(view.tenant) or 0)
    bench.submit(request(1, tenant="a"))
    bench.submit(request(2, tenant="b"))
    assert bench.core.plan(1) is not None
    bench.submit(request(3, tenant="c"))
    bench.poll(2)
    assert asked == ["c"]


def mistakes():
    def raises(view, system):
        raise KeyError("oops")

    def overruns(view, system):
        bench_clock.now += BUDGET_NS + 1000
        return 1.0

    bench_clock = Clock()
    return [
        (bench_clock, raises, "failed: KeyError"),
        (bench_clock, lambda view, system: float("nan"), "finite number, not nan"),
        (bench_clock, lambda view, system: "urgent", "finite number, not 'urgent'"),
        (bench_clock, lambda view: 1, "failed: TypeError"),
        (bench_clock, overruns, "took 51 us"),
    ]


@pytest.mark.parametrize(("clock", "function", "why"), mistakes())
def test_the_third_mistake_switches_it_off(clock, function, why, caplog):
    bench = Bench(function)
    bench.priority_updates.clock = clock
    for number in range(1, MAX_VIOLATIONS + 3):
        bench.submit(request(number))
        bench.poll()
        off = number >= MAX_VIOLATIONS
        assert (bench.priority_updates.describe(0)["priority_function"].startswith("off (mod:f ")) is off
    assert why in bench.priority_updates.describe(0)["priority_function"]
    assert sum("switched off" in line for line in caplog.messages) == 1
    assert bench.poll(PERIOD_NS * 9) == []


def test_rare_mistakes_are_forgiven():
    counted = ViolationCounter()
    assert not any(counted.count(call % (WINDOW_CALLS // 2) == 0) for call in range(1, 1000))
    assert [counted.count(True) for _ in range(MAX_VIOLATIONS)][-1]


def test_attainment_counts_the_latest_answers_of_each_class():
    kept, ms = SloAttainment(), 10**6

    def finish(number, first_ms, last_ms, ttft_ms=10, reason="length", cause=""):
        times = {"arrival_ns": 1, "first_token_ns": 1 + first_ms * ms, "finished_ns": 1 + last_ms * ms}
        promise = SloTargets(ttft_ms * ms, 2 * ms)
        kept.finished(Finish(number, reason, completion_tokens=11, cause=cause, slo_targets=promise, **times))

    kept.submitted(request(1, n=3))
    finish(1, 10, 30)
    finish(2, 11, 12)
    finish(3, 10, 31)
    kept.submitted(request(4, service_class="high"))
    finish(4, 50, 70, ttft_ms=50)
    kept.submitted(request(5, service_class="high"))
    finish(5, 0, 0, reason="abort", cause="cancelled")
    finish(6, 1, 2)
    assert kept.shares() == {"normal": pytest.approx(1 / 3), "high": 1.0}


class Sink:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data

    def flush(self):
        pass


def by_tenant(view, system):
    return {"late but urgent": 5.0, "nonsense": None}.get(view.tenant, 0.0)


@both_loops
def test_boosts_order_the_queue_and_stand_on_the_tape(loop, depth, monkeypatch):
    # However slow the machine is, all four requests are asked about before the first step.
    for limit in ("BUDGET_NS", "SLICE_NS"):
        monkeypatch.setattr(f"tokenyard.engine.scheduler_process.attachments.priority.{limit}", 10_000_000_000)
    executor = watched_mock(step_ms=0.0, max_total_tokens=64, max_pool_rows=8)
    origin = Origin(
        SchedulerSettings(
            max_in_flight=depth,
            max_running_requests=1,
            enable_priority_scheduling=True,
            default_priority_value=0,
            disable_priority_preemption=True,
        ),
        executor.info,
    )
    sink = Sink()
    core = RecordingScheduler(origin, sink, b"key", "test")
    priority_updates = PriorityUpdates(by_tenant, "mod:f", core)
    burst = [Submit(request(number, tenant="late but urgent" if number == 4 else "")) for number in range(1, 5)]
    port = ScriptedPort(burst, [snapshot(1)])
    loop(Driver(core, executor, port, log=StepLog(0), state=LoopState(), attachments=[priority_updates]))
    assert list(port.finished()) == [4, 1, 2, 3]
    assert port.sent[-1].value["priority_function"] == "mod:f"
    report = replay(Tape(sink.data, "tape"))
    assert (report.difference, report.plans) == (None, report.equal)
    assert report.plans > 4


@both_loops
def test_a_broken_function_fails_no_request(loop, depth, caplog):
    executor = watched_mock(step_ms=0.0, max_total_tokens=64, max_pool_rows=8)
    core = Scheduler(SchedulerSettings(max_in_flight=depth, enable_priority_scheduling=True), executor.info)
    priority_updates = PriorityUpdates(lambda view, system: time.sleep(0.001), "mod:f", core)
    burst = [Submit(request(number)) for number in range(1, 9)]
    port = ScriptedPort([Pause()], burst, [], [], [Resume()], [snapshot(1)])
    loop(Driver(core, executor, port, log=StepLog(0), state=LoopState(), attachments=[priority_updates]))
    assert sorted(port.finished()) == list(range(1, 9))
    assert {finish.reason for finish in port.finished().values()} == {"length"}
    assert port.sent[-1].value["priority_function"].startswith("off (mod:f ")
    assert "switched off" in caplog.text


def test_a_request_that_the_scheduler_refuses_is_forgotten():
    executor = watched_mock(step_ms=0.0, max_total_tokens=64, max_pool_rows=8)
    core = Scheduler(SETTINGS, executor.info)
    asked = []
    priority_updates = PriorityUpdates(lambda view, system: asked.append(view.tenant) or 0, "mod:f", core)
    port = ScriptedPort([Submit(request(1, prompt=0, tenant="refused")), Submit(request(2, tenant="taken"))])
    event_loop_normal(Driver(core, executor, port, log=StepLog(0), state=LoopState(), attachments=[priority_updates]))
    assert set(asked) == {"taken"}


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("my_hooks")
    made.urgent = lambda view, system: 1.0
    made.seven = 7
    sys.modules["my_hooks"] = made
    yield made
    del sys.modules["my_hooks"]


def test_the_flag_reaches_the_engine(module):
    chosen = Settings(priority_function="my_hooks:urgent", enable_priority_scheduling=True).effective()
    config = engine_config(chosen)
    assert config.priority_function == "my_hooks:urgent"
    assert create_priority_updates(config.priority_function, scheduler()).describe(0) == {
        "priority_function": "my_hooks:urgent"
    }
    assert create_priority_updates("", scheduler()) is None


def test_requests_without_a_priority_can_be_raised_as_well(module):
    flags = {"priority_function": "my_hooks:urgent", "enable_priority_scheduling": True}
    assert Settings(**flags).scheduler_settings(context_length=8).default_priority_value == 0
    assert (
        Settings(**flags, default_priority_value=-9).scheduler_settings(context_length=8).default_priority_value == -9
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"priority_function": "my_hooks:urgent"}, "add --enable-priority-scheduling"),
        ({"priority_function": "my_hooks:seven", "schedule_policy": "priority"}, "not callable"),
        ({"priority_function": "nowhere:f", "schedule_policy": "priority"}, "importing nowhere failed"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(module, flags, words):
    with pytest.raises(ConfigError, match=words):
        engine_config(Settings(**flags).effective())


def test_an_open_gate_or_an_empty_batch_changes_nothing():
    bench = Bench(by_tenant)
    bench.core.apply(OpenGate(1, 1), 0)
    bench.priority_updates.on_output(TokenBatch(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)))
    assert bench.poll() == []


def test_one_that_never_returns_is_switched_off_at_once():
    def endless(view, system):
        while True:
            pass

    bench = Bench(endless)
    bench.submit(request(1))
    assert bench.poll() == []
    assert "interrupted" in bench.priority_updates.describe(0)["priority_function"]
