"""Counts what processes keep, so that a long world shows a table that only grows."""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

SIZED = (dict, list, set, frozenset, tuple, deque, bytearray)
GROWTH, SLACK = 1.25, 100
"""A table grows that has more than this times what it had, and this many items more."""


def census(roots: Iterable[Any]) -> Counter[str]:
    """How many items each table of the product has that `roots` reach, by class and attribute, and how many objects of
    each class. The world is no part of it, nor are modules.
    """
    found: Counter[str] = Counter()
    todo, seen = list(roots), set[int]()
    firsts = {id(root) for root in todo}
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | CodeType | BuiltinFunctionType):
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
            for name, value in _attributes(one):
                if isinstance(value, SIZED):
                    found[f"{kind.__qualname__}.{name}"] += len(value)
        todo += gc.get_referents(one)
    found["all objects"] = len(seen)
    return found


def shared_tables() -> Counter[str]:
    """How many items tables of the product's modules have, and its cached functions."""
    found: Counter[str] = Counter()
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("tokenyard."):
            for name, value in list(vars(module).items()):
                if isinstance(value, dict | list | set | deque) and not name.startswith("__"):
                    found[f"{module_name}.{name}"] = len(value)
                elif hasattr(value, "cache_info"):
                    found[f"{module_name}.{name}"] = value.cache_info().currsize
    return found


def growth(before: Counter[str], after: Counter[str]) -> list[str]:
    """The tables that have grown."""
    return [
        f"{name} grew from {before[name]} to {size}"
        for name, size in sorted(after.items())
        if size > GROWTH * before[name] + SLACK
    ]


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)
