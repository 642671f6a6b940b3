from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.base.blocks import (
    BLOCK_TOKENS,
    DIGEST_BYTES,
    LOOKUP_BLOCKS,
    ROOT,
    block_digests,
    link,
    root_digest,
    state_digests,
    stored_prefix,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda ids: np.array(ids, np.int32))


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


def test_names_stay_as_they_are():
    """Slots on disk and other machines know blocks by these names."""
    assert block_digests(tokens(64))[0].hex() == "e838a5ae2d08d8a7627176a9c7e7974c"
    assert root_digest("salt").hex() == "274028b306394df9ce0aca63553d240c"


def test_only_whole_blocks_have_names():
    assert block_digests(tokens(BLOCK_TOKENS - 1)) == []
    assert len(block_digests(tokens(BLOCK_TOKENS))) == 1
    assert len(block_digests(tokens(3 * BLOCK_TOKENS + 63))) == 3
    assert all(len(digest) == DIGEST_BYTES for digest in block_digests(tokens(1000)))


def test_a_digest_covers_everything_before_it():
    left, right = tokens(256), tokens(256)
    right[0] = 7
    assert not set(block_digests(left)) & set(block_digests(right))


def test_name_spaces_do_not_meet():
    ids = tokens(128)
    assert not set(block_digests(ids)) & set(block_digests(ids, root_digest("salt")))
    assert root_digest("") == ROOT


def test_the_dtype_and_stride_do_not_matter():
    ids = tokens(128)
    assert block_digests(np.repeat(ids, 2)[::2]) == block_digests(ids)
    assert block_digests(ids.astype(np.int64)) == block_digests(ids)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_equal_prefixes_have_equal_names_and_a_chain_can_be_continued(left, right, size):
    whole = block_digests(np.concatenate((left, right)), block_tokens=size)
    first = block_digests(left, block_tokens=size)
    assert whole[: len(first)] == first
    rest = np.concatenate((left[len(first) * size :], right))
    assert whole[len(first) :] == block_digests(rest, first[-1] if first else ROOT, size)


@given(TOKENS, TOKENS)
def test_different_prefixes_have_different_names(left, right):
    pairs = zip(block_digests(left, block_tokens=1), block_digests(right, block_tokens=1), strict=False)
    for place, (one, other) in enumerate(pairs, 1):
        assert (one == other) == (left[:place] == right[:place]).all()


def test_link_is_one_step_of_the_chain():
    assert block_digests(tokens(64)) == [link(ROOT, tokens(64).tobytes())]


def test_a_block_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        block_digests(tokens(4), block_tokens=0)


def test_what_a_store_has_beyond_what_is_cached():
    known = np.arange(10, dtype=np.int32)
    asked = []

    def count_stored(digests):
        asked.extend(digests)
        return len(digests)

    def look_up(known, cached, count=count_stored):
        return stored_prefix(known, "", cached, 3, count, lambda digests: [1])

    below = look_up(known, 3)
    assert (below.first, below.found, below.tokens) == (1, 2, 9)
    assert (below.fast, below.slow) == (1, 1)
    assert asked == below.digests[1:] == block_digests(known, ROOT, 3)[1:]
    assert look_up(known[:9], 3).tokens == 8, "the last token is left to compute"
    assert look_up(known[:9], 6) is None
    assert look_up(known, 3, lambda digests: 0) is None


def test_a_prefix_with_states_ends_where_the_store_has_them():
    known, names = tokens(40), block_digests(tokens(40), ROOT, 4)
    present = {*names[:8], *state_digests(names[2], 3), *state_digests(names[5], 3)[:2], *state_digests(names[9], 3)}

    def look_up(known, cached=0):
        def count(digests):
            return sum(1 for _ in takewhile(present.__contains__, digests))

        return stored_prefix(known, "", cached, 4, count, lambda digests: [], state_blocks=3)

    found = look_up(known, cached=5)
    assert (found.first, found.found, found.tokens, found.state_blocks) == (1, 5, 12, 3)
    assert found.digests == names[:3] + state_digests(names[2], 3)
    assert look_up(known[:12]) is None, "the last token is left to compute"
    assert look_up(known, cached=12) is None
    present.add(state_digests(names[5], 3)[2])
    assert look_up(known).tokens == 24
    assert not {*state_digests(names[0], 3)} & {*names, *state_digests(names[1], 3)}


@given(st.integers(0, 400), st.integers(0, 300), st.integers(0, 400))
def test_a_sequence_is_hashed_no_further_than_it_is_stored(length, cached, stored):
    known, names = tokens(length), block_digests(tokens(length), ROOT, 1)
    hashed = set()

    def count_stored(digests):
        hashed.update(digests)
        return sum(1 for _ in takewhile(set(names[:stored]).__contains__, digests))

    below = stored_prefix(known, "", cached, 1, count_stored, lambda digests: [])
    reaches = min(stored, length - 1)
    if reaches <= cached:
        assert below is None
    else:
        assert (below.first + below.found, below.tokens, below.slow) == (min(stored, length), reaches, 0)
        assert below.digests == names[: len(below.digests)]
    assert len(hashed) <= max(0, min(stored, length) - cached) + LOOKUP_BLOCKS
