import inspect

from tests.cache.helpers import ints, key_of
from tokenyard.cache import NoCache, RadixCache


def test_finds_and_keeps_nothing():
    cache = NoCache(page_size=2)
    inserted = cache.insert(key_of(1, 2), ints(1))
    match = cache.match(key_of(1, 2))
    assert (inserted.present_tokens, match.tokens, cache.peek(key_of(1, 2))) == (0, 0, 0)
    assert inserted.node is match.node
    cache.lock(match.node)
    extended = cache.extend(match.node, key_of(3, 4), ints(2))
    assert (extended.node, extended.present_tokens) == (match.node, 0)
    cache.record_hit(match.node)
    cache.unlock(match.node)
    assert len(cache.pages(match.node)) == len(cache.evict(5)) == len(cache.clear()) == 0
    assert (cache.evictable_pages, cache.protected_pages, cache.total_pages) == (0, 0, 0)
    assert cache.drain_events() == []
    cache.check()


def test_says_that_it_keeps_nothing():
    assert RadixCache.enabled
    assert not NoCache.enabled


def test_has_every_method_of_the_radix_cache():
    for name, method in inspect.getmembers(RadixCache, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(NoCache, name)) == inspect.signature(method), name
