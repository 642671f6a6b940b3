"""What every store of KV blocks keeps to: in memory, on disk, shared by engines, and two of them as one."""

import contextlib
import threading

import numpy as np
import pytest

from tests.kv_store.fake_valkey import FakeValkey
from tokenyard.base.blocks import block_digests
from tokenyard.kv_store.layered import LayeredStore
from tokenyard.kv_store.remote import RemoteStore
from tokenyard.kv_store.slab import SLOT_HEAD_BYTES, SlabStore
from tokenyard.kv_store.store import BlockFormat, MemoryStore, block_buffer, padded

FORM = BlockFormat("model", "float32", 64, 4, 4000)
BLOCKS = 5
DIGESTS = block_digests(np.arange(64 * 12, dtype=np.int32))


def content(place: int) -> np.ndarray:
    block = block_buffer(FORM.block_bytes)
    block[: FORM.block_bytes] = np.random.default_rng(place).integers(0, 256, FORM.block_bytes)
    return block


@pytest.fixture(params=["memory", "disk", "memory over disk", "shared", "memory over shared"])
def store(request, tmp_path):
    with contextlib.ExitStack() as opened:
        made = MemoryStore(BLOCKS)
        if "disk" in request.param:
            slot = SLOT_HEAD_BYTES + padded(FORM.block_bytes)
            made = SlabStore(str(tmp_path), FORM, slot * BLOCKS)
        elif "shared" in request.param:
            valkey = FakeValkey()
            opened.callback(valkey.close)
            made = RemoteStore(valkey.url, FORM)
        if "over" in request.param:
            made = LayeredStore(MemoryStore(2), made, FORM.block_bytes)
        opened.callback(made.close)
        yield made


@pytest.fixture
def shared(request) -> bool:
    """Whether another process decides what is evicted."""
    return "shared" in request.node.callspec.params["store"]


def holds(store, place: int) -> bool:
    block = block_buffer(FORM.block_bytes)
    there = store.get(DIGESTS[place], block)
    return there and bool((block == content(place)).all())


def keep(store, place: int) -> None:
    """Store a block as an engine does."""
    store.put_in_memory(DIGESTS[place], content(place))
    store.put(DIGESTS[place], content(place))


def test_what_is_put_can_be_got(store):
    assert not holds(store, 0)
    assert not store.prefetch(DIGESTS[0])
    assert store.put(DIGESTS[0], content(0))
    assert not store.put(DIGESTS[0], content(0)), "it is there"
    assert store.prefetch(DIGESTS[0])
    assert holds(store, 0)
    assert store.blocks == 1
    assert store.stored_bytes >= FORM.block_bytes


def test_a_prompt_reaches_as_far_as_there_is_no_gap(store, shared):
    for place in (0, 1, 3):
        store.put(DIGESTS[place], content(place))
    assert store.count_stored(DIGESTS) == 2
    assert store.count_stored(DIGESTS[3:]) == 1
    assert store.count_stored([]) == 0
    assert store.count_maybe_stored(DIGESTS) == (len(DIGESTS) if shared else 2)


def test_the_least_recently_used_blocks_are_evicted_first_and_tails_before_heads(store, shared):
    if shared:
        pytest.skip("the server decides what is evicted")
    for place in range(BLOCKS):
        keep(store, place)
    store.touch(DIGESTS[:BLOCKS])
    keep(store, 7)
    assert store.count_stored(DIGESTS) == BLOCKS - 1
    assert holds(store, 7)
    store.touch(DIGESTS[: BLOCKS - 1])
    keep(store, 8)
    assert not holds(store, 7)
    assert store.blocks == BLOCKS
    assert store.counters.evicted == 2
    assert all(holds(store, place) for place in (*range(BLOCKS - 1), 8))


def test_it_knows_what_it_lacks_and_what_is_in_memory(store):
    in_memory = isinstance(store, LayeredStore)
    store.put_in_memory(DIGESTS[0], content(0))
    assert store.lacks(DIGESTS[0]), "it is not where it stays"
    assert holds(store, 0) == in_memory
    block = block_buffer(FORM.block_bytes)
    assert store.get_from_memory(DIGESTS[0], block) == store.has_memory_in_front == in_memory
    assert (block == content(0)).all() == in_memory
    slow = store.find_slow(DIGESTS[:2])
    assert slow == ([] if isinstance(store, MemoryStore) else [1] if in_memory else [0, 1])
    assert store.put(DIGESTS[0], content(0))
    assert not store.lacks(DIGESTS[0])
    assert holds(store, 0)


def test_a_cleared_store_is_empty_and_usable(store):
    store.put(DIGESTS[0], content(0))
    store.clear()
    assert (store.blocks, store.count_stored(DIGESTS)) == (0, 0)
    store.put(DIGESTS[1], content(1))
    assert holds(store, 1)


def test_no_reader_ever_gets_another_block(store):
    """While one thread writes more than there is room for, what others read is right or not there."""
    wrong, done = [], threading.Event()

    def read(seed: int) -> None:
        rng, block = np.random.default_rng(seed), block_buffer(FORM.block_bytes)
        while not done.is_set():
            place = int(rng.integers(len(DIGESTS)))
            if store.get(DIGESTS[place], block) and not (block == expected[place]).all():
                wrong.append(place)

    expected = [content(place) for place in range(len(DIGESTS))]
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(200):
        store.put(DIGESTS[turn % len(DIGESTS)], expected[turn % len(DIGESTS)])
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert store.counters.damaged == 0, "a block that made way is not damaged"
