"""Eviction by a user's value: which prefix goes first, and what a failing one does."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.policy.waiting_order import make_yard
from tests.sim.small_workloads import setup
from tokenyard.base import ConfigError
from tokenyard.policy import CachedPrefix, EvictionValue
from tokenyard.policy.eviction_value import load_eviction_value
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

GUIDE = Path(__file__).resolve().parents[2] / "docs/your_own_policy.md"
SEEN: list[CachedPrefix] = []


class ShortFirst(EvictionValue):
    """Long prefixes stay."""

    def value(self, prefix):
        SEEN.append(prefix)
        return prefix.tokens


class LongFirst(EvictionValue):
    """Short prefixes stay."""

    def value(self, prefix):
        return -prefix.tokens


class Raises(EvictionValue):
    """It fails."""

    def value(self, prefix):
        raise KeyError("no table")


class NoNumber(EvictionValue):
    """Its value has no order."""

    def value(self, prefix):
        return float("nan")


class NeedsMore(EvictionValue):
    """It cannot be made."""

    def __init__(self, more):
        self.more = more


def yard_with_two(name):
    """Prefixes of 30 and 60 tokens in a pool of 100; the shorter one was used last."""
    yard = make_yard(pages=100, radix_eviction_policy=f"{__name__}:{name}", headroom="none")
    for token, tokens in ((7, 60), (8, 30)):
        yard.submit([token] * tokens, max_new=1, session=f"s{token}", tenant="a")
        yard.run()
    yard.submit([9] * 40, max_new=1)
    yard.run()
    peek = yard.scheduler.state.memory.peek
    return yard, [peek(np.full(tokens, token, np.int32).tobytes(), "") for token, tokens in ((7, 60), (8, 30))]


def test_the_prefix_of_the_lowest_value_goes_first():
    SEEN.clear()
    assert yard_with_two("ShortFirst")[1] == [60, 0]
    assert yard_with_two("LongFirst")[1][1] == 30
    long = next(one for one in SEEN if one.tokens == 60)
    assert [(one.tenant, one.name, one.tokens) for one in long.sessions] == [("a", "s7", 60)]
    assert long.recompute_s > 0.0
    assert long.idle_s >= 0.0


@pytest.mark.parametrize(("name", "reason"), [("Raises", "no table"), ("NoNumber", "returned nan")])
def test_a_value_that_fails_is_replaced_by_that_of_reuse(name, reason):
    yard, kept = yard_with_two(name)
    assert sum(kept) < 90
    note = yard.scheduler.snapshot(yard.now).policy_note
    assert reason in note
    assert "reuse" in note


def test_the_value_of_the_guide_runs():
    code = next(
        one for one in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "EvictionValue" in one
    )
    exec(code, globals())
    yard, kept = yard_with_two("LongerIsDearer")
    assert kept[0] == 60
    assert not yard.scheduler.snapshot(yard.now).policy_note


def test_a_simulation_ends_with_the_reason():
    chosen = {"radix_eviction_policy": f"{__name__}:Raises", "disable_radix_cache": False}
    with pytest.raises(ConfigError, match="no table"):
        simulate(synthetic("multi-turn", 60, 30.0), setup(settings=chosen, kv_pool_tokens=4000))


@pytest.mark.parametrize(
    ("path", "complaint"),
    [(f"{__name__}:NeedsMore", "making it failed"), (f"{__name__}:SEEN", "not a subclass"), ("nowhere:X", "importing")],
)
def test_a_class_that_cannot_be_used_is_one_clear_line(path, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_eviction_value(path)
    assert "\n" not in caught.value.message
