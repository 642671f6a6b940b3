"""Routing policies by `module:Class`: loaded, guarded, in the simulator and in the router's settings."""

import re
import sys
from pathlib import Path

import pytest

from tests.sim.small_workloads import setup
from tokenyard.base import ConfigError
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.load import TargetLoad, TtftModel
from tokenyard.routing.policies import PolicyOptions, Ranking, RequestFeatures, RoutePolicy
from tokenyard.routing.registry import make_policy
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

HERE = "tests.routing.test_user_policy"
PAGE = Path(__file__).resolve().parents[2] / "docs/your_own_policy.md"


class LastFirst(RoutePolicy):
    def rank(self, request, targets):
        assert request.now_ns >= 0
        return Ranking(list(range(len(targets)))[::-1], [0.0] * len(targets), "balanced")


class Broken(LastFirst):
    answers = iter(())

    def rank(self, request, targets):
        if request.tokens > 1000:
            raise RuntimeError("no such luck")
        return super().rank(request, targets)


class Twice(LastFirst):
    def rank(self, request, targets):
        return Ranking([0] * len(targets), [0.0] * len(targets), "balanced")


def targets(count=3):
    speed = TtftModel()
    return [TargetLoad(f"t{place}", speed) for place in range(count)]


def test_a_policy_of_ones_own_ranks():
    policy = make_policy(f"{HERE}:LastFirst")
    assert policy.rank(RequestFeatures(10), targets()).order == [2, 1, 0]
    sticky = make_policy(f"{HERE}:LastFirst", sticky=True)
    seen, turn = targets(), RequestFeatures(10, session="s")
    sticky.sent(turn, seen[1])
    assert sticky.rank(turn, seen).order[0] == 1


@pytest.mark.parametrize("name", ["Broken", "Twice"])
def test_one_that_fails_is_replaced_for_good_and_says_why(name):
    reasons = []
    policy = make_policy(f"{HERE}:{name}", PolicyOptions(), failed=reasons.append)
    usual = make_policy("predicted_ttft")
    long = RequestFeatures(2000)
    assert policy.rank(long, targets()).order == usual.rank(long, targets()).order
    assert policy.rank(RequestFeatures(10), targets()).order == usual.rank(RequestFeatures(10), targets()).order
    assert len(reasons) == 1
    assert name in reasons[0]
    assert name != "Broken" or re.search(r"test_user_policy.py, line \d+ \(rank\)", reasons[0])


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (f"{HERE}:nothing", "nothing"),
        (f"{HERE}:targets", "not a subclass"),
        ("no_such_module:Policy", "importing no_such_module failed"),
    ],
)
def test_what_cannot_be_loaded_is_refused(path, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_policy(path)


def test_the_router_takes_it_as_a_setting():
    assert RouterSettings(policy=f"{HERE}:LastFirst").policy == f"{HERE}:LastFirst"
    with pytest.raises(ConfigError, match="module:Class"):
        RouterSettings(policy="no_policy")


def test_simulated_engines_are_chosen_by_it_and_a_failure_ends_the_run():
    traffic = synthetic("plain", 60, 30.0, seed=1)
    outcome = simulate(traffic, setup(replicas=3, router=f"{HERE}:LastFirst"))
    assert set(outcome.replica.tolist()) == {2}
    with pytest.raises(ConfigError, match=r"no such luck.*test_user_policy.py, line"):
        simulate(traffic, setup(replicas=3, router=f"{HERE}:Broken"))


def test_the_example_of_the_page_routes(tmp_path, monkeypatch):
    section = PAGE.read_text(encoding="utf-8").split("## A routing policy")[1]
    (tmp_path / "my_routing.py").write_text(re.search(r"^```python\n(.*?)^```", section, re.S | re.M)[1])
    monkeypatch.syspath_prepend(tmp_path)
    shared = synthetic("shared-prefix", 120, 30.0, seed=1)
    cached = {"disable_radix_cache": False}
    ours = simulate(shared, setup(settings=cached, replicas=3, router="my_routing:FewestUncached"))
    turns = simulate(shared, setup(settings=cached, replicas=3, router="round_robin"))
    assert ours.cached_tokens.sum() > turns.cached_tokens.sum()
    policy = make_policy("my_routing:FewestUncached")
    seen, turn = targets(), RequestFeatures(100, [0, 0, 0], session="s", now_ns=5)
    policy.sent(turn, seen[2])
    assert policy.rank(turn, seen).order[0] == 2
    later = RequestFeatures(100, [0, 0, 0], session="s", now_ns=10**12)
    assert policy.rank(later, seen).order[0] == 0
    sys.modules.pop("my_routing", None)
