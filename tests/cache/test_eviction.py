import numpy as np
import pytest

from tests.cache.helpers import Pages, ints, key_of
from tokenyard.base import ConfigError
from tokenyard.cache import EVICTION_POLICIES, RadixCache

VICTIMS = {
    "lru": "cabd",
    "mru": "dbac",
    "fifo": "abcd",
    "filo": "dcba",
    "lfu": "cdba",
    "slru": "cdab",
    "priority": "bdac",
    "reuse": "cabd",
}


def order_of_eviction(policy):
    """Four leaves, made in the order a b c d and last used in the order c a b d."""
    tree = RadixCache(eviction_policy=policy)
    priorities = {"a": 1, "b": 0, "c": 2, "d": 0}
    for page, name in enumerate("abcd", start=1):
        tree.insert(key_of(ord(name)), ints(page), priority=priorities[name])
    for name in "aaab":
        tree.record_hit(tree.match(key_of(ord(name))).node)
    for name in "cabd":
        tree.match(key_of(ord(name)))
    return "".join("abcd"[int(tree.evict(1)[0]) - 1] for _ in range(4))


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_every_policy_has_its_own_order(policy):
    assert order_of_eviction(policy) == VICTIMS[policy]
    # "reuse" is LRU where nothing is known about values.
    assert len(set(VICTIMS.values())) == len(EVICTION_POLICIES) - 1


def test_an_unknown_policy_names_the_choices():
    with pytest.raises(ConfigError, match=r"'random'.*fifo, filo, lfu, lru, mru, priority, reuse, slru"):
        RadixCache(eviction_policy="random")


def test_only_the_shortfall_is_evicted_from_the_tail_of_the_victim():
    tree = RadixCache(page_size=2)
    tree.insert(key_of(*range(20)), np.arange(1, 11, dtype=np.int32))
    np.testing.assert_array_equal(tree.evict(3), [8, 9, 10])
    assert (tree.evictable_pages, tree.peek(key_of(*range(20)))) == (7, 14)
    tree.check()


def test_more_than_there_is_empties_the_tree():
    tree = RadixCache()
    tree.insert(key_of(1, 2, 3), ints(1, 2, 3))
    tree.insert(key_of(1, 2, 4), ints(8, 9, 4))
    assert sorted(tree.evict(100)) == [1, 2, 3, 4]
    assert len(tree.evict(1)) == 0
    assert len(tree.evict(0)) == len(tree.evict(-1)) == 0
    tree.check()


def test_a_parent_is_evicted_only_after_its_children():
    tree = RadixCache()
    tree.insert(key_of(1, 2, 3), ints(1, 2, 3))
    tree.insert(key_of(1, 2, 4), ints(8, 9, 4))
    np.testing.assert_array_equal(tree.evict(4), [3, 4, 1, 2])


def test_locked_pages_stay():
    tree = RadixCache()
    tree.insert(key_of(1, 2, 3), ints(1, 2, 3))
    tree.insert(key_of(1, 2, 4), ints(8, 9, 4))
    tree.lock(tree.match(key_of(1, 2, 3)).node)
    np.testing.assert_array_equal(tree.evict(100), [4])
    tree.check()


def test_the_end_of_a_lock_counts_as_a_use():
    tree = RadixCache()
    first = tree.insert(key_of(1), ints(1)).node
    tree.lock(first)
    tree.insert(key_of(2), ints(2))
    tree.unlock(first)
    np.testing.assert_array_equal(tree.evict(1), [2])


def test_a_match_alone_is_no_hit():
    tree = RadixCache(eviction_policy="lfu")
    for token in (1, 2):
        tree.insert(key_of(token), ints(token))
    tree.record_hit(tree.match(key_of(2)).node)
    for _ in range(5):
        tree.match(key_of(1))
    np.testing.assert_array_equal(tree.evict(1), [1])


def test_a_split_inherits_age_hits_and_priority():
    tree = RadixCache()
    lower = tree.insert(key_of(1, 2, 3, 4), ints(1, 2, 3, 4), priority=5).node
    tree.insert(key_of(9), ints(9))
    tree.record_hit(lower)
    upper = tree.match(key_of(1, 2)).node
    assert (upper.creation_tick, upper.hits, upper.priority) == (lower.creation_tick, 1, 5)
    assert upper.last_access_tick > lower.last_access_tick


def test_fifo_keeps_its_order_through_a_split():
    tree = RadixCache(eviction_policy="fifo")
    tree.insert(key_of(1, 2), ints(1, 2))
    tree.insert(key_of(7), ints(7))
    tree.match(key_of(1))
    np.testing.assert_array_equal(tree.evict(3), [2, 1, 7])


def test_priority_is_the_highest_of_everything_below():
    tree = RadixCache(eviction_policy="priority")
    tree.insert(key_of(1, 2), ints(1, 2), priority=1)
    tree.insert(key_of(3, 4), ints(3, 4), priority=2)
    node = tree.match(key_of(1)).node
    tree.lock(node)
    tree.extend(node, key_of(5), ints(5), priority=9)
    tree.unlock(node)
    np.testing.assert_array_equal(tree.evict(5), [2, 3, 4, 5, 1])


def test_a_duplicate_insert_raises_the_priority():
    tree = RadixCache(eviction_policy="priority")
    tree.insert(key_of(1), ints(1), priority=1)
    tree.insert(key_of(2), ints(2), priority=2)
    tree.insert(key_of(1), ints(7), priority=3)
    tree.insert(key_of(1), ints(8), priority=0)
    np.testing.assert_array_equal(tree.evict(2), [2, 1])


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_the_order_survives_thousands_of_inserts_hits_and_evictions(policy):
    tree, pages, rng = RadixCache(eviction_policy=policy), Pages(), np.random.default_rng(7)
    eviction_rank = EVICTION_POLICIES[policy]
    for step in range(4000):
        tree.insert(key_of(step), pages.take(1), priority=int(rng.integers(3)))
        node = tree.match(key_of(int(rng.integers(step + 1)))).node
        if rng.random() < 0.5:
            tree.record_hit(node)
        tree.lock(node)
        tree.unlock(node)
        if step % 3 == 0:
            tree.evict(1)
    tree.check()
    (root,) = tree.roots()
    expected = [int(node.pages[0]) for node in sorted(root.children.values(), key=eviction_rank)]
    assert [int(tree.evict(1)[0]) for _ in expected] == expected
    tree.check()
