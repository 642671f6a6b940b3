"""The process that looks ahead: its verdicts, its faults, and that the server does not wait for it."""

import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.servers import alive
from tests.engine.engines import watched_mock
from tests.engine.test_driver import ScriptedPort, submit
from tests.engine.verb_calls import choose, replies, snapshot
from tokenyard.base import ConfigError, Finish, SchedulerSettings, SetPolicy, TokenBatch
from tokenyard.engine.scheduler_process.attachments import lookahead as module
from tokenyard.engine.scheduler_process.attachments.lookahead import COMMAND, LookaheadClient
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal, event_loop_overlap
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.scheduler import Scheduler
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay

ODD = Path(__file__).with_name("bad_lookahead.py")
ROOT = ODD.parents[2]
OPTIONS = {"interval_s": 0.1, "cpu_share": 1.0, "among": "fcfs+slo"}
FAULTS = [
    "dies at once",
    "dies when asked",
    "noise",
    "endless",
    "not a number",
    "strangers",
    "another question",
    "talks first",
    "deaf",
    "sleeps",
]


WORDLESS = {"dies at once": "", "deaf": "import time; time.sleep(600)"}


def odd(*mode):
    if mode[0] in WORDLESS:
        return (sys.executable, "-c", WORDLESS[mode[0]])
    return (sys.executable, str(ODD), *mode)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_NS", 1_000_000)
    monkeypatch.setattr(module, "MIN_BACKOFF_NS", 20_000_000)
    monkeypatch.setattr(module, "ENVIRONMENT", {"PYTHONPATH": str(ROOT)})


class Yard:
    """A scheduler with waiting requests, which are not served, and its lookahead."""

    def __init__(self, command, requests=5, **options):
        info = watched_mock(step_ms=1.0, max_total_tokens=4096).info
        self.settings = SchedulerSettings(schedule_policy="adaptive", policy_options=OPTIONS | options)
        self.core = Scheduler(self.settings, info)
        self.lookahead = LookaheadClient(self.core, self.settings, command)
        self.events = []
        for number in range(requests):
            event = submit(number, range(100, 200), tokens=20)
            self.core.apply(event, time.monotonic_ns())
            self.lookahead.accepted(event.request, time.monotonic_ns())

    def turn_until(self, done, timeout_s=60.0):
        end = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end, self.state
            self.events += [event.name for event in self.lookahead.while_device_runs(time.monotonic_ns())]
            time.sleep(0.002)

    @property
    def state(self):
        return self.lookahead.describe(time.monotonic_ns())["adaptive"]

    @property
    def pid(self):
        return self.lookahead.pipe.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lookahead.close()


def test_the_verdict_of_the_real_process_arrives():
    with Yard(COMMAND, requests=40, cpu_share=0.5) as yard:
        yard.turn_until(lambda: yard.state["looks"] >= 3)
        state = yard.state
        assert yard.events[0] == "fcfs"
        assert (state["candidates"], state["failures"], state["note"]) == (["fcfs", "slo"], 0, "")
        assert state["scores"][0]["name"] in ("fcfs", "slo")
        assert 0.0 < state["cpu_s"] < 60.0
        pid = yard.pid
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert not alive(pid)


def test_what_is_better_twice_becomes_the_policy():
    with Yard(odd("better")) as yard:
        yard.turn_until(lambda: len(yard.events) >= 2)
        assert yard.events == ["fcfs", "slo"]
        state = yard.state
        assert (state["current"], state["switches"]) == ("slo", [{"candidate": "slo", "times": 1}])
        assert "90.0%" in state["latest"][0]["reason"]


def test_what_is_not_better_changes_nothing():
    with Yard(odd("worse")) as yard:
        yard.turn_until(lambda: yard.state["looks"] >= 4)
        assert yard.events == ["fcfs"]


@pytest.mark.part(5)
@pytest.mark.parametrize("mode", FAULTS)
def test_a_fault_keeps_the_policy_is_logged_once_and_retried(mode, monkeypatch, caplog):
    if mode in ("deaf", "sleeps"):
        monkeypatch.setattr(module, "STALL_NS", 300_000_000)
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 200_000)
    with Yard(odd(mode)) as yard:
        pids = set()

        def failed_twice():
            if yard.lookahead.pipe is not None:
                pids.add(yard.pid)
                # Traffic continues; it must not accumulate for a process that does not read.
                yard.lookahead.accepted(submit(7, range(100, 2000)).request, 1)
            return yard.state["failures"] >= 2

        yard.turn_until(failed_twice)
        assert yard.events == ["fcfs"]
        assert "failed" in yard.state["note"]
        assert yard.state["looks"] == 0
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1


def test_pauses_between_trials_grow(monkeypatch):
    with Yard(odd("dies at once")) as yard:
        pauses = []

        def failed_often():
            if len(pauses) < yard.state["failures"]:
                pauses.append(yard.lookahead.pause_ns)
            return len(pauses) == 4

        yard.turn_until(failed_often)
        assert pauses == [40_000_000, 80_000_000, 160_000_000, 320_000_000]
        monkeypatch.setattr(module, "MAX_BACKOFF_NS", 400_000_000)
        yard.turn_until(lambda: yard.state["failures"] == 5)
        assert yard.lookahead.pause_ns == 400_000_000


def test_one_that_can_not_be_started_is_a_fault_as_well():
    with Yard(("/no/such/program",)) as yard:
        yard.turn_until(lambda: yard.state["failures"] >= 2)
        assert yard.events == ["fcfs"]


def test_it_continues_after_a_fault(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Yard(odd("dies once", str(tmp_path / "died"))) as yard:
        yard.turn_until(lambda: len(yard.events) >= 2)
        assert yard.events == ["fcfs", "slo"]
        assert (yard.state["failures"], yard.state["note"]) == (1, "")
    assert "the lookahead works again" in caplog.text


def test_another_policy_ends_it_and_adaptive_begins_it():
    with Yard(odd("worse")) as yard:
        yard.turn_until(lambda: yard.state["looks"] >= 1)
        pid = yard.pid
        yard.lookahead.policy_changed(SetPolicy("lpm"), time.monotonic_ns())
        yard.turn_until(lambda: not alive(pid))
        assert yard.state == {}
        yard.lookahead.policy_changed(SetPolicy("adaptive", OPTIONS | {"among": "lpm+slo"}), time.monotonic_ns())
        yard.turn_until(lambda: yard.state["looks"] >= 1)
        assert yard.events == ["fcfs", "lpm"]
        # The process that is there already may still answer for the candidates of before.
        yard.lookahead.policy_changed(SetPolicy("adaptive", OPTIONS | {"among": "slo+fcfs"}), time.monotonic_ns())
        yard.turn_until(lambda: yard.state["looks"] >= 1)
        assert yard.state["failures"] == 0
        with pytest.raises(ConfigError, match="did you mean"):
            yard.lookahead.policy_changed(SetPolicy("adaptive", {"among": "slow"}), time.monotonic_ns())


def test_ends_are_passed_on():
    with Yard(odd("worse")) as yard:
        empty = np.empty(0, np.int32)
        batch = TokenBatch(empty.astype(np.int64), empty, empty, finished=[Finish(1, "stop", completion_tokens=3)])
        yard.lookahead.on_output(batch)
        yard.turn_until(lambda: yard.state["looks"] >= 2)
        assert yard.state["failures"] == 0


def test_without_work_it_does_not_look():
    with Yard(odd("worse"), requests=0) as yard:
        begin = time.monotonic()
        yard.turn_until(lambda: time.monotonic() > begin + 0.5)
        assert yard.state["looks"] == 0


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("loop", "depth"), [(event_loop_normal, 1), (event_loop_overlap, 2)], ids=["normal", "overlap"]
)
@pytest.mark.parametrize("mode", ["deaf", "sleeps", "dies when asked", "noise"])
def test_the_loop_continues_whatever_it_does(loop, depth, mode, monkeypatch):
    """Were the loop to wait for such a process, this would never end."""
    if mode in ("deaf", "sleeps"):
        monkeypatch.setattr(module, "STALL_NS", 100_000_000)
    executor = watched_mock(step_ms=0.5, max_total_tokens=512, max_pool_rows=8)
    settings = SchedulerSettings(max_in_flight=depth, schedule_policy="adaptive", policy_options=OPTIONS)
    core = Scheduler(settings, executor.info)
    lookahead = LookaheadClient(core, settings, odd(mode))

    class Port(ScriptedPort):
        """Brings requests until the fault has been noticed, and lets them be served."""

        brought = 0

        def receive(self, timeout_ns):
            if self.brought > 20 and lookahead.describe(0)["adaptive"]["failures"]:
                return None if timeout_ns else []
            if core.has_work and self.brought % 4:
                self.brought += 0 if core.snapshot(0).waiting > 4 else 1
                return []
            self.brought += 1
            return [submit(self.brought, range(3, 40), tokens=6)]

    port = Port()
    loop(Driver(core, executor, port, log=StepLog(0), state=LoopState(), attachments=[lookahead]))
    lookahead.close()
    ends = port.finished()
    assert len(ends) > 5
    assert {(finish.reason, finish.completion_tokens) for finish in ends.values()} == {("length", 6)}
    assert core.snapshot(0).policy == "fcfs"


def test_the_loop_changes_its_policy_and_people_choose():
    executor = watched_mock(step_ms=1.0, max_total_tokens=512, max_pool_rows=8)
    settings = SchedulerSettings(schedule_policy="adaptive", policy_options=OPTIONS)
    sink = io.BytesIO()
    core = RecordingScheduler(Origin(settings, executor.info), sink, None, "test")
    lookahead = LookaheadClient(core, settings, odd("better"))
    numbers = iter(range(100_000))
    seen = []

    class Port(ScriptedPort):
        """Work without end until the policy changes; then a user chooses another one."""

        def receive(self, timeout_ns):
            seen.append(core.snapshot(0).policy)
            if seen[-1] == "slo":
                return [choose(1, "lpm"), choose(2, "adaptive", {"among": "slow"}), snapshot(3)]
            if seen[-1] == "lpm":
                return None
            return [submit(next(numbers), range(3, 30), tokens=3)]

    port = Port()
    event_loop_normal(Driver(core, executor, port, log=StepLog(0), state=LoopState(), attachments=[lookahead]))
    assert list(dict.fromkeys(seen)) == ["adaptive", "fcfs", "slo", "lpm"]
    found = replies(port)
    assert found[1].refusal == ""
    assert "did you mean slo" in found[2].refusal
    assert found[3].value["adaptive"] == {}
    lookahead.close()
    # The tape knows the changes, so that it replays without the process.
    tape = Tape(sink.getvalue(), "tape")
    changes = [record.body.name for record in tape.records() if isinstance(record.body, SetPolicy)]
    assert changes == ["fcfs", "slo", "lpm", "adaptive"]
    report = replay(tape)
    assert report.difference is None
    assert report.plans == report.equal > 10


def test_it_ends_with_its_parent():
    code = (
        "import time\n"
        "from tests.engine.test_lookahead import Yard, COMMAND\n"
        "yard = Yard(COMMAND)\n"
        "yard.turn_until(lambda: yard.state['looks'] >= 1)\n"
        "print(yard.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20.0
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.02)
