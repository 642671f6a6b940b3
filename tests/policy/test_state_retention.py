"""What every retention of checkpoints owes, and what each one is for."""

from dataclasses import replace

import numpy as np
import pytest

from tests.scheduler.test_state_checkpoints import ask, make_yard, prompt_of
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.policy.state_retention import MAX_IDLE_NS, SPACING_TOKENS, STATE_RETENTIONS, create_state_retention


def checkpoints(yard):
    """The lengths of the prefixes that have one."""
    states = yard.scheduler.state.memory.states
    return sorted(states.tokens[np.flatnonzero(states.page)].tolist())


def traffic(policy, seed=0, slots=5, depth=2):
    """Conversations in turns, with a common beginning, in a pool that is too small for them."""
    yard = make_yard(slots=slots, tokens=300, depth=depth, interval=4, mamba_retention_policy=policy)
    draw = np.random.default_rng(seed)
    talks = [prompt_of(1, 12) + prompt_of(2 + talk, 6) for talk in range(4)]
    for turn in range(24):
        talk = int(draw.integers(len(talks)))
        _, answer = ask(yard, talks[talk], max_new=6, depth=depth)
        talks[talk] = (talks[talk] + answer + prompt_of(100 + turn, 3))[-150:]
    return yard


@pytest.mark.parametrize("policy", STATE_RETENTIONS)
def test_the_same_events_give_the_same_plans(policy):
    first, second = traffic(policy).plans, traffic(policy).plans
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for column in ("pool_rows", "starts", "counts", "page_ids", "state_copies", "state_saves"):
            assert np.array_equal(getattr(one, column), getattr(other, column))


@pytest.mark.parametrize("policy", STATE_RETENTIONS)
def test_none_evicts_while_a_slot_is_free(policy):
    yard = make_yard(slots=4, tokens=400, mamba_retention_policy=policy)
    for seed in range(4):
        ask(yard, prompt_of(seed, 20))
    assert checkpoints(yard) == [19, 19, 19, 19]


@pytest.mark.parametrize("policy", STATE_RETENTIONS)
def test_what_was_not_used_for_an_hour_goes_first(policy):
    yard = make_yard(slots=2, tokens=600, mamba_retention_policy=policy)
    ask(yard, prompt_of(1, 200))
    yard.now += MAX_IDLE_NS
    ask(yard, prompt_of(2, 30))
    ask(yard, prompt_of(3, 20))
    assert checkpoints(yard) == [19, 29]


def test_per_path_keeps_the_deepest_and_those_at_forks():
    yard = make_yard(slots=50, tokens=900, context=600, mamba_retention_policy="per-path", mamba_max_states_per_path=2)
    prompt = prompt_of(1, 20)
    for turn in range(5):
        _, answer = ask(yard, prompt)
        prompt = prompt + answer + prompt_of(10 + turn, 9)
    ask(yard, prompt)
    assert checkpoints(yard) == [59, 69]
    ask(yard, prompt[:40] + prompt_of(30, 10))
    assert checkpoints(yard) == [40, 49, 59, 69], "where the new prompt branches off, the paths have three"
    ask(yard, prompt + prompt_of(31, 10))
    assert checkpoints(yard) == [40, 49, 69, 79], "one that forks the path is not counted"


def test_worth_keeps_what_saves_more_tokens():
    yard = make_yard(slots=2, tokens=900, mamba_retention_policy="worth")
    for seed, tokens in enumerate((200, 20, 30, 150, 40, 25)):
        ask(yard, prompt_of(seed, tokens))
    assert checkpoints(yard) == [149, 199]


def test_worth_learns_that_a_kind_of_checkpoint_is_never_hit():
    """Single questions over one long text: only the place where they branch off is hit again."""
    yard = make_yard(slots=3, tokens=900, mamba_retention_policy="worth")
    text = prompt_of(1, 100)
    hits = [ask(yard, text + prompt_of(2 + number, 30))[0] for number in range(12)]
    assert hits[2:] == [100] * 10


def test_worth_evicts_kv_that_no_checkpoint_makes_usable_before_other_kv():
    yard = make_yard(slots=3, tokens=300, mamba_retention_policy="worth", interval=100)
    useful = prompt_of(1, 120)
    ask(yard, useful)
    # Answers without an interval of their own leave KV behind the end of their prompt.
    ask(yard, prompt_of(2, 10), max_new=60)
    ask(yard, prompt_of(3, 10), max_new=60)
    ask(yard, prompt_of(4, 70))
    assert ask(yard, useful)[0] == 119


def test_long_prompts_have_checkpoints_on_the_way_while_there_is_room():
    worth = create_state_retention(SchedulerSettings())
    end = 3 * SPACING_TOKENS
    assert [position for position, _ in worth.positions(0, end, 100, end - 1, roomy=True)] == [
        100,
        SPACING_TOKENS,
        2 * SPACING_TOKENS,
        end - 1,
        end,
    ]
    assert [position for position, _ in worth.positions(0, end, 100, end - 1, roomy=False)] == [100, end - 1]


@pytest.mark.parametrize("page_size", [48, 100, 5000])
def test_checkpoints_on_the_way_are_at_ends_of_pages(page_size):
    worth = create_state_retention(SchedulerSettings(page_size=page_size))
    found = [position for position, _ in worth.positions(0, 6 * SPACING_TOKENS, 0, 0, roomy=True)]
    assert found
    assert all(position % page_size == 0 for position in found)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ConfigError, match="last, per-path, worth"):
        create_state_retention(replace(SchedulerSettings(), mamba_retention_policy="none"))
