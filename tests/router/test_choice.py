import numpy as np
import pytest

from tokenyard.base import ConfigError
from tokenyard.router.choice import CHOOSERS, WorkerLoad, make_chooser


def loads(*requests: int) -> list[WorkerLoad]:
    return [WorkerLoad(count, float(count)) for count in requests]


def prompt(first: int, tokens: int = 1024) -> bytes:
    return np.arange(first, first + tokens, dtype=np.int32).tobytes()


def test_round_robin_takes_turns():
    chooser = make_chooser("round_robin", 3)
    assert [chooser.choose(loads(9, 0, 0), b"") for _ in range(4)] == [0, 1, 2, 0]


def test_least_load_looks_at_work_before_requests():
    chooser = make_chooser("least_load", 3)
    assert chooser.choose([WorkerLoad(1, 9.0), WorkerLoad(5, 2.0), WorkerLoad(4, 2.0)], b"") == 2


def test_power_of_two_never_takes_the_busiest_of_two_and_repeats_by_seed():
    chooser, again = make_chooser("power_of_two", 4, seed=3), make_chooser("power_of_two", 4, seed=3)
    chosen = [chooser.choose(loads(0, 1, 2, 99), b"") for _ in range(200)]
    assert 3 not in chosen
    assert set(chosen) == {0, 1, 2}
    assert chosen == [again.choose(loads(0, 1, 2, 99), b"") for _ in range(200)]
    assert make_chooser("power_of_two", 1).choose(loads(5), b"") == 0


def test_cache_aware_follows_the_prefix():
    chooser = make_chooser("cache_aware", 3)
    home = chooser.choose(loads(4, 2, 3), prompt(0))
    assert home == 1, "nothing matches yet, so the least loaded one"
    assert chooser.choose(loads(0, 5, 3), prompt(0) + prompt(5000, 256)) == home
    assert chooser.choose(loads(0, 5, 3), prompt(9000)) == 0


def test_cache_aware_ignores_a_short_match():
    chooser = make_chooser("cache_aware", 2)
    chooser.choose(loads(1, 0), prompt(0, 128))
    assert chooser.choose(loads(0, 1), prompt(0, 128) + prompt(7000, 2048)) == 0


def test_cache_aware_gives_way_to_imbalance():
    chooser = make_chooser("cache_aware", 2)
    chooser.choose(loads(1, 0), prompt(0))
    assert chooser.choose(loads(0, 64), prompt(0)) == 1
    assert chooser.choose(loads(0, 66), prompt(0)) == 0


def test_cache_aware_keeps_the_prefix_when_the_imbalance_is_only_absolute():
    chooser = make_chooser("cache_aware", 2)
    chooser.choose(loads(1, 0), prompt(0))
    assert chooser.choose(loads(200, 280), prompt(0)) == 1
    assert chooser.choose(loads(200, 301), prompt(0)) == 0


@pytest.mark.parametrize("name", sorted(CHOOSERS))
def test_every_choice_is_a_worker(name):
    chooser = make_chooser(name, 5, seed=1)
    assert all(0 <= chooser.choose(loads(1, 2, 3, 4, 5), prompt(i)) < 5 for i in range(50))


def test_load_goes_back_to_nothing():
    load = WorkerLoad()
    load.add(0.5)
    load.remove(0.5)
    assert load == WorkerLoad()


def test_an_unknown_router_policy_names_near_ones():
    with pytest.raises(ConfigError, match="did you mean round_robin"):
        make_chooser("roundrobin", 2)
