"""A long world names tables that only grow, and no table that is below its bound."""

from collections import deque

from tests.world import census
from tokenyard.scheduler.session_table import AccessTimes


class Table:
    """Stands for a class of the product."""

    __module__ = "tokenyard.example"

    def __init__(self, bound=0):
        self.kept, self.latest, self.bound = {}, deque(maxlen=4000), bound


def grown(*tables, by):
    """What is named as grown, and as beyond its bound, after `by` has changed the tables."""
    before, _ = census.census(tables)
    by()
    after, beyond = census.census(tables)
    return [line.partition(" grew ")[0] for line in census.growth([before, after])], beyond


def test_a_table_without_a_bound_that_grows_is_named():
    table = Table()
    assert grown(table, by=lambda: table.kept.update(enumerate("ab" * 200))) == (["Table.kept", "all objects"], [])


def test_a_table_below_its_bound_is_not_named(monkeypatch):
    monkeypatch.setitem(census.BOUNDS, "Table.kept", ("bound", 0))
    table, times = Table(2000), AccessTimes()

    def change():
        table.kept.update((number, float(number)) for number in range(2000))
        table.latest.extend(map(float, range(2000)))
        for tick in range(2000):
            times.note(tick, tick * 10**9)

    assert grown(table, times, by=change) == ([], [])


def test_a_table_without_a_bound_of_its_own_has_that_of_all(monkeypatch):
    monkeypatch.setitem(census.BOUNDS, "Table.kept", ("bound", 2000))
    table = Table()
    assert grown(table, by=lambda: table.kept.update(dict.fromkeys(range(2000)))) == ([], [])


def test_a_table_beyond_its_bound_is_named(monkeypatch):
    monkeypatch.setitem(census.BOUNDS, "Table.kept", 1999)
    table = Table()
    change = lambda: table.kept.update(dict.fromkeys(range(2000)))  # noqa: E731
    assert grown(table, by=change) == ([], ["Table.kept has 2000 items, its bound is 1999"])


def test_items_of_a_bounded_table_that_grow_are_named():
    table = Table()
    table.latest.extend([] for _ in range(1000))

    def change():
        for item in table.latest:
            item.extend(float(number) for number in range(10))

    assert grown(table, by=change) == (["objects of a hundred items of Table.latest"], [])
