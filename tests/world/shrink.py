"""Cuts a broken story down: fewer faults and requests that still break it."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tests.world.world import Story, run

T = TypeVar("T")
TRIES = 120


def shrink(story: Story, violations: list[str]) -> Story:
    """A shorter story with a violation of the same kind (its first words) as the first of these."""
    kind = _kind(violations[0])
    tries = iter(range(TRIES))

    def breaks(shorter: Story) -> bool:
        return next(tries, None) is not None and any(_kind(text) == kind for text in run(shorter).violations)

    story = replace(story, faults=_fewer(story.faults, lambda some: breaks(replace(story, faults=some))))
    return replace(story, asks=_fewer(story.asks, lambda some: bool(some) and breaks(replace(story, asks=some))))


def _kind(violation: str) -> str:
    words = [word for word in violation.split() if not any(letter.isdigit() for letter in word)]
    return " ".join(words[:4])


def _fewer(items: list[T], breaks: Callable[[list[T]], bool]) -> list[T]:
    """Leave out halves, quarters and so on, while the rest breaks (delta debugging, Zeller 1999)."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            rest = items[:at] + items[at + size :]
            if breaks(rest):
                items = rest
            else:
                at += size
        if size == 1:
            return items
        size = max(1, size // 2)
    return items
