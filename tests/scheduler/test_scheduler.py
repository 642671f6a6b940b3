"""The scheduler's verbs one by one, on the mock device."""

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import (
    Cancel,
    ConfigError,
    Flush,
    Pause,
    Resume,
    SamplingParams,
    SchedulerSettings,
    SetPolicy,
    StopFound,
)
from tokenyard.scheduler import RowState


def settings(**changes) -> SchedulerSettings:
    return SchedulerSettings(**({"context_length": 64} | changes))


def test_one_request_runs_to_its_length():
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], max_new=4)
    yard.run()
    finish = yard.finished[number]
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 3, 4)
    assert len(yard.tokens[number]) == 4
    assert yard.scheduler.idle() is None


def test_eos_on_the_last_allowed_token_counts_as_stop():
    yard = Yard(settings(), make_info(), answer_tokens=(4, 4))
    number = yard.submit([5, 6, 7], max_new=4)
    yard.run()
    assert (yard.finished[number].reason, yard.finished[number].matched) == ("stop", 2)


def test_stop_token_ids_hold_even_when_eos_is_ignored():
    yard = Yard(settings(), make_info(), answer_tokens=(2, 2))
    free = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    bound = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, stop_token_ids=[2])
    first, second = yard.submit([5, 6], sampling=free), yard.submit([5, 6], sampling=bound)
    yard.run()
    assert yard.finished[first].completion_tokens == 6
    assert yard.finished[second].completion_tokens == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_answer_enters_the_tree_too(depth):
    yard = Yard(settings(max_in_flight=depth), make_info())
    first = yard.submit([5, 6, 7, 8], max_new=6)
    yard.run(depth)
    conversation = [5, 6, 7, 8, *yard.tokens[first], 9]
    second = yard.submit(conversation, max_new=2)
    yard.run(depth)
    # The last token of the first answer was never an input, so its KV does not exist.
    assert yard.finished[second].cached_tokens == 4 + 6 - 1


def test_prompts_can_be_shared_as_soon_as_a_chunk_has_committed():
    yard = Yard(settings(chunked_prefill_size=8), make_info())
    yard.submit(list(range(3, 23)), max_new=2)
    yard.launch()
    yard.commit()
    late = yard.submit(list(range(3, 23)), max_new=2)
    yard.run()
    assert yard.finished[late].cached_tokens >= 8


def test_salted_requests_never_share():
    yard = Yard(settings(), make_info())
    yard.submit([5, 6, 7, 8], cache_salt="a")
    yard.run()
    other = yard.submit([5, 6, 7, 8], cache_salt="b")
    same = yard.submit([5, 6, 7, 8], cache_salt="a")
    yard.run()
    assert yard.finished[other].cached_tokens == 0
    assert yard.finished[same].cached_tokens == 3


def test_decode_has_a_turn_under_sustained_prefill():
    yard = Yard(settings(prefill_decode_interval=2, max_running_requests=4), make_info(pages=256))
    yard.submit([5, 6], max_new=40)
    yard.launch()
    yard.commit()
    modes = []
    for turn in range(9):
        yard.submit([7 + turn, 8], max_new=1)
        yard.launch()
        modes.append(yard.plans[-1].forward_mode)
        yard.commit()
    assert "".join(mode[0] for mode in modes) == "EDEEDEEDE"


def test_mixed_chunk_decodes_in_every_step():
    yard = Yard(settings(enable_mixed_chunk=True, chunked_prefill_size=8), make_info())
    yard.submit([5, 6], max_new=20)
    yard.launch()
    yard.commit()
    yard.submit(list(range(10, 40)), max_new=2)
    yard.launch()
    plan = yard.plans[-1]
    assert plan.forward_mode == "MIXED"
    assert plan.counts.tolist() == [1, 7]


def test_a_retracted_request_keeps_its_place_and_its_answer():
    reference = Yard(settings(), make_info(pages=64))
    tight = Yard(settings(schedule_conservativeness=0.01), make_info(pages=24))
    prompts = [[3 + i, 4, 5, 6] for i in range(4)]
    for yard in (reference, tight):
        for prompt in prompts:
            yard.submit(prompt, max_new=12)
        yard.run()
    assert tight.scheduler.snapshot(0).counters.retracted > 0
    assert tight.tokens == reference.tokens
    assert all(finish.reason == "length" for finish in tight.finished.values())
    assert tight.scheduler.idle() is None


def test_retracted_requests_never_meet_the_queue_limit():
    yard = Yard(settings(max_running_requests=1, max_queued_requests=4), make_info())
    first = yard.submit([5, 6, 7], max_new=12)
    yard.launch()
    yard.commit()
    queued = [yard.submit([50 + i, 4, 5, 6], max_new=2) for i in range(4)]
    yard.apply(Pause("retract"))
    assert yard.scheduler.snapshot(0).waiting == 5
    yard.apply(Resume())
    yard.run()
    assert {yard.finished[number].reason for number in [first, *queued]} == {"length"}
    assert yard.finished[first].finished_ns < yard.finished[queued[0]].finished_ns


def test_a_full_queue_refuses_with_503():
    yard = Yard(settings(max_queued_requests=2), make_info())
    numbers = [yard.submit([5, 6], max_new=2) for _ in range(3)]
    assert yard.finished[numbers[2]].cause == "queue_full"
    assert "queue is full" in yard.finished[numbers[2]].message
    yard.run()
    assert yard.finished[numbers[0]].reason == "length"


@pytest.mark.parametrize("length", [0, 64, 1000])
def test_prompts_that_can_never_run_are_refused(length):
    yard = Yard(settings(), make_info())
    number = yard.submit([5] * length)
    assert yard.finished[number].cause == ("too_long" if length else "invalid")
    assert not yard.scheduler.has_work


def test_max_new_tokens_is_cut_to_the_context():
    yard = Yard(settings(), make_info(pages=200))
    number = yard.submit([5] * 60, max_new=1000)
    yard.run()
    assert yard.finished[number].completion_tokens == 4


def test_a_request_as_large_as_the_pool_runs_alone():
    yard = Yard(settings(context_length=200), make_info(pages=40, context=200))
    number = yard.submit([5] * 20, max_new=1000)
    other = yard.submit([6] * 20, max_new=10)
    yard.run()
    assert yard.finished[number].completion_tokens == 40 - 20 + 1
    assert yard.finished[other].completion_tokens == 10


def test_prefill_only_requests_sample_nothing():
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], max_new=0)
    yard.run()
    assert (yard.finished[number].reason, yard.finished[number].completion_tokens) == ("length", 0)
    assert number not in yard.tokens


def test_a_group_prefills_its_prompt_once():
    yard = Yard(settings(), make_info())
    sampling = SamplingParams(max_new_tokens=3, n=3, temperature=1.0, seed=7)
    number = yard.submit([5, 6, 7, 8, 9, 10], sampling=sampling)
    yard.run()
    computed = sum(int(plan.counts[plan.decode_rows :].sum()) for plan in yard.plans)
    assert computed == 6 + 1 + 1
    answers = [tuple(yard.tokens[number + i]) for i in range(3)]
    assert len(set(answers)) == 3


def test_a_cancelled_leader_does_not_hold_back_its_group():
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], sampling=SamplingParams(max_new_tokens=3, n=2))
    yard.apply(Cancel([number]))
    yard.run()
    assert yard.finished[number].reason == "abort"
    assert yard.finished[number + 1].reason == "length"


@pytest.mark.parametrize("when", ["waiting", "chunking", "running"])
def test_abort_in_every_state_gives_all_pages_back(when):
    yard = Yard(settings(chunked_prefill_size=4, max_in_flight=2), make_info())
    number = yard.submit([5] * 10, max_new=10)
    for _ in range({"waiting": 0, "chunking": 1, "running": 5}[when]):
        yard.launch()
        yard.commit()
    yard.launch()
    yard.apply(Cancel([number], "gone", 499))
    assert yard.finished[number].reason == "abort"
    yard.run()
    assert yard.scheduler.idle() is None


def test_stop_found_cuts_the_answer_and_its_kv():
    yard = Yard(settings(max_in_flight=2), make_info())
    number = yard.submit([5, 6, 7], max_new=20)
    for _ in range(6):
        yard.launch()
        yard.commit()
    yard.launch()
    yard.apply(StopFound(number, 2, "."))
    finish = yard.finished[number]
    assert (finish.reason, finish.matched, finish.completion_tokens) == ("stop", ".", 2)
    yard.run()
    assert yard.scheduler.state.memory.tree.total_pages == 5
    assert yard.scheduler.idle() is None


def test_timeouts_end_requests_that_wait_or_run_too_long():
    yard = Yard(settings(max_running_requests=1, queue_timeout_s=0.01, run_timeout_s=0.02), make_info())
    runs, waits = yard.submit([5, 6], max_new=60), yard.submit([6, 7], max_new=2)
    assert yard.scheduler.wakeup_ns() is not None
    yard.run()
    assert (yard.finished[waits].cause, yard.finished[runs].cause) == ("queue_timeout", "run_timeout")
    assert yard.finished[runs].completion_tokens > 0


def test_one_request_pauses_and_resumes_exactly():
    reference, yard = Yard(settings(), make_info()), Yard(settings(), make_info())
    expected = reference.submit([5, 6, 7], max_new=8)
    reference.run()
    number = yard.submit([5, 6, 7], max_new=8)
    for _ in range(3):
        yard.launch()
        yard.commit()
    yard.apply(Pause(numbers=[number]))
    yard.run()
    assert number not in yard.finished
    yard.apply(Resume([number]))
    yard.run()
    assert yard.tokens[number] == reference.tokens[expected]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pausing_everything(mode):
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], max_new=8)
    yard.launch()
    yard.commit()
    yard.apply(Pause(mode))
    assert not yard.launch()
    running = yard.scheduler.snapshot(0).running
    assert running == (1 if mode == "in_place" else 0)
    yard.apply(Resume())
    yard.run()
    assert yard.finished[number].reason == ("abort" if mode == "abort" else "length")


def test_flush_empties_the_tree_only_when_idle():
    yard = Yard(settings(), make_info())
    yard.submit([5, 6, 7])
    assert yard.scheduler.flush(1) is False
    yard.run()
    assert yard.scheduler.state.memory.tree.total_pages > 0
    yard.apply(Flush())
    assert yard.scheduler.state.memory.allocator.available == 64


def test_a_mismatch_at_idle_is_reported_and_repaired():
    yard = Yard(settings(), make_info())
    yard.scheduler.state.memory.allocator.alloc(3)
    assert "61 of 64 pages" in yard.scheduler.idle()
    assert yard.scheduler.idle() is None
    number = yard.submit([5, 6, 7])
    yard.run()
    assert yard.finished[number].reason == "length"


def test_lpm_takes_the_longest_match_first():
    yard = Yard(settings(schedule_policy="lpm", max_running_requests=1), make_info())
    yard.submit([5, 6, 7, 8], max_new=1)
    yard.run()
    cold, warm = yard.submit([9, 9, 9, 9], max_new=1), yard.submit([5, 6, 7, 8], max_new=1)
    yard.run()
    assert yard.finished[warm].finished_ns < yard.finished[cold].finished_ns


def test_without_a_tree_lpm_says_that_it_is_fcfs():
    yard = Yard(settings(schedule_policy="lpm", disable_radix_cache=True), make_info())
    assert "fcfs" in yard.scheduler.state.policy_note
    assert yard.scheduler.snapshot(0).policy == "fcfs"


def test_an_unknown_policy_names_the_near_ones_and_changes_nothing():
    yard = Yard(settings(), make_info())
    with pytest.raises(ConfigError, match="fcfs"):
        yard.apply(SetPolicy("fcsf"))
    assert yard.scheduler.snapshot(0).policy == "fcfs"


def test_results_must_come_in_order():
    yard = Yard(settings(max_in_flight=2), make_info())
    yard.submit([5, 6, 7], max_new=8)
    yard.launch()
    yard.launch()
    result = yard.executor.collect(yard.tickets[1])
    with pytest.raises(ValueError, match="arrived before that of"):
        yard.scheduler.commit(result, 1)


def test_a_row_that_lost_its_place_drops_its_result():
    yard = Yard(settings(max_in_flight=2), make_info())
    number = yard.submit([5, 6, 7], max_new=8)
    yard.launch()
    yard.launch()
    yard.apply(Pause(numbers=[number]))
    yard.commit()
    yard.commit()
    assert number not in yard.tokens
    row = yard.scheduler.state.table.row_of(number)
    assert yard.scheduler.state.table.state[row] == RowState.WAITING


def test_identical_prompts_at_once_end_on_one_copy():
    yard = Yard(settings(), make_info())
    prompt = list(range(10, 30))
    numbers = [yard.submit(prompt, max_new=4) for _ in range(2)]
    yard.run()
    assert yard.tokens[numbers[0]] == yard.tokens[numbers[1]]
    assert yard.scheduler.state.memory.tree.total_pages == 20 + 3
    assert yard.scheduler.idle() is None


def test_the_request_table_grows():
    yard = Yard(settings(max_running_requests=2), make_info(rows=3))
    for index in range(600):
        yard.submit([3 + index % 90, 5], max_new=1)
    yard.run()
    assert len(yard.finished) == 600
    assert np.all(yard.scheduler.state.table.state == RowState.FREE)
