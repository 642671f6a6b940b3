"""Small integers for names, so that names can be columns."""

import heapq
from collections.abc import Hashable


class Interner:
    """Numbers names from `first` on, the lowest free number first, and drops a name that has no user any more."""

    def __init__(self, first: int = 0) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._users: dict[int, int] = {}
        self._names: dict[int, Hashable] = {}
        self._free: list[int] = []
        self._first = first

    def take(self, name: Hashable) -> int:
        """The number of `name`, with one more user."""
        number = self._numbers.get(name)
        if number is None:
            number = heapq.heappop(self._free) if self._free else self._first + len(self._numbers)
            self._numbers[name], self._names[number], self._users[number] = number, name, 0
        self._users[number] += 1
        return number

    def number_of(self, name: Hashable) -> int:
        """The number of a name that has users; 0 for one without (`first` must be above that)."""
        return self._numbers.get(name, 0)

    def keep(self, number: int) -> None:
        """Count one more user of this number."""
        self._users[number] += 1

    def release(self, number: int) -> None:
        """Count one user of this number less."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._numbers[self._names.pop(number)]
            heapq.heappush(self._free, number)

    def __len__(self) -> int:
        return len(self._numbers)
