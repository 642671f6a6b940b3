"""Counts what processes keep, so that a long world shows a table that only grows.

A table with a bound may grow up to it: it is checked against its bound, and what it holds is counted for each item.
"""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from tokenyard.engine.frontend import recent_requests
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing import policies, prefix_index
from tokenyard.scheduler import request_history, session_table
from tokenyard.server.http import prompt_history

SIZED = (dict, list, set, frozenset, tuple, deque, bytearray)
GROWTH, SLACK = 1.25, 100
"""A table grows that has more than this times what it had, and this many items more."""

OF_ITEMS = "objects of a hundred items of"

INDEX_BLOCKS = int(RouterSettings().index_mb * 1e6) // prefix_index.ENTRY_BYTES
"""All targets of a router's prefix index together."""

BOUNDS: dict[str, int | tuple[str, int]] = {
    "AccessTimes._ticks": session_table.MAX_TIMES,
    "AccessTimes._times": session_table.MAX_TIMES,
    "Branch.heap": ("most", 0),
    "PromptHistory._last": prompt_history.MAX_SESSIONS,
    "PromptHistory._reports": prompt_history.MAX_REPORTS,
    "RecentRequests._places": recent_requests.MAX_RECENT_REQUESTS,
    "RecentRequests._rids": recent_requests.MAX_RECENT_REQUESTS + 3,  # the most answers that a world's request has
    "RecentRequests._turns": recent_requests.MAX_RECENT_REQUESTS,
    "RequestHistory._ends": request_history.MAX_FINISH_RECORDS,
    "SessionAffinity._sessions": policies.MAX_SESSIONS,
    "SessionTable._sessions": session_table.MAX_SESSIONS,
    "SlabStore._index": ("_max_blocks", 0),
    "_TargetBlocks.blocks": ("most", INDEX_BLOCKS),
}
"""The bound of each table that drops what is old by itself, by class and attribute. A pair is the attribute of the same
object that has it, and the bound where that is 0; 0 for none. A deque knows its own.
"""


def census(roots: Iterable[Any]) -> tuple[Counter[str], list[str]]:
    """How many items each table of the product has that `roots` reach, by class and attribute, and how many objects of
    each class; and tables that have more items than their bound. The world is no part of it, nor are modules.

    What only tables with a bound hold is counted apart, as the objects of a hundred items.
    """
    found: Counter[str] = Counter()
    seen, bounded = set[int](), dict[str, list[tuple[int, Any]]]()
    _count(list(roots), seen, found, bounded)
    found["all objects"] = len(seen)
    beyond = []
    for name, tables in bounded.items():
        beyond += [
            f"{name} has {len(table)} items, its bound is {bound}" for bound, table in tables if len(table) > bound
        ]
        before, items = len(seen), sum(len(table) for _, table in tables)
        _count([one for _, table in tables for one in gc.get_referents(table)], seen, Counter(), {})
        if items >= SLACK:
            found[f"{OF_ITEMS} {name}"] = 100 * (len(seen) - before) // items
    return found, beyond


def _count(todo: list[Any], seen: set[int], found: Counter[str], bounded: dict[str, list[tuple[int, Any]]]) -> None:
    """Count what is reached, but for what tables with a bound hold: these are collected by name, with their bounds."""
    firsts = {id(root) for root in todo}
    left: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen or id(one) in left or isinstance(one, type | ModuleType | CodeType | BuiltinFunctionType):
            continue
        seen.add(id(one))
        kind = type(one)
        if isinstance(one, FunctionType):
            todo += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
            continue
        if kind.__module__.startswith("tests.") and id(one) not in firsts:
            continue
        if kind.__module__.startswith("tokenyard."):
            found[kind.__qualname__] += 1
            attributes = dict(_attributes(one))
            for name, value in attributes.items():
                table = f"{kind.__qualname__}.{name}"
                bound = BOUNDS.get(table, getattr(value, "maxlen", None))
                if isinstance(bound, tuple):
                    bound = attributes[bound[0]] or bound[1]
                if bound:
                    bounded.setdefault(table, []).append((bound, value))
                    left.add(id(value))
                elif isinstance(value, SIZED):
                    found[table] += len(value)
        todo += gc.get_referents(one)


def shared_tables() -> Counter[str]:
    """How many items tables of the product's modules have, and those of its cached functions that know no bound."""
    found: Counter[str] = Counter()
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("tokenyard."):
            for name, value in list(vars(module).items()):
                if isinstance(value, dict | list | set | deque) and not name.startswith("__"):
                    found[f"{module_name}.{name}"] = len(value)
                elif hasattr(value, "cache_info") and value.cache_info().maxsize is None:
                    found[f"{module_name}.{name}"] = value.cache_info().currsize
    return found


def growth(counts: Sequence[Counter[str]]) -> list[str]:
    """The tables that have grown from the first count to the last; of items, from the first one that has them."""
    found = []
    for name, size in sorted(counts[-1].items()):
        of_items = next(count[name] for count in counts if count[name]) if name.startswith(OF_ITEMS) else 0
        before = of_items or counts[0][name]
        if size > GROWTH * before + SLACK:
            found.append(f"{name} grew from {before} to {size}")
    return found


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)
