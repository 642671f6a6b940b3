"""The verdict of policy `adaptive`: when to change, what may be chosen, and how often to look."""

import math
from dataclasses import replace

import pytest

from tests.policy.timed_scheduler import S
from tests.scheduler.harness import Yard, make_info
from tokenyard.base import ConfigError, SchedulerSettings, SetPolicy
from tokenyard.policy.adaptive import (
    CANDIDATES,
    AdaptiveOptions,
    AdaptivePolicy,
    CandidateScore,
    CandidateSelector,
    LookaheadPacer,
)

SETTINGS = SchedulerSettings(schedule_policy="adaptive")


def options(**values):
    return replace(SETTINGS, policy_options=values)


def look(judge, met, ttft=None, now=0):
    """One look, with the share met (and time to first token) by candidate; returns the name changed to."""
    ttft = ttft or {}
    scores = [CandidateScore(name, met[name], ttft.get(name, 0.5)) for name in judge.wanted()]
    event = judge.take(scores, now)
    return None if event is None else event.name


def test_a_change_needs_the_same_one_to_be_clearly_better_twice_in_a_row():
    judge = CandidateSelector(["fcfs", "slo", "lpm"])
    assert look(judge, {"fcfs": 0.8, "slo": 0.9, "lpm": 0.7}) is None
    assert judge.wanted() == ["fcfs", "slo"]
    assert look(judge, {"fcfs": 0.8, "slo": 0.9}, now=7) == "slo"
    assert (judge.current, judge.switches, judge.looks) == ("slo", {"slo": 1}, 2)
    (switch,) = judge.latest
    assert (switch.at_ns, switch.candidate) == (7, "slo")
    assert "90.0%" in switch.reason
    assert judge.wanted() == ["slo", "fcfs", "lpm"]


def test_once_is_not_enough_and_between_does_not_count():
    judge = CandidateSelector(["fcfs", "slo", "lpm"])
    for _ in range(3):
        assert look(judge, {"fcfs": 0.8, "slo": 0.9, "lpm": 0.7}) is None
        assert look(judge, {"fcfs": 0.8, "slo": 0.8}) is None
    assert look(judge, {"fcfs": 0.8, "slo": 0.7, "lpm": 0.9}) is None
    assert look(judge, {"fcfs": 0.8, "lpm": 0.9}) == "lpm"


def test_the_best_of_those_that_were_better_twice_is_taken():
    judge = CandidateSelector(["fcfs", "slo", "lpm"])
    assert look(judge, {"fcfs": 0.5, "slo": 0.8, "lpm": 0.7}) is None
    assert look(judge, {"fcfs": 0.5, "slo": 0.8, "lpm": 0.9}) == "lpm"


@pytest.mark.parametrize(("better", "changes"), [(0.824, False), (0.8241, True)])
def test_the_margin_is_three_percent_of_what_there_is(better, changes):
    judge = CandidateSelector(["fcfs", "slo"])
    look(judge, {"fcfs": 0.8, "slo": better})
    assert (look(judge, {"fcfs": 0.8, "slo": better}) == "slo") == changes


@pytest.mark.parametrize(
    ("met", "ttft", "changes"),
    [
        ((1.0, 1.0), (2.0, 1.0), True),
        ((1.0, 1.0), (2.0, 1.95), False),
        ((1.0, 1.0), (0.1, 0.05), False),
        ((0.9, 0.91), (2.0, 1.0), False),
        ((0.9, 0.8), (2.0, 1.0), False),
        ((0.0, 0.0), (2.0, 1.0), True),
        ((0.0, 0.1), (1.0, 2.0), True),
    ],
)
def test_where_the_shares_are_equal_the_time_to_first_token_decides(met, ttft, changes):
    judge = CandidateSelector(["fcfs", "slo"])
    for _ in range(2):
        found = look(
            judge, dict(zip(judge.candidates, met, strict=True)), dict(zip(judge.candidates, ttft, strict=True))
        )
    assert (found == "slo") == changes


def test_a_current_one_that_cannot_be_beaten_may_stand_alone():
    judge = CandidateSelector(["fcfs", "slo"])
    look(judge, {"fcfs": 0.5, "slo": 0.9})
    assert judge.take([CandidateScore("fcfs", 1.0, 0.01)], 0) is None
    assert judge.wanted() == ["fcfs", "slo"]
    assert look(judge, {"fcfs": 0.5, "slo": 0.9}) is None


@pytest.mark.parametrize("met", [0.0, 0.5, 0.97, 0.9708, 0.98, 1.0])
@pytest.mark.parametrize("ttft_s", [0.0, 0.09, 0.2, 5.0])
def test_a_perfect_score_is_not_beaten(met, ttft_s):
    current = CandidateScore("fcfs", met, ttft_s)
    others = [CandidateScore("slo", other / 1000, wait / 100) for other in range(1001) for wait in (0, 5, 20)]
    others += [CandidateScore("slo", met, wait / 100) for wait in range(100)]
    assert current.beatable == any(other.clearly_better(current) for other in others)


@pytest.mark.parametrize(
    "scores",
    [
        [],
        [CandidateScore("fcfs", math.nan, 0.1), CandidateScore("slo", 0.5, 0.1)],
        [CandidateScore("fcfs", 0.5, 0.1), CandidateScore("slo", 1.01, 0.1)],
        [CandidateScore("fcfs", 0.5, -1.0), CandidateScore("slo", 0.5, 0.1)],
        [CandidateScore("fcfs", 0.5, 0.1), CandidateScore("slo", 0.5, math.inf)],
        [CandidateScore("slo", 0.9, 0.1), CandidateScore("fcfs", 0.5, 0.1)],
        [CandidateScore("fcfs", 0.9, 0.1), CandidateScore("os:system", 0.95, 0.1)],
        [CandidateScore("slo", 0.9, 0.1)],
    ],
)
def test_scores_that_make_no_sense_are_refused_and_nothing_changes(scores):
    judge = CandidateSelector(["fcfs", "slo"])
    with pytest.raises(ValueError, match="out of range"):
        judge.take(scores, 0)
    assert (judge.current, judge.looks, judge.scores) == ("fcfs", 0, [])


def test_the_candidates_that_other_settings_leave():
    assert AdaptiveOptions.of(SETTINGS).candidates == tuple(CANDIDATES)
    assert AdaptiveOptions.of(options(among="fcfs+slo + fcfs")).candidates == ("fcfs", "slo")
    without_cache = replace(SETTINGS, disable_radix_cache=True)
    assert AdaptiveOptions.of(without_cache).candidates == ("slo", "short-first", "fcfs-time", "fcfs")
    paced = replace(SETTINGS, enable_dynamic_chunking=True)
    assert "fcfs-time" not in AdaptiveOptions.of(paced).candidates


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (options(among="fcfs+slow"), "did you mean slo"),
        (options(among="os:system"), "knows no candidate"),
        (options(interval_s=0.0), "interval_s"),
        (options(horizon_s=1000.0), "horizon_s"),
        (options(cpu_share=2.0), "cpu_share"),
        (replace(options(among="lpm"), disable_radix_cache=True), "none of adaptive's candidates"),
    ],
)
def test_wrong_options_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        AdaptivePolicy(settings)


def test_a_policy_may_come_with_changes_which_end_with_it():
    def chunks(*events):
        yard = Yard(SchedulerSettings(context_length=64), make_info())
        for event in events:
            yard.apply(event)
        yard.submit(list(range(40)))
        yard.run()
        return [int(plan.counts.max()) for plan in yard.plans][:2]

    small = SetPolicy("fcfs", changes={"chunked_prefill_size": 16})
    assert chunks(small) == [16, 16]
    assert chunks(small, SetPolicy("slo"), SetPolicy("fcfs"))[0] == 40


@pytest.mark.parametrize("changes", [{"page_size": 4}, {"chunked_prefill_size": 0}, {"headroom": "none"}])
def test_other_changes_are_refused_and_the_old_policy_stays(changes):
    yard = Yard(SchedulerSettings(context_length=64, schedule_policy="slo"), make_info())
    with pytest.raises(ConfigError):
        yard.apply(SetPolicy("fcfs", changes=changes))
    assert yard.scheduler.snapshot(0).policy == "slo"


def test_what_was_learned_about_answers_survives_a_change():
    settings = SchedulerSettings(context_length=64, headroom="history")
    yard = Yard(settings, make_info(), answer_tokens=(3, 3))
    yard.submit([1, 2, 3], max_new=30)
    yard.run()
    known = yard.scheduler.state.policy.headroom.residual_tokens
    yard.apply(SetPolicy("slo"))
    assert yard.scheduler.state.policy.headroom.residual_tokens == known < 5


def test_forecasts_keep_to_their_share_of_a_core_and_idle_times_accumulate():
    adaptive_options = AdaptiveOptions.of(options(interval_s=5.0, cpu_share=0.05))
    pace, now, spent = LookaheadPacer(adaptive_options, 0), 0, 0.0
    for cpu_s in [0.1] * 20 + [2.0] * 10 + [0.1] * 5:
        assert pace.next_ns - now >= 5 * S
        now = pace.next_ns
        assert spent <= 0.05 * now / S + 2.0
        spent += cpu_s
        pace.record_lookahead(now, cpu_s)
    # One second was left of the first hundred seconds' five, so the second of the dear looks still came soon.
    calm = LookaheadPacer(adaptive_options, 0)
    for _ in range(20):
        calm.record_lookahead(calm.next_ns, 0.1)
    first = calm.next_ns
    calm.record_lookahead(first, 2.0)
    assert calm.next_ns == first + 5 * S
