import numpy as np
import pytest

from tests.cache.helpers import Pages, ints, key_of
from tokenyard.base.request import adapter_of
from tokenyard.cache import BlocksCleared, BlocksRemoved, BlocksStored, RadixCache, block_hashes, root_hash
from tokenyard.cache.kv_events import kv_record


class Consumer:
    """A router's view: which blocks there are."""

    def __init__(self):
        self.blocks = set()

    def replay(self, events):
        for event in events:
            if isinstance(event, BlocksStored):
                assert self.blocks.isdisjoint(event.hashes)
                self.blocks.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.blocks.issuperset(event.hashes)
                self.blocks.difference_update(event.hashes)
            else:
                self.blocks.clear()


def test_hashes_depend_on_everything_before():
    one = block_hashes(key_of(1, 2, 3, 4), 2, root_hash(""))
    assert len(one) == len(set(one)) == 2
    assert block_hashes(key_of(1, 2, 3, 4, 5), 2, root_hash("")) == one
    assert block_hashes(key_of(3, 4), 2, one[0]) == one[1:]
    assert block_hashes(key_of(9, 2, 3, 4), 2, root_hash(""))[1] != one[1]
    assert block_hashes(key_of(1, 2, 3, 4), 2, root_hash("tenant"))[0] != one[0]
    assert all(0 <= value < 2**64 for value in one)


def test_stored_carries_the_chain_and_the_tokens():
    tree = RadixCache(page_size=2, enable_kv_events=True)
    tree.insert(key_of(1, 2, 3, 4), ints(1, 2), namespace="tenant")
    tree.insert(key_of(1, 2, 3, 4, 5, 6), ints(1, 2, 3), namespace="tenant")
    first, second = tree.drain_events()
    assert (first.parent_hash, first.namespace) == (None, "tenant")
    assert second.parent_hash == first.hashes[-1]
    assert first.hashes + second.hashes == block_hashes(key_of(1, 2, 3, 4, 5, 6), 2, root_hash("tenant"))
    np.testing.assert_array_equal(first.token_ids, [1, 2, 3, 4])
    np.testing.assert_array_equal(second.token_ids, [5, 6])
    assert second.page_size == 2
    assert tree.drain_events() == []


def test_an_evicted_tail_is_removed_and_the_rest_stays():
    tree = RadixCache(enable_kv_events=True)
    tree.insert(key_of(1, 2, 3, 4), ints(1, 2, 3, 4))
    (stored,) = tree.drain_events()
    tree.match(key_of(1))
    assert tree.drain_events() == []
    tree.evict(2)
    (removed,) = tree.drain_events()
    assert removed.hashes == stored.hashes[2:]


def test_clear_replaces_everything_before_it():
    tree = RadixCache(enable_kv_events=True)
    tree.insert(key_of(1, 2), ints(1, 2))
    tree.clear()
    assert tree.drain_events() == [BlocksCleared()]
    tree.insert(key_of(1, 2), ints(1, 2))
    assert len(tree.drain_events()) == 1


def test_no_events_when_switched_off():
    tree = RadixCache()
    tree.insert(key_of(1, 2), ints(1, 2))
    assert tree.drain_events() == []
    assert tree.listeners == []


@pytest.mark.parametrize("page_size", [1, 3])
def test_a_consumer_that_replays_ends_with_the_blocks_of_the_tree(page_size):
    rng = np.random.default_rng(page_size)
    tree, pages, consumer = RadixCache(page_size, enable_kv_events=True), Pages(), Consumer()
    prompts = [rng.integers(0, 2, page_size * 6, dtype=np.int32) for _ in range(40)]
    for step, prompt in enumerate(prompts):
        namespace = "tenant" if step % 3 else ""
        tree.insert(prompt.tobytes(), pages.take(6), namespace)
        tree.match(prompts[step // 2].tobytes()[: 4 * page_size * 3], namespace)
        tree.evict(int(rng.integers(0, 8)))
        if step == 20:
            tree.clear()
        if step % 4 == 0:
            consumer.replay(tree.drain_events())
    consumer.replay(tree.drain_events())
    held = set()
    for prompt in prompts:
        for namespace in ("", "tenant"):
            tokens = tree.peek(prompt.tobytes(), namespace)
            held.update(block_hashes(prompt[:tokens].tobytes(), page_size, root_hash(namespace)))
    assert consumer.blocks == held
    late = Consumer()
    late.replay(tree.snapshot_events())
    assert late.blocks == held
    assert len(held) == tree.total_pages > 0


def test_adapters_have_their_own_blocks_under_their_names():
    tree = RadixCache(page_size=2, enable_kv_events=True)
    spaces = ("stories#00ff\x00", "stories#00ff\x00salt", "stories#1234\x00", "\x00salt", "")
    for number, namespace in enumerate(spaces):
        tree.insert(key_of(1, 2, 3, 4), ints(2 * number + 1, 2 * number + 2), namespace=namespace)
    events = tree.drain_events()
    assert len({block for event in events for block in event.hashes}) == 2 * len(spaces)
    records = [kv_record(event) for event in events]
    names = [(record["lora_name"], record.get("cache_salt")) for record in records]
    assert names == [("stories", None), ("stories", "salt"), ("stories", None), (None, "salt"), (None, None)]
    locked = tree.match(key_of(1, 2), "stories#00ff\x00salt").node
    tree.lock(locked)
    taken = tree.evict_namespaces(lambda namespace: adapter_of(namespace) == "stories#00ff")
    assert sorted(taken.tolist()) == [1, 2, 4]
    removed = {block for event in tree.drain_events() for block in event.hashes}
    assert removed == {*events[0].hashes, events[1].hashes[1]}
    assert tree.peek(key_of(1, 2, 3, 4), "stories#1234\x00") == 4
    tree.check()
