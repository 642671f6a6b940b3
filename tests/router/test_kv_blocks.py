"""KV events of engines, of any page size and in either form, as our blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.base.blocks import block_digests
from tokenyard.routing.prefix_index import BlockHashTranslator

TOKENS = list(range(1000, 1400))
DIGESTS = block_digests(np.array(TOKENS, np.int32))


def stored(first, count, size, *, form="map", parent="usual", name=lambda i: 7000 + i):
    """Blocks `first`, ... of TOKENS in pages of `size`."""
    before = (None if first == 0 else name(first - 1)) if parent == "usual" else parent
    hashes = [name(i) for i in range(first, first + count)]
    tokens = TOKENS[first * size : (first + count) * size]
    if form == "map":
        fields = {"block_hashes": hashes, "parent_block_hash": before, "token_ids": tokens, "block_size": size}
        return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "extra": [1]}
    return ["BlockStored", hashes, before, tokens, size, None]


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("size", [1, 16, 32, 64, 100, 128, 400])
def test_blocks_of_any_page_size_become_ours(form, size):
    blocks = BlockHashTranslator()
    found, _, _ = blocks.apply(stored(0, 400 // size, size, form=form))
    assert found == DIGESTS[: (400 // size) * size // 64]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.sampled_from([1, 5, 16, 48]))
def test_it_does_not_matter_how_events_cut_a_prompt(cuts, size):
    blocks, found, first = BlockHashTranslator(), [], 0
    for count in cuts:
        count = min(count, 400 // size - first)
        if count > 0:
            found += blocks.apply(stored(first, count, size))[0]
            first += count
    assert found == DIGESTS[: first * size // 64]


def test_a_block_of_ours_goes_with_any_of_its_parts():
    blocks = BlockHashTranslator()
    blocks.apply(stored(0, 16, 16))
    assert blocks.apply({"type": "BlockRemoved", "block_hashes": [7000 + 15], "medium": "GPU"})[1] == [DIGESTS[3]]
    assert blocks.apply(["BlockRemoved", [7000 + 12]])[1] == [DIGESTS[3]]
    assert blocks.apply(["BlockRemoved", [7000 + 4, 999]])[1] == [DIGESTS[1]]
    assert blocks.apply(["BlockRemoved", [7000 + 4]])[1] == []


def test_everything_can_go_at_once():
    blocks = BlockHashTranslator()
    blocks.apply(stored(0, 4, 64))
    assert blocks.apply({"type": "AllBlocksCleared"}) == ([], [], True)
    assert blocks.apply(["AllBlocksCleared"])[2] is True
    assert blocks.apply(stored(1, 1, 64))[0] == []


def test_hashes_may_be_anything_and_roots_can_be_named():
    for name in (lambda i: -5 - i, lambda i: b"hash%d" % i, lambda i: f"h{i}"):
        blocks = BlockHashTranslator()
        assert blocks.apply(stored(0, 2, 64, name=name))[0] == DIGESTS[:2]
        assert blocks.apply(stored(2, 1, 64, name=name))[0] == DIGESTS[2:3]
    assert BlockHashTranslator().apply(stored(0, 2, 64, parent=42))[0] == []


@pytest.mark.parametrize(
    "event",
    [
        None,
        5,
        [],
        {},
        ["BlockStored"],
        ["Other", [1]],
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 99, "token_ids": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": "xx", "block_size": 1},
        {"type": "BlockStored", "block_hashes": [[1]], "parent_block_hash": None, "token_ids": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [2**70], "block_size": 1},
        {"type": "BlockRemoved", "block_hashes": None},
        stored(0, 2, 64) | {"medium": "DISK"},
    ],
)
def test_what_is_no_event_changes_nothing(event):
    blocks = BlockHashTranslator()
    assert blocks.apply(event) == ([], [], False)
    assert blocks.apply(stored(0, 2, 64))[0] == DIGESTS[:2]
