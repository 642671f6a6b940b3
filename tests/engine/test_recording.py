"""The tape file, and the watchdog that ends a stuck process."""

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.engines import mock_config
from tests.engine.test_driver import LOOPS, FailingExecutor, ScriptedPort, submit, watched_mock
from tests.engine.verb_calls import flush, snapshot
from tokenyard.base import Cancel, ConfigError, SetPolicy, StepWork, Submit
from tokenyard.engine.processes.messages import Heartbeat
from tokenyard.engine.scheduler_process.build_scheduler import TapeFile, build_scheduler, measure_prior, open_tape
from tokenyard.engine.scheduler_process.driver import Driver
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.scheduler_process.health.watchdog import Watchdog
from tokenyard.executor.mock import load_executor as load_mock
from tokenyard.scheduler import Scheduler
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

FULL = Path("/dev/full")


def recorded_run(path, loop, depth, port, executor, **options):
    config = mock_config(overlap=depth > 1)
    config.record = str(path)
    for name, value in options.items():
        setattr(config, name, value)
    tape = open_tape(config)
    loop(Driver(build_scheduler(config, executor.info, tape), executor, port, log=StepLog(0), state=LoopState()))
    tape.close()
    return Tape(path.read_bytes(), path.name)


@pytest.mark.parametrize(("loop", "depth"), LOOPS, ids=["normal", "overlap"])
def test_the_loops_leave_a_tape_that_replays_even_through_failures(tmp_path, loop, depth):
    executor = FailingExecutor(watched_mock(step_ms=0.0, max_total_tokens=128, max_pool_rows=8), collects=[6])
    twice = submit(7)
    groups = [submit(1), submit(2, (9, 9))], [SetPolicy("unknown-policy"), submit(3), twice, twice, Cancel([3])]
    port = ScriptedPort(*groups, [submit(5, tokens=20)], [flush(1), snapshot(2)], [submit(6)])
    tape = recorded_run(tmp_path / "t", loop, depth, port, executor)
    report = replay(tape)
    assert report.difference is None
    assert report.plans == report.equal > 8
    assert tape.header.origin.settings.max_in_flight == depth
    assert tape.header.origin.info.model == "mock"


def first_prompt(tape):
    return next(record.body.request.prompt_ids.tolist() for record in tape.records() if isinstance(record.body, Submit))


def test_a_plain_tape_is_a_choice(tmp_path):
    executor = watched_mock(step_ms=0.0, max_total_tokens=128)
    tape = recorded_run(tmp_path / "t", *LOOPS[0], ScriptedPort([submit(1)]), executor, record_plain=True)
    assert first_prompt(tape) == [5, 6, 7]
    tape = recorded_run(tmp_path / "t", *LOOPS[0], ScriptedPort([submit(1)]), executor)
    assert first_prompt(tape) != [5, 6, 7]


def test_without_a_tape_there_is_nothing_in_between():
    config = mock_config()
    assert open_tape(config) is None
    assert type(build_scheduler(config, watched_mock().info, None)) is Scheduler


def test_an_existing_tape_is_kept_and_only_its_owner_may_read_the_new_one(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"old")
    tape = TapeFile(path)
    tape.write(b"new")
    tape.close()
    tape.close()
    tape.write(b"too late")
    assert (tmp_path / "t.old").read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"--record .*No such file"):
        TapeFile(tmp_path / "nowhere" / "t")


def test_a_pipe_is_refused_in_place_of_waiting_for_its_reader(tmp_path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(ConfigError, match="this is a pipe; give a file"):
        TapeFile(tmp_path / "p")


def test_a_full_disk_ends_the_tape_but_not_the_serving(caplog):
    if not FULL.exists():
        pytest.skip("there is no device that is always full here")
    tape = TapeFile(FULL)
    tape.write(b"x")
    tape.flush()
    tape.write(b"y" * 10**6)
    assert tape.file.closed
    tape.close()
    assert FULL.exists()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert os.strerror(errno.ENOSPC) in caplog.text


@pytest.fixture
def watched(monkeypatch):
    """A watchdog of one second, and what it has done."""
    done = []
    monkeypatch.setattr(
        "tokenyard.engine.scheduler_process.health.watchdog.os._exit", lambda code: done.append(f"exit {code}")
    )
    monkeypatch.setattr(
        "tokenyard.engine.scheduler_process.health.watchdog.faulthandler.dump_traceback",
        lambda **_: done.append("stacks"),
    )
    core = build_scheduler(mock_config(), watched_mock().info, None)
    dog = Watchdog(1.0, core, lambda report: done.append(report.failure), lambda: done.append("save"))
    return dog, done


def beat(doing, seconds):
    return Heartbeat(sent_ns=5, doing=doing, doing_ns=int(seconds * 1e9), steps=7, counters={})


@pytest.mark.parametrize(("doing", "words"), [("step", "the device's work on a step"), ("host", "the event loop")])
def test_what_takes_too_long_ends_with_its_reason(watched, caplog, doing, words):
    dog, done = watched
    dog.check(beat(doing, 1.5))
    assert (done[0], done[1], done[3]) == ("stacks", "save", "exit 1")
    assert words in done[2]
    assert "after 7 steps" in done[2]
    assert "waiting=0" in caplog.text


def test_what_is_quick_or_idle_continues(watched):
    dog, done = watched
    for doing, seconds in (("step", 0.9), ("host", 0.9), ("idle", 500.0)):
        dog.check(beat(doing, seconds))
    Watchdog(0.0, None, None, None).check(beat("step", 1e6))
    assert done == []


def test_steps_are_measured_only_where_something_asks_for_their_time():
    config, executor = mock_config(), watched_mock()
    config.executor = "torch"
    for policy, measured in (("fcfs", False), ("slo", True)):
        config.scheduler = replace(config.scheduler, schedule_policy=policy)
        prior = measure_prior(config, load_mock(step_ms=3.0, max_total_tokens=4096))
        assert (prior is not None) == measured
        if prior is not None:
            assert prior.step(StepWork(tokens=1, rows=1, decode_rows=1)) == pytest.approx(0.003, rel=0.2)
    config.scheduler = replace(config.scheduler, schedule_policy="fcfs")
    config.executor_options["draft_tokens"] = 4
    assert measure_prior(config, load_mock(step_ms=3.0, max_total_tokens=4096)) is not None, "drafts are judged by it"
    config.executor, config.executor_options = "mock", {}
    assert measure_prior(config, executor) is None
    config.executor_options["drafts"] = 4
    assert measure_prior(config, executor) is not None
