import numpy as np
import pytest

from tests.cache.helpers import Recorder, ints, key_of
from tokenyard.cache import RadixCache, make_key


def filled(page_size=1):
    """A tree that holds the tokens 1..8 on the pages 11, 12, ..."""
    tree = RadixCache(page_size)
    count = 8 // page_size
    tree.insert(key_of(1, 2, 3, 4, 5, 6, 7, 8), np.arange(11, 11 + count, dtype=np.int32))
    return tree


def test_keys_are_little_endian_int32():
    assert make_key(ints(1, -1)) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert make_key(np.arange(8, dtype=np.int32)[::2]) == key_of(0, 2, 4, 6)


def test_an_empty_tree_finds_nothing():
    tree = RadixCache()
    match = tree.match(key_of(1, 2, 3))
    assert match.tokens == 0
    assert match.node.parent is None
    assert len(tree.pages(match.node)) == 0
    assert tree.match(b"").tokens == 0


def test_match_returns_what_was_inserted():
    tree = filled()
    match = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert match.tokens == 8
    np.testing.assert_array_equal(tree.pages(match.node), np.arange(11, 19))
    assert tree.pages(match.node).dtype == np.int32


def test_a_partial_hit_splits_the_run():
    tree = filled()
    match = tree.match(key_of(1, 2, 3, 99))
    assert match.tokens == 3
    assert match.node.depth_tokens == 3
    np.testing.assert_array_equal(tree.pages(match.node), [11, 12, 13])
    assert tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).tokens == 8
    tree.check()


@pytest.mark.parametrize(("query", "found"), [((1, 2, 3), 0), ((1, 2, 3, 4, 5), 4), ((1, 2, 3, 4, 5, 6, 9, 8), 4)])
def test_hits_are_whole_pages(query, found):
    tree = filled(page_size=4)
    assert tree.peek(key_of(*query)) == found
    assert tree.match(key_of(*query)).tokens == found


@pytest.mark.parametrize(("limit", "found"), [(None, 8), (100, 8), (7, 6), (2, 2), (1, 0), (0, 0), (-3, 0)])
def test_max_tokens_limits_a_match_to_whole_pages(limit, found):
    assert filled(page_size=2).match(key_of(1, 2, 3, 4, 5, 6, 7, 8), max_tokens=limit).tokens == found


def test_peek_changes_nothing():
    tree = filled()
    recorder = Recorder()
    tree.listeners.append(recorder)
    node = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).node
    stamp = node.last_access_tick
    assert tree.peek(key_of(1, 2, 3, 99)) == 3
    assert tree.peek(key_of(1, 2), namespace="other") == 0
    assert (node.last_access_tick, recorder.heard) == (stamp, [])


def test_insert_returns_the_cached_length_and_keeps_only_the_rest():
    tree = filled()
    again = tree.insert(key_of(1, 2, 3, 20, 21), ints(51, 52, 53, 54, 55))
    assert again.present_tokens == 3
    np.testing.assert_array_equal(tree.pages(again.node), [11, 12, 13, 54, 55])
    assert tree.total_pages == 10
    duplicate = tree.insert(key_of(1, 2, 3, 20, 21), ints(61, 62, 63, 64, 65))
    assert (duplicate.present_tokens, duplicate.node) == (5, again.node)
    assert tree.total_pages == 10
    tree.check()


def test_an_insert_that_ends_inside_a_run_splits_it():
    tree = filled()
    short = tree.insert(key_of(1, 2, 3), ints(51, 52, 53))
    assert (short.present_tokens, short.node.depth_tokens) == (3, 3)
    tree.check()


def test_the_tree_does_not_share_memory_with_its_callers():
    tree = RadixCache()
    pages = ints(1, 2, 3)
    node = tree.insert(key_of(1, 2, 3), pages).node
    pages[:] = 0
    np.testing.assert_array_equal(tree.pages(node), [1, 2, 3])
    tree.pages(node)[:] = 0
    np.testing.assert_array_equal(tree.pages(node), [1, 2, 3])


@pytest.mark.parametrize(("tokens", "pages"), [((1, 2, 3), 2), ((1, 2, 3), 1), ((1, 2), 2), ((), 1)])
def test_key_and_pages_must_agree(tokens, pages):
    tree = RadixCache(page_size=2)
    with pytest.raises(ValueError, match="whole pages"):
        tree.insert(key_of(*tokens), np.arange(1, 1 + pages, dtype=np.int32))
    assert tree.total_pages == 0


def test_an_empty_insert_is_the_root():
    tree = RadixCache()
    inserted = tree.insert(b"", ints())
    assert (inserted.node.parent, inserted.present_tokens) == (None, 0)


def test_name_spaces_share_nothing():
    tree = filled()
    other = tree.insert(key_of(1, 2, 3), ints(51, 52, 53), namespace="tenant")
    assert other.present_tokens == 0
    np.testing.assert_array_equal(tree.pages(tree.match(key_of(1, 2, 3), "tenant").node), [51, 52, 53])
    assert tree.match(key_of(1, 2, 3, 4), "tenant").tokens == 3
    assert tree.match(key_of(1, 2, 3, 4), "stranger").tokens == 0
    tree.check()


def test_unused_name_spaces_do_not_accumulate():
    tree = RadixCache()
    kept = tree.match(key_of(1), "kept").node
    tree.lock(kept)
    tagged = tree.match(key_of(1), "tagged").node
    tagged.tag = "a listener's"
    for number in range(5000):
        tree.match(key_of(1), f"salt {number}")
    assert len(list(tree.roots())) < 2000
    assert tree.match(key_of(1), "kept").node is kept
    assert tree.match(key_of(1), "tagged").node is tagged


def test_extend_continues_below_a_locked_node():
    tree = filled()
    node = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).node
    tree.lock(node)
    longer = tree.extend(node, key_of(9, 10), ints(51, 52))
    assert longer.present_tokens == 0
    np.testing.assert_array_equal(tree.pages(longer.node), [*range(11, 19), 51, 52])
    again = tree.extend(node, key_of(9, 77), ints(61, 62))
    assert again.present_tokens == 1
    np.testing.assert_array_equal(tree.pages(again.node), [*range(11, 19), 51, 62])
    tree.check()


def test_extend_continues_after_the_locked_node_was_split():
    tree = filled()
    node = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).node
    tree.lock(node)
    tree.match(key_of(1, 2, 50))
    longer = tree.extend(node, key_of(9), ints(51))
    np.testing.assert_array_equal(tree.pages(longer.node), [*range(11, 19), 51])
    tree.unlock(node)
    assert tree.protected_pages == 0
    tree.check()


def test_extend_needs_a_lock():
    tree = filled()
    node = tree.match(key_of(1, 2)).node
    with pytest.raises(ValueError, match=r"lock\(node\) first"):
        tree.extend(node, key_of(9), ints(51))


def test_locks_move_pages_between_evictable_and_protected():
    tree = filled()
    upper = tree.match(key_of(1, 2, 3)).node
    lower = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).node
    assert (tree.evictable_pages, tree.protected_pages) == (8, 0)
    tree.lock(lower)
    assert (tree.evictable_pages, tree.protected_pages) == (0, 8)
    tree.lock(upper)
    tree.unlock(lower)
    assert (tree.evictable_pages, tree.protected_pages) == (5, 3)
    tree.check()
    tree.unlock(upper)
    assert (tree.evictable_pages, tree.protected_pages, tree.total_pages) == (8, 0, 8)


def test_unlock_below_zero_raises_even_above_a_locked_node():
    tree = filled()
    upper = tree.match(key_of(1, 2, 3)).node
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(upper)
    tree.lock(tree.match(key_of(1, 2, 3, 4)).node)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(upper)
    tree.check()


def test_a_split_run_stays_locked_on_both_sides():
    tree = filled()
    node = tree.match(key_of(1, 2, 3, 4, 5, 6, 7, 8)).node
    tree.lock(node)
    tree.match(key_of(1, 2, 3, 99))
    assert tree.protected_pages == 8
    assert len(tree.evict(8)) == 0
    tree.unlock(node)
    assert tree.evictable_pages == 8
    tree.check()


def test_clear_gives_all_pages_back():
    tree = filled()
    tree.insert(key_of(1, 2, 9), ints(31, 32, 33))
    tree.insert(key_of(4, 5), ints(41, 42), "tenant")
    assert sorted(tree.clear()) == [*range(11, 19), 33, 41, 42]
    assert tree.total_pages == 0
    assert tree.peek(key_of(1, 2, 3)) == 0
    tree.check()


def test_clear_is_refused_while_something_is_locked():
    tree = filled()
    tree.lock(tree.match(key_of(5), "tenant").node)
    with pytest.raises(RuntimeError, match="while requests use it"):
        tree.clear()
    assert tree.total_pages == 8


def test_listeners_get_every_change():
    tree = RadixCache()
    recorder = Recorder()
    tree.listeners.append(recorder)
    lower = tree.insert(key_of(1, 2, 3, 4), ints(1, 2, 3, 4)).node
    assert recorder.heard == [("inserted", lower.parent, lower)]
    upper = tree.match(key_of(1, 2)).node
    assert recorder.heard[1:] == [("split", upper, lower)]
    assert (upper.depth_tokens, lower.depth_tokens, lower.key) == (2, 4, key_of(3, 4))
    recorder.heard.clear()
    tree.evict(1)
    (_, middle, tail), (word, gone) = recorder.heard
    assert (word, gone, tail) == ("evicted", lower, lower)
    assert (middle.depth_tokens, middle.parent) == (3, upper)
    recorder.heard.clear()
    tree.clear()
    assert recorder.heard == [("evicted", middle), ("evicted", upper)]


def test_chains_of_any_depth_need_no_recursion():
    depth = 20_000
    tree = RadixCache()
    node = tree.match(b"").node
    tree.lock(node)
    for position in range(depth):
        below = tree.extend(node, position.to_bytes(4, "little"), ints(position + 1)).node
        tree.lock(below)
        tree.unlock(node)
        node = below
    key = make_key(np.arange(depth, dtype=np.int32))
    assert tree.protected_pages == tree.match(key).tokens == tree.peek(key) == depth
    np.testing.assert_array_equal(tree.pages(node), np.arange(1, depth + 1))
    tree.check()
    tree.unlock(node)
    np.testing.assert_array_equal(tree.evict(2), [depth, depth - 1])
    assert len(tree.clear()) == depth - 2
    tree.check()


def test_page_size_must_be_positive():
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)
