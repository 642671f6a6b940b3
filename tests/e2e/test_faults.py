"""What is promised when things break: every stream ends in a clear way, and no page is lost."""

import signal

import pytest

from tests.e2e import faults
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")
STREAMS = 24


@pytest.mark.slow
def test_a_killed_scheduler_is_restarted_and_every_stream_completes():
    outcome = faults.kill_scheduler(STREAMS)
    assert outcome.ends == {"done": STREAMS}
    assert not outcome.notes
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0


def all_went_on(outcome, streams):
    assert outcome.ends == {"done": streams}
    assert not outcome.notes
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0


@pytest.mark.slow
def test_ranks_that_are_killed_leave_their_streams_to_the_others_without_gap_or_repeat():
    all_went_on(faults.break_ranks(STREAMS, 2, (signal.SIGKILL,), tokens=30), 2 * STREAMS)


@pytest.mark.slow
def test_four_ranks_killed_or_stalled_under_many_streams():
    # So long that no rank has answered all of its streams before the last one has begun.
    all_went_on(faults.break_ranks(48, 4, (signal.SIGKILL, signal.SIGSTOP), tokens=100), 4 * 2 * 48)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_broken_detokenizer_is_restarted_and_no_stream_has_a_gap_or_repeat(number):
    all_went_on(faults.break_detokenizer(STREAMS, 2, number), STREAMS)


@pytest.mark.slow
def test_a_killed_server_leaves_no_process_behind():
    outcome = faults.kill_server(STREAMS)
    assert sum(outcome.ends.values()) == STREAMS
    assert not outcome.notes


def test_clients_that_disconnect_lose_no_pages():
    outcome = faults.disconnects(4 * STREAMS)
    assert set(outcome.ends) == {"disconnected", "done"}
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0


@pytest.mark.slow
def test_clients_that_disconnect_free_their_kv_within_a_second():
    outcome = faults.hang_up(STREAMS)
    assert outcome.ends == {"disconnected": STREAMS}
    assert int(outcome.notes[0].split()[0]) >= STREAMS
    assert outcome.last_end_s < 1.0
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0


@pytest.mark.slow
def test_a_full_queue_refuses_with_retry_after():
    outcome = faults.full_queue(STREAMS)
    assert set(outcome.ends) == {"done", "503 + Retry-After"}
    assert outcome.ends["done"] >= STREAMS // 8
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0


@pytest.mark.slow
def test_a_small_pool_loses_no_request():
    outcome = faults.small_pool(STREAMS)
    assert outcome.ends == {"done": STREAMS}
    (retractions,) = outcome.notes
    assert int(retractions.split()[0]) > 0
    assert outcome.pages == "conserved"
    assert outcome.exit_status == 0
