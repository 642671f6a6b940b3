"""Layers with a recurrent state: a hit ends at a checkpoint, and no row ever continues from another's state."""

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SamplingParams, SchedulerSettings, StateGroup, StopFound
from tokenyard.cache.radix_cache import RadixCache
from tokenyard.cache.state_checkpoints import StateCheckpoints
from tokenyard.executor.mock import FixedStepCost, MockExecutor
from tokenyard.policy.state_retention import STATE_RETENTIONS, LastState


def make_yard(
    slots=50,
    tokens=400,
    page_size=1,
    interval=8,
    depth=1,
    rows=6,
    answer_tokens=None,
    context=240,
    slot_pages=0,
    **fields,
):
    """A yard whose device checks the state that each row continues from."""
    states = StateGroup(slots, track_interval=interval, slot_pages=slot_pages)
    info = make_info(tokens // page_size, page_size, rows=rows + 2, context=context, states=states)
    settings = SchedulerSettings(
        page_size=page_size,
        context_length=context,
        max_running_requests=rows,
        max_in_flight=depth,
        **{"schedule_conservativeness": 0.1, "chunked_prefill_size": 16} | fields,
    )
    executor = MockExecutor(info, FixedStepCost(0.001), sleep=False, answer_tokens=answer_tokens, check_kv=True)
    return Yard(settings, info, executor=executor)


def ask(yard, prompt, max_new=1, depth=1):
    """Run one request: its cached tokens, and its answer."""
    number = yard.submit(prompt, max_new=max_new)
    yard.run(depth)
    yard.check()
    return yard.finished[number].cached_tokens, yard.tokens[number]


def prompt_of(seed, tokens):
    return np.random.default_rng(seed).integers(3, 90, tokens).tolist()


@pytest.mark.parametrize(("page_size", "hit"), [(1, 39), (4, 36), (16, 32)])
def test_the_same_prompt_hits_up_to_its_last_whole_page(page_size, hit):
    yard = make_yard(page_size=page_size)
    prompt = prompt_of(1, 40)
    first, answer = ask(yard, prompt)
    assert first == 0
    assert ask(yard, prompt) == (hit, answer)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_turn_hits_at_the_last_interval_of_the_answer(depth):
    yard = make_yard(page_size=4, depth=depth)
    prompt = prompt_of(2, 40)
    _, answer = ask(yard, prompt, max_new=30, depth=depth)
    # 40 + 30 tokens, of which the last one is never computed: the last multiple of 8 is 64.
    hit, _ = ask(yard, prompt + answer + prompt_of(3, 10))
    assert hit == 64


@pytest.mark.parametrize("policy", ["worth", "per-path"])
def test_a_third_prompt_hits_where_two_branched_off(policy):
    yard = make_yard(mamba_retention_policy=policy)
    system = prompt_of(4, 60)
    assert ask(yard, system + prompt_of(5, 20))[0] == 0
    assert ask(yard, system + prompt_of(6, 20))[0] == 0, "KV is there, but no state at the end of the system prompt"
    assert ask(yard, system + prompt_of(7, 20))[0] == 60


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("policy", "pool"),
    [*((name, {"slots": 6, "tokens": 500}) for name in STATE_RETENTIONS), ("worth", {"tokens": 740, "slot_pages": 40})],
)
def test_every_turn_of_a_conversation_hits_while_others_evict(policy, pool, depth):
    """Also where checkpoints are in pages of the KV pool."""
    yard = make_yard(context=600, depth=depth, mamba_retention_policy=policy, **{"slots": 18} | pool)
    prompt, hits = prompt_of(8, 20), []
    for turn in range(30):
        hit, answer = ask(yard, prompt, max_new=9, depth=depth)
        hits.append(len(prompt) - hit)
        prompt = prompt + answer + prompt_of(20 + turn, 5)
        ask(yard, prompt_of(40 + turn, 12))
    assert hits[0] == 20
    # 9 tokens of answer and 5 new ones, less the interval of 8 that the state may lag behind.
    assert max(hits[1:]) <= 9 + 5 + 8


def test_without_slots_nothing_hits_and_everything_runs():
    yard = make_yard(slots=0)
    prompt = prompt_of(9, 40)
    _, answer = ask(yard, prompt, max_new=20)
    assert ask(yard, prompt, max_new=20) == (0, answer)


def test_an_evicted_checkpoint_leaves_its_kv_and_the_one_before_it():
    yard = make_yard(slots=2, interval=100, mamba_retention_policy="last")
    prompt = prompt_of(10, 30)
    ask(yard, prompt)
    ask(yard, prompt + prompt_of(11, 10))
    ask(yard, prompt)
    ask(yard, prompt_of(12, 10))
    memory = yard.scheduler.state.memory
    assert memory.states.used == 2
    assert memory.tree.evictable_pages == 50, "KV stays in the tree"
    assert ask(yard, prompt + prompt_of(11, 10))[0] == 29


def test_a_row_that_is_retracted_resumes_at_its_last_checkpoint():
    yard = make_yard(tokens=90, page_size=1, interval=4)
    numbers = [yard.submit(prompt_of(seed, 12), max_new=40) for seed in (13, 14, 15)]
    while yard.advance():
        yard.check()
    assert yard.scheduler.state.retraction_count > 0
    for number, seed in zip(numbers, (13, 14, 15), strict=True):
        assert yard.tokens[number] == ask(make_yard(), prompt_of(seed, 12), max_new=40)[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stop_after", [7, 8, 9])
def test_a_stop_that_is_found_late_keeps_the_state_before_it(depth, stop_after):
    yard = make_yard(depth=depth, interval=4)
    prompt = prompt_of(16, 20)
    number = yard.submit(prompt, max_new=60)
    while len(yard.tokens.get(number, ())) < stop_after:
        yard.advance(depth)
    answer = list(yard.tokens[number])
    yard.apply(StopFound(number, len(answer) - 2, "end"))
    yard.run(depth)
    yard.check()
    hit, _ = ask(yard, prompt + answer[:-2] + prompt_of(17, 6))
    assert len(prompt) + len(answer) - 2 - hit <= 4 + 2


def test_parallel_answers_share_the_checkpoint_of_their_prompt():
    yard = make_yard(depth=2)
    prompt = prompt_of(18, 33)
    first = yard.submit(prompt, sampling=SamplingParams(max_new_tokens=6, n=3))
    yard.run(2)
    yard.check()
    assert [yard.finished[first + answer].cached_tokens for answer in range(3)] == [0, 32, 32]


def test_the_end_of_a_prompt_is_kept_before_what_is_on_the_way(monkeypatch):
    """A step saves at most 16 states of prompts in pages of the KV pool."""
    monkeypatch.setattr("tokenyard.policy.state_retention.SPACING_TOKENS", 4)
    yard = make_yard(tokens=2000, slots=1000, slot_pages=2, chunked_prefill_size=-1)
    prompt = prompt_of(20, 100)
    ask(yard, prompt)
    assert ask(yard, prompt)[0] == 99


def test_all_of_many_rows_that_decode_together_keep_the_state_of_their_answer():
    yard = make_yard(tokens=8000, slots=4000, slot_pages=2, rows=40, chunked_prefill_size=-1)
    prompts = [prompt_of(seed, 11) for seed in range(40)]
    numbers = [yard.submit(prompt, max_new=15) for prompt in prompts]
    yard.run(1)
    yard.check()
    hits = [ask(yard, prompt + yard.tokens[number] + [5])[0] for prompt, number in zip(prompts, numbers, strict=True)]
    assert hits == [24] * 40


def test_an_interval_that_is_no_multiple_of_the_page_size_is_an_error():
    with pytest.raises(ValueError, match="every 6 tokens"):
        StateCheckpoints(4, num_pages=10, num_slots=3, interval=6, pool_rows=2, retention=LastState())


def test_checkpoints_of_replaced_pages_go_to_the_nodes_of_the_pages_that_stay():
    tree = RadixCache(page_size=1)
    states = StateCheckpoints(1, num_pages=20, num_slots=4, interval=4, pool_rows=2, retention=LastState())
    states.watch(tree)
    key, found = np.arange(8, dtype=np.int32).tobytes(), np.arange(1, 9, dtype=np.int32)
    tree.insert(key[:16], found[:4])
    node = tree.insert(key, found).node
    own = np.arange(11, 19, dtype=np.int32)
    for tokens in (2, 8):
        assert states.save(int(own[tokens - 1]), tokens)
    states.replace(own, found, node)
    assert states.nodes[int(states.of[2])] is node.parent
    assert states.nodes[int(states.of[8])] is node
    states.check(np.zeros(21, np.int32))


def test_a_row_that_decodes_keeps_its_last_two_states():
    yard = make_yard(interval=4)
    yard.submit(prompt_of(19, 20), max_new=60)
    most = 0
    while yard.advance():
        most = max(most, yard.scheduler.state.memory.states.used)
    assert most == 3, "the prompt's, and two of the answer"
