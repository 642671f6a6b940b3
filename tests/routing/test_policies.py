from collections import Counter

import pytest

from tests.routing.choices import Choice, Taped
from tokenyard.base import ConfigError
from tokenyard.routing.load import DispatchedRequest, TargetLoad, TtftModel
from tokenyard.routing.policies import (
    CACHED,
    COLD,
    SPILLED_BY_BOUND,
    SPILLED_FOR_LOAD,
    STICKY,
    PolicyOptions,
    RequestFeatures,
    rendezvous,
    text_key,
)
from tokenyard.routing.registry import POLICIES, make_policy

SPEED = TtftModel()


def targets(*requests: int) -> list[TargetLoad]:
    return [TargetLoad(f"w{i}", SPEED, requests=count) for i, count in enumerate(requests)]


def test_a_deprecated_policy_name_is_accepted_with_a_warning():
    with pytest.warns(FutureWarning, match="use 'kv_usage'"):
        assert make_policy("kv_room").name == "kv_usage"


def first(policy, request, states):
    return policy.rank(request, states).order[0]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_ranking_holds_every_target_once(name, count):
    policy, states = make_policy(name, PolicyOptions(seed=1)), targets(*range(count))
    for i in range(20):
        ranking = policy.rank(RequestFeatures(100 * i + 1, [7 * i % 5] * count, key=i), states)
        assert sorted(ranking.order) == list(range(count))
        assert len(ranking.scores) == count
    assert sorted(policy.rank(RequestFeatures(5), states).order) == list(range(count))


def test_round_robin_takes_turns():
    policy = make_policy("round_robin")
    assert [first(policy, RequestFeatures(1), targets(9, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]


def test_least_load_looks_at_work_before_requests():
    states = targets(1, 5, 4)
    for state, tokens in zip(states, (900, 200, 200), strict=True):
        state.prefill_tokens = tokens
    assert first(make_policy("least_load"), RequestFeatures(1), states) == 2


def test_shortest_queue_counts_requests_and_total_tokens_their_prompts():
    states = targets(2, 1, 1)
    for state, tokens, served in zip(states, (10, 400, 300), (0, 5, 9), strict=True):
        state.context_tokens, state.served = tokens, served
    assert make_policy("shortest_queue").rank(RequestFeatures(1), states).order == [1, 2, 0]
    assert make_policy("total_tokens").rank(RequestFeatures(1), states).order == [0, 2, 1]


def test_a_tape_of_choices_records_what_was_seen_and_chosen_and_changes_nothing():
    tape = []
    plain, taped = make_policy("cache_aware"), Taped(make_policy("cache_aware"), tape)
    for matched in ([0, 0], [0, 90]):
        request, states = RequestFeatures(100, matched, key=7), targets(0, 3)
        assert taped.rank(request, states) == plain.rank(request, states)
    assert tape == [
        Choice(100, 7, (0, 0), (0, 3), (0.0, 0.0), 0, COLD),
        Choice(100, 7, (0, 90), (0, 3), (0.0, 0.0), 1, CACHED),
    ]


def test_power_of_two_never_takes_the_busiest_of_two_and_repeats_by_seed():
    policy, again = (make_policy("power_of_two", PolicyOptions(seed=3)) for _ in range(2))
    chosen = [first(policy, RequestFeatures(1), targets(0, 1, 2, 99)) for _ in range(200)]
    assert set(chosen) == {0, 1, 2}
    assert chosen == [first(again, RequestFeatures(1), targets(0, 1, 2, 99)) for _ in range(200)]


def test_random_reaches_all_targets_about_equally():
    policy = make_policy("random", PolicyOptions(seed=5))
    chosen = [first(policy, RequestFeatures(1), targets(9, 0, 0, 0)) for _ in range(4000)]
    assert all(900 < chosen.count(i) < 1100 for i in range(4))


class TestCacheAware:
    def test_it_follows_the_best_match_beyond_the_threshold(self):
        policy = make_policy("cache_aware")
        assert first(policy, RequestFeatures(1000, [0, 301, 299]), targets(0, 9, 0)) == 1
        assert policy.rank(RequestFeatures(1000, [0, 300, 299]), targets(0, 9, 1)).reason == COLD
        assert first(policy, RequestFeatures(1000, [0, 300, 299]), targets(0, 9, 1)) == 0

    def test_it_yields_to_an_imbalance_that_is_both_absolute_and_relative(self):
        policy, match = make_policy("cache_aware"), RequestFeatures(1000, [0, 900])
        assert first(policy, match, targets(0, 64)) == 1
        assert first(policy, match, targets(0, 65)) == 0
        assert first(policy, match, targets(200, 280)) == 1
        assert first(policy, match, targets(200, 301)) == 0
        assert policy.rank(match, targets(0, 65)).reason == SPILLED_BY_BOUND

    def test_its_thresholds_can_be_set(self):
        policy = make_policy("cache_aware", PolicyOptions(0, 0.9, 2, 1.0))
        assert first(policy, RequestFeatures(1000, [0, 800]), targets(0, 1)) == 0
        assert first(policy, RequestFeatures(1000, [0, 950]), targets(0, 2)) == 1
        assert first(policy, RequestFeatures(1000, [0, 950]), targets(0, 3)) == 0


class TestHashes:
    def test_a_key_has_one_home_and_few_keys_move_when_a_target_goes(self):
        states = targets(0, 0, 0, 0, 0)
        homes = {key: rendezvous(key, states)[0] for key in range(1000)}
        assert all(homes[key] == rendezvous(key, states)[0] for key in homes)
        left = {key: rendezvous(key, states[:4])[0] for key in homes}
        assert all(left[key] == home for key, home in homes.items() if home != 4)
        assert all(150 < list(homes.values()).count(i) < 250 for i in range(5))

    @pytest.mark.parametrize("name", ["prefix_hash", "consistent_hash"])
    def test_load_is_bounded(self, name):
        policy, states = make_policy(name), targets(0, 0, 0, 0)
        for _ in range(400):
            states[first(policy, RequestFeatures(50, key=77), states)].requests += 1
        assert max(state.requests for state in states) <= 1.25 * 100 + 1

    def test_sessions_come_before_prompts(self):
        policy, states = make_policy("consistent_hash"), targets(0, 0, 0, 0)
        homes = {first(policy, RequestFeatures(50, key=key, session="me"), states) for key in range(20)}
        assert len(homes) == 1
        assert len({first(policy, RequestFeatures(50, key=key), states) for key in range(50)}) == 4

    def test_the_key_of_a_text_never_changes(self):
        assert text_key("session-1") == text_key("session-1") != text_key("session-2")


class TestPredictedTtft:
    def test_the_cached_target_wins_while_it_is_worth_it(self):
        policy = make_policy("predicted_ttft")
        ranking = policy.rank(RequestFeatures(4000, [0, 3900]), targets(0, 0))
        assert ranking.order[0] == 1
        assert ranking.reason == CACHED
        assert ranking.scores[1] < ranking.scores[0]

    def test_queued_work_moves_a_request_away(self):
        policy, states = make_policy("predicted_ttft"), targets(0, 1)
        states[1].prefill_tokens = 8000
        ranking = policy.rank(RequestFeatures(4000, [0, 3900]), states)
        assert ranking.order[0] == 0
        assert ranking.reason == SPILLED_FOR_LOAD

    def test_no_match_however_good_takes_more_than_a_share(self):
        policy = make_policy("predicted_ttft")
        ranking = policy.rank(RequestFeatures(100_000, [0, 99_999, 0, 0]), targets(1, 14, 1, 1))
        assert ranking.order[0] != 1
        assert ranking.reason == SPILLED_BY_BOUND

    def test_a_target_with_wrong_cache_predictions_is_trusted_less(self):
        policy, states = make_policy("predicted_ttft"), targets(0, 0)
        states[1].prefill_tokens = 500
        assert first(policy, RequestFeatures(1000, [0, 900]), states) == 1
        states[1].credit = 0.1
        assert first(policy, RequestFeatures(1000, [0, 900]), states) == 0

    def test_a_slow_target_gets_less(self):
        policy, states = make_policy("predicted_ttft"), targets(0, 0)
        states[1].slowness = 2.0
        for i in range(300):
            states[first(policy, RequestFeatures(500, key=i), states)].requests += 1
        assert 1.5 < states[0].requests / states[1].requests < 2.5

    @pytest.mark.parametrize("in_flight", [32, 64, 128, 256])
    def test_one_shared_prefix_cannot_collapse_onto_one_target(self, in_flight):
        """4 targets, one system prompt of 4,000 tokens: the collapse that the write-up warns of."""
        policy, states = make_policy("predicted_ttft"), targets(0, 0, 0, 0)
        holds, chosen, opened = [0] * 4, [0] * 4, []
        for i in range(3 * in_flight):
            if len(opened) == in_flight:
                opened.pop(0).end()
            target = first(policy, RequestFeatures(4050, [4000 * held for held in holds], key=9), states)
            opened.append(DispatchedRequest(states[target], 4050, 4000 * holds[target], i / 100))
            opened[-1].first_token(i / 100 + 0.02)
            holds[target] = 1
            chosen[target] += 1
        assert max(chosen) <= 0.3 * sum(chosen)


def test_sessions_stick_to_their_target_until_it_goes():
    policy = make_policy("round_robin", sticky=True)
    states = targets(0, 0, 0)
    request = RequestFeatures(10, session="me")
    home = first(policy, request, states)
    policy.sent(request, states[home])
    for _ in range(5):
        ranking = policy.rank(request, states)
        assert ranking.order[0] == home
        assert ranking.reason == STICKY
    rest = [state for state in states if state is not states[home]]
    assert policy.rank(request, rest).reason != STICKY
    assert {first(policy, RequestFeatures(10, session=f"other {i}"), states) for i in range(6)} == {0, 1, 2}


def fresh_targets(count):
    """Idle targets that compute 8,000 tokens a second."""
    speed = TtftModel()
    return [TargetLoad(f"w{i}", speed) for i in range(count)]


def shared_prompt(session, states, held=0):
    """A turn of 10,000 tokens, of which each target holds so many."""
    return RequestFeatures(10_000, [held] * len(states), key=7, session=session)


def test_a_session_stays_while_waiting_costs_less_than_computing_again():
    policy = make_policy("predicted_ttft", sticky=True)
    states = fresh_targets(2)
    policy.sent(RequestFeatures(10_000, session="me"), states[0])
    turn = RequestFeatures(10_000, [9_900, 0], session="me")
    states[0].prefill_tokens = 9_000
    assert policy.rank(turn, states).reason == STICKY
    states[0].prefill_tokens = 15_000
    ranking = policy.rank(turn, states)
    assert (ranking.order[0], ranking.reason) == (1, SPILLED_FOR_LOAD)


def test_a_policy_without_prefixes_knows_what_home_holds():
    policy = make_policy("round_robin", sticky=True)
    states = fresh_targets(2)
    policy.sent(RequestFeatures(10_000, session="me"), states[0])
    states[0].prefill_tokens = 9_000
    assert first(policy, RequestFeatures(10_000, session="me"), states) == 0
    states[0].prefill_tokens = 15_000
    assert first(policy, RequestFeatures(10_000, session="me"), states) == 1
    policy.sent(RequestFeatures(10_000, session="me"), states[1])
    states[0].prefill_tokens = 0
    assert first(policy, RequestFeatures(10_000, session="me"), states) == 1


@pytest.mark.parametrize("name", ["predicted_ttft", "lmetric", "cache_aware", "prefix_hash", "round_robin"])
def test_the_sessions_of_a_dead_engine_spread(name):
    policy = make_policy(name, sticky=True)
    states = targets(0, 0, 0, 0)
    for i in range(40):
        policy.sent(shared_prompt(f"s{i}", states), states[i % 4])
    left = states[1:]
    for i in range(0, 40, 4):
        turn = shared_prompt(f"s{i}", left, held=2_000)
        policy.sent(turn, left[first(policy, turn, left)])
    homes = Counter(first(policy, shared_prompt(f"s{i}", left, held=9_000), left) for i in range(40))
    assert max(homes.values()) - min(homes.values()) <= 1


def test_lmetric_multiplies_tokens_to_compute_and_batch():
    policy = make_policy("lmetric")
    states = targets(1, 3)
    states[0].prefill_tokens = 400
    assert first(policy, RequestFeatures(1_000, [0, 500]), states) == 1
    assert policy.rank(RequestFeatures(1_000, [0, 500]), states).scores == [2_800, 2_000]
    assert first(policy, RequestFeatures(1_000, [400, 400]), states) == 0


def test_an_unknown_policy_names_near_ones():
    with pytest.raises(ConfigError, match="did you mean round_robin"):
        make_policy("roundrobin")
