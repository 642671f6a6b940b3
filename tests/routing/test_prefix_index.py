import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.routing.prefix_index import ENTRY_BYTES, PrefixIndex, text_prompt, token_prompt


def chain(*parts):
    return [hash(parts[: i + 1]) for i in range(len(parts))]


def test_a_match_is_the_common_beginning():
    index = PrefixIndex(1 << 20)
    index.insert("a", chain(1, 2, 3))
    index.insert("b", chain(1, 9))
    assert index.match("a", chain(1, 2, 3, 4)) == 3
    assert index.match("a", chain(1, 2, 7)) == 2
    assert index.match("b", chain(1, 2, 3)) == 1
    assert index.match("a", chain(5)) == 0
    assert index.match("unknown", chain(1)) == 0
    assert index.match("a", []) == 0


def test_what_is_dropped_is_gone_at_once():
    index = PrefixIndex(1 << 20)
    index.insert("a", chain(1, 2, 3))
    index.insert("b", chain(1, 2, 3))
    index.clear_target("a")
    assert index.match("a", chain(1, 2, 3)) == 0
    assert index.match("b", chain(1, 2, 3)) == 3
    index.remove_target("b")
    assert index.bytes == 0


def test_memory_is_bounded_at_every_insert_and_the_newest_stay():
    index = PrefixIndex(1000 * ENTRY_BYTES)
    for i in range(5000):
        index.insert(f"w{i % 3}", chain(i, 1, 2, 3))
        assert index.bytes <= 1000 * ENTRY_BYTES
    assert index.match(f"w{4999 % 3}", chain(4999, 1, 2, 3)) == 4
    assert index.match("w0", chain(0, 1, 2, 3)) == 0
    assert index.evicted > 0


def test_a_target_is_bounded_by_its_own_cache():
    index = PrefixIndex(1 << 20)
    index.limit("a", 10)
    for i in range(50):
        index.insert("a", chain(i, 0))
    assert index.blocks_of("a") <= 10
    assert index.match("a", chain(49, 0)) == 2
    index.limit("a", 4)
    assert index.blocks_of("a") <= 4


def test_a_shared_beginning_outlives_its_continuations():
    index = PrefixIndex(1 << 20)
    index.limit("a", 40)
    for i in range(200):
        index.insert("a", chain("system", "prompt", i, "rest"))
        assert index.match("a", chain("system", "prompt")) == 2


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=6)), max_size=60))
def test_matches_are_those_of_a_plain_search(steps):
    index, held = PrefixIndex(1 << 20), {"a": set(), "b": set()}
    for name, parts in steps:
        digests = chain(*parts)
        expected = next((i for i, digest in enumerate(digests) if digest not in held[name]), len(digests))
        assert index.match(name, digests) == expected
        index.insert(name, digests)
        held[name].update(digests)
    assert index.bytes == ENTRY_BYTES * sum(map(len, held.values()))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=80), st.integers(3, 12))
def test_what_is_left_of_a_chain_is_its_beginning(prompts, most):
    index = PrefixIndex(1 << 20)
    index.limit("a", most)
    for parts in prompts:
        index.insert("a", chain(*parts))
        for other in prompts:
            digests = chain(*other)
            present = [index.match("a", digests[:i]) == i for i in range(1, len(digests) + 1)]
            assert present == sorted(present, reverse=True)


def test_removal_by_events():
    index = PrefixIndex(1 << 20)
    index.insert("a", chain(1, 2, 3))
    index.remove("a", chain(1, 2, 3)[2:])
    index.remove("unknown", chain(1))
    assert index.match("a", chain(1, 2, 3)) == 2
    assert index.bytes == 2 * ENTRY_BYTES


def test_a_text_of_any_length_has_few_blocks_and_its_match_is_close():
    draw = random.Random(3)
    text = draw.randbytes(300_000)
    prompt = text_prompt(text)
    assert len(prompt.digests) < 80
    index = PrefixIndex(1 << 20)
    index.insert("a", prompt.digests)
    for length in (1000, 5000, 20_000, 100_000, 250_000):
        other = text_prompt(text[:length] + draw.randbytes(300_000 - length))
        share = other.share(index.match("a", other.digests))
        assert 0.85 * length - 256 <= share * other.size <= length


def test_a_turn_begins_with_the_last_one():
    first, second = text_prompt(b"x" * 9000), text_prompt(b"x" * 9000 + b"y" * 5000)
    assert second.digests[: len(first.digests)] == first.digests


def test_stable_digests_are_the_same_everywhere():
    assert text_prompt(b"abc" * 200, stable=True).digests[0].hex() == "6320831d55c89186a9a6bcfd61d0df8a"
    assert text_prompt(b"short").digests == []


def test_tokens_are_blocks_of_64():
    prompt = token_prompt(np.arange(200, dtype=np.int32))
    assert (len(prompt.digests), list(prompt.ends), prompt.size) == (3, [64, 128, 192], 200)
    assert prompt.share(2) == 128 / 200
    assert prompt.share(0) == 0.0
