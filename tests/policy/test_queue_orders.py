import numpy as np
import pytest

from tests.policy.waiting_order import line, make_yard, put_into_tree, row
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.policy import best_first, create_policy, in_groups

A, B, C, D, F, G, H = range(11, 18)


KEYS = {
    "no rows": [],
    "few": [3, 1, 2, 1],
    "all alike": [7] * 500,
    "one of a few, one stranger": [-1024, -1024, -256, 0] * 1000 + [-257] + [-1024, 0] * 500,
    "all different": [(7919 * place) % 5003 for place in range(5003)],
    "falling": range(3000, 0, -1),
    "the best ones together": [9] * 2000 + [0] * 40 + [9] * 2000,
    "some are no numbers": [float("nan"), 2.0, 1.0] * 300,
    "none is a number": [float("nan")] * 300,
}


@pytest.mark.parametrize("name", KEYS)
def test_best_first_is_a_stable_sort_however_the_keys_lie(name):
    key = np.array(list(KEYS[name]))
    rows = np.arange(len(key), dtype=np.int32)[::-1] + 5
    assert list(best_first(rows, key)) == rows[np.argsort(key, kind="stable")].tolist()


@pytest.mark.parametrize("name", [name for name in KEYS if "number" not in name])
def test_groups_are_whole_and_in_order(name):
    key = np.array(list(KEYS[name]), np.int64)
    groups = [rows.tolist() for rows in in_groups(np.arange(len(key), dtype=np.int32), key)]
    assert groups == [np.flatnonzero(key == value).tolist() for value in np.unique(key)]


def test_fcfs_is_the_order_of_arrival_also_after_a_retraction():
    yard = make_yard()
    numbers = [yard.submit([5 + i] * 4) for i in range(5)]
    yard.launch()
    yard.commit()
    yard.scheduler.state.retract(row(yard, numbers[0]), "paused", 0)
    assert line(yard) == numbers


def test_lpm_as_in_the_write_up_request_3_then_1_then_2():
    yard = make_yard(schedule_policy="lpm")
    put_into_tree(yard, [A] * 200 + [B] * 100)
    one = yard.submit([A] * 100 + [C] * 120)
    two = yard.submit([A] * 50 + [D] * 120)
    three = yard.submit([A] * 200 + [F] * 120)
    assert line(yard) == [three, one, two]
    assert [int(yard.scheduler.state.table.matchable[row(yard, n)]) for n in (one, two, three)] == [100, 50, 200]


def test_three_requests_that_share_a_prefix_hit_what_the_earlier_ones_computed():
    yard = make_yard(schedule_policy="lpm")
    yard.submit([A, B], max_new=1)
    yard.run()
    first = yard.submit([A, B, C, D], max_new=1)
    second = yard.submit([A, B, C, F], max_new=1)
    third = yard.submit([A, B, G, H], max_new=1)
    assert line(yard) == [first, second, third]
    yard.launch()
    yard.commit()
    matchable = yard.scheduler.state.table.matchable
    assert (matchable[row(yard, second)], matchable[row(yard, third)]) == (3, 2)
    yard.run()
    assert [yard.finished[n].cached_tokens for n in (first, second, third)] == [2, 3, 2]


def test_lpm_defers_a_request_whose_prefix_an_earlier_one_computes():
    yard = make_yard(schedule_policy="lpm", max_in_flight=2)
    yard.submit([D] * 40, max_new=1)
    yard.run()
    leader = yard.submit([A] * 32 + [B] * 8)
    follower = yard.submit([A] * 32 + [C] * 8)
    alone = yard.submit([G] * 40)
    hit = yard.submit([D] * 40 + [G])
    short = yard.submit([A] * 31)
    assert line(yard) == [hit, leader, alone, short, follower]
    yard.launch()
    yard.launch()
    assert line(yard) == [alone, short, follower], "the leader runs, but its prefix is not in the tree yet"
    yard.commit()
    yard.commit()
    assert line(yard) == [follower, short, alone]
    yard.run()
    assert yard.finished[follower].cached_tokens == 32


def test_thresholds_of_in_batch_prefix_caching():
    def order(**settings):
        yard = make_yard(schedule_policy="lpm", **settings)
        put_into_tree(yard, [A] * 10)
        numbers = [yard.submit([A] * 10 + [B] * 10 + [last] * 8) for last in (C, D)] + [yard.submit([G] * 9)]
        return [numbers.index(number) for number in line(yard)]

    assert order() == [0, 1, 2], "they share fewer than 32 tokens"
    sharing = {"in_batch_prefix_caching_deprioritize_threshold": 20}
    assert order(**sharing) == [0, 2, 1]
    assert order(**sharing, in_batch_prefix_caching_check_threshold=9) == [0, 1, 2], "a hit of 10 is no cold start"
    assert order(**sharing, in_batch_prefix_caching_check_threshold=-1) == [0, 1, 2]


def test_lpm_degrades_to_fcfs_only_where_it_is_set():
    for threshold, expected in ((0, [1, 0]), (2, [1, 0]), (1, [0, 1])):
        yard = make_yard(schedule_policy="lpm", lpm_degrade_threshold=threshold)
        put_into_tree(yard, [A] * 40)
        numbers = [yard.submit([B] * 40), yard.submit([A] * 40 + [B])]
        assert [numbers.index(number) for number in line(yard)] == expected


def test_dfs_weight_as_in_the_write_up():
    a, b, c, d, e, f, g = ([token] * 3 for token in range(21, 28))
    paths = {"c": a + c, "d": a + d, "f": b + e + f, "g": b + e + g}
    yard = make_yard(schedule_policy="dfs-weight")
    for path in (b, *paths.values()):
        put_into_tree(yard, path)
    names = {yard.submit(paths[name] + [50 + i]): name for i, name in enumerate("gfdcgfdccc")}
    assert [names[number] for number in line(yard)] == list("ccccddggff"), "g waits for longer than f"
    forest = yard.scheduler.state.views(yard.now).prefixes
    root = next(forest.heaviest_first())
    weights = [(branch.weight, [child.weight for child in branch.heaviest_first()]) for branch in root.heaviest_first()]
    assert (root.weight, weights) == (10, [(6, [4, 2]), (4, [4])])


def test_dfs_weight_takes_a_branch_before_its_root_at_any_depth():
    yard = make_yard(schedule_policy="dfs-weight", context=4096, pages=8192)
    chain = [5 + i % 90 for i in range(1500)]
    for length in range(1, 1501):
        put_into_tree(yard, chain[:length])
    at_root = yard.submit([3, 4])
    deep = yard.submit([*chain, 4])
    half = yard.submit([*chain[:700], 4])
    assert line(yard) == [deep, half, at_root]


def test_dfs_weight_keeps_name_spaces_apart():
    yard = make_yard(schedule_policy="dfs-weight")
    put_into_tree(yard, [A] * 4, "x\x00")
    plain = yard.submit([A] * 5)
    salted = [yard.submit([A] * 5, lora="x") for _ in range(2)]
    assert line(yard) == [*salted, plain]
    assert yard.scheduler.state.table.matchable[row(yard, plain)] == 0


def test_lof_takes_the_longest_answer_first():
    yard = make_yard(schedule_policy="lof")
    numbers = [yard.submit([5] * 4, max_new=n) for n in (3, 9, 6, 9)]
    assert line(yard) == [numbers[i] for i in (1, 3, 2, 0)]


def test_random_is_a_new_shuffle_each_step_and_repeats_with_its_seed():
    def orders(seed):
        yard = make_yard(schedule_policy="random", policy_options={"seed": seed})
        for i in range(20):
            yard.submit([5 + i])
        return [line(yard), line(yard)]

    first, second = orders(1)
    assert first != second
    assert sorted(first) == sorted(second)
    assert orders(1) == [first, second] != orders(2)


def test_routing_key_groups_by_what_runs():
    yard = make_yard(schedule_policy="routing-key", prefill_max_requests=8)
    for key in ("x", "y", "y"):
        yard.submit([5, 6, 7], max_new=50, routing_key=key)
    while yard.scheduler.state.waiting.rows.size:
        yard.launch()
        yard.commit()
    numbers = [yard.submit([5, 6, 7], routing_key=key) for key in ("z", "x", None, "y", "x", "y")]
    assert line(yard) == [numbers[i] for i in (3, 5, 1, 4, 0, 2)]


def test_hrrn_weighs_the_wait_against_the_work():
    yard = make_yard(schedule_policy="hrrn")
    now = 10**9
    long = yard.submit([5] * 100, arrival_ns=now - 10**8)
    short = yard.submit([6] * 10, arrival_ns=now - 10**7)
    assert line(yard, now) == [long, short], "the same wait per token: who came first"
    assert line(yard, now + 10**8) == [short, long]
    put_into_tree(yard, [5] * 99)
    assert line(yard, now + 10**8) == [long, short], "only what is not cached is work"


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_policies_that_need_the_tree_fall_back_to_fcfs_and_say_so(name):
    yard = make_yard(schedule_policy=name, disable_radix_cache=True)
    assert yard.scheduler.snapshot(1).policy == "fcfs"
    assert "fcfs" in yard.scheduler.state.policy_note
    numbers = [yard.submit([5] * n) for n in (4, 9, 2)]
    assert line(yard) == numbers


def test_unknown_policies_and_options_name_what_there_is():
    with pytest.raises(ConfigError, match="did you mean lpm"):
        create_policy("lmp", SchedulerSettings())
    with pytest.raises(ConfigError, match=r"choose one of .*dfs-weight"):
        create_policy("qqqq", SchedulerSettings())
    with pytest.raises(ConfigError, match="has no option 'sede'; it has seed"):
        create_policy("random", SchedulerSettings(policy_options={"sede": 1}))
    with pytest.raises(ConfigError, match="must be a int"):
        create_policy("random", SchedulerSettings(policy_options={"seed": "x"}))
    with pytest.raises(ConfigError, match="it has none"):
        create_policy("fcfs", SchedulerSettings(policy_options={"seed": 1}))
