"""What becomes of a model whose ranks fail: while they start, while they compute, and while there is nothing to do."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError, ExecutorInfo
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.distributed import child_ranks, process_watch, rank0
from tokenyard.executor.distributed.distributed_loader import load_executor
from tokenyard.executor.distributed.rank_messages import RankReport, check_report

OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 256, "max_pool_rows": 4}
SOON_S = 20.0
"""Only a test that fails waits so long: how soon a rank is missed is a figure, and not tested here."""

INFO = ExecutorInfo("m", "cpu", "float32", 100, 64, (1,), 4, 50, 8)


@pytest.fixture
def executor():
    torch.set_num_threads(1)
    executor = load_executor(str(DEMO_MODEL), tp_size=2, **OPTIONS)
    yield executor
    executor.close()


def listen(executor):
    """Record what is reported about a loss."""
    heard, reasons = threading.Event(), []
    executor.on_lost(lambda why: (reasons.append(why), heard.set()))
    return heard, reasons


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_also_when_nothing_runs(executor):
    heard, reasons = listen(executor)
    pid = executor.describe_ranks()[1]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert heard.wait(SOON_S)
    assert reasons == ["tensor-parallel rank 1 was killed by signal 9"]
    driver = Driver(executor)
    sequence = driver.start(prompt_of(9, seed=1))
    with pytest.raises(DeviceLostError, match=reasons[0]):
        driver.generate(sequence, 1)
    assert listen(executor)[1] == reasons
    executor.close()
    assert process_watch.state_of(pid) == ""


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_all_within_a_step(executor):
    heard, reasons = listen(executor)
    driver = Driver(executor)
    sequence = driver.start(prompt_of(9, seed=2))
    driver.generate(sequence, 2)
    os.kill(executor.describe_ranks()[1]["pid"], signal.SIGSTOP)
    with pytest.raises(DeviceLostError, match="rank 1 is stalled"):
        driver.generate(sequence, 3)
    assert heard.wait(SOON_S)
    assert reasons == ["tensor-parallel rank 1 is stalled"]


@pytest.mark.slow
def test_a_rank_that_cannot_start_says_why():
    with pytest.raises(ConfigError, match=r"^tensor-parallel rank 1: .*context_length is 5000"):
        refused_by_followers(context_length=5000)


def refused_by_followers(**options):
    """Load with options that only the other ranks get."""
    ranks = rank0.ModelRanks(str(DEMO_MODEL), 2, OPTIONS | options)
    try:
        ranks.agree(INFO)
    finally:
        ranks.close()


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return round(self.now_s * 1e9)


def looks(watch, clock, seconds):
    """Look ten times a second."""
    for _ in range(round(seconds * 10)):
        clock.now_s += 0.1
        watch.beat()


def test_a_rank_that_was_suspended_gives_the_others_time():
    clock = Clock()
    watch, own = process_watch.ProcessWatch(clock), os.getpid()
    alive_ns = watch.beat()
    looks(watch, clock, 9.0)
    assert not watch.is_stalled(own, alive_ns)
    assert not watch.is_stalled(own, 0)
    clock.now_s += 60.0
    looks(watch, clock, 9.0)
    assert not watch.is_stalled(own, alive_ns)
    looks(watch, clock, 2.0)
    assert watch.is_stalled(own, alive_ns)


@pytest.mark.slow
def test_a_rank_with_other_settings_is_refused():
    with pytest.raises(ConfigError, match=r"^tensor-parallel rank 1 has model .*demo_model', but rank 0 has 'm'"):
        refused_by_followers()


@pytest.mark.slow
def test_a_rank_that_is_late_is_named(monkeypatch):
    monkeypatch.setattr(child_ranks, "START_TIMEOUT_S", 0.01)
    with pytest.raises(EngineDeadError, match=r"^tensor-parallel rank 1 has not started within 0.01 s"):
        refused_by_followers()


def test_a_rank_that_ends_while_it_starts_is_named(monkeypatch):
    monkeypatch.setattr(child_ranks, "RANK_PROCESS_MODULE", "tests.engine.broken_child")
    with pytest.raises(EngineDeadError, match=r"^tensor-parallel rank 1 .* while it started"):
        refused_by_followers()


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (RankReport(info=replace(INFO, dtype="bfloat16")), "has dtype 'bfloat16', but rank 0 has 'float32'"),
        (RankReport(info=replace(INFO, page_size=16)), "has page_size 16, but rank 0 has 4"),
        (RankReport(info=INFO, version="0.0.1"), r"runs Tokenyard 0\.0\.1, rank 0 runs"),
        (RankReport(failure="the checkpoint has no tensor", wrong_settings=True), "the checkpoint has no tensor"),
    ],
)
def test_reports_are_compared(report, error):
    with pytest.raises(ConfigError, match=rf"^tensor-parallel rank 2:? {error}"):
        check_report("tensor-parallel rank 2", report, INFO)


def test_ranks_may_have_room_for_different_numbers_of_pages():
    assert check_report("rank 1", RankReport(info=replace(INFO, num_pages=30, device="cuda:1")), INFO) == 30
