"""Ids of requests that are open or ended not long ago."""

import numpy as np

from tokenyard.base import Request, SamplingParams
from tokenyard.engine.frontend import recent_requests
from tokenyard.engine.frontend.recent_requests import RecentRequests
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.frontend.streams import Stream


def stream(number, rid, answers=1, source=0):
    request = Request(number, rid, np.zeros(5, np.int32), SamplingParams(n=answers))
    return Stream(request, SchedulerClient(lambda message: None, source=source))


def test_ids_and_numbers_find_each_other():
    book = RecentRequests()
    book.add(stream(1, "a", 2))
    book.add(stream(3, "b", source=7))
    book.add(stream(4, "a"))
    assert book.rids() == ["b", "a"]
    assert (book.numbers("a"), book.numbers("c")) == ([4], [])
    assert [book.rid(number) for number in (1, 2, 3, 4, 5)] == ["a", "a", "b", "a", None]
    assert [book.source(rid) for rid in ("a", "b", "c")] == [0, 7, -1]


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(recent_requests, "MAX_RECENT_REQUESTS", 3)
    book = RecentRequests()
    for number in range(1, 21):
        book.add(stream(number, f"r{number}"))
    assert book.rids() == ["r18", "r19", "r20"]
    assert book.rid(20) == "r20"
    assert book.rid(10) is None
