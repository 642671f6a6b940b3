"""Ids of requests that are open or ended not long ago."""

from tokenyard.engine import recent
from tokenyard.engine.recent import RecentRequests
from tokenyard.engine.streams import Stream


def test_ids_and_numbers_find_each_other():
    book = RecentRequests()
    book.add(Stream(1, "a", 2, 5))
    book.add(Stream(3, "b", 1, 5))
    book.add(Stream(4, "a", 1, 5))
    assert book.rids() == ["b", "a"]
    assert (book.numbers("a"), book.numbers("c")) == ([4], [])
    assert [book.rid(number) for number in (1, 2, 3, 4, 5)] == ["a", "a", "b", "a", None]


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(recent, "MOST_RECENT", 3)
    book = RecentRequests()
    for number in range(1, 21):
        book.add(Stream(number, f"r{number}", 1, 5))
    assert book.rids() == ["r18", "r19", "r20"]
    assert book.rid(20) == "r20"
    assert book.rid(10) is None
