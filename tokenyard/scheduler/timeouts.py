"""Queue and run timeouts, checked in O(1) a step: with one length for all, expiry order is order of entry."""

from collections import deque


class Timeouts:
    """Requests in the order in which they will be overdue. `timeout_s` below 0 switches it off."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9) if timeout_s >= 0 else None
        self._entries: deque[tuple[int, int]] = deque()

    def start(self, number: int, now: int) -> None:
        """From `now` (ns) on, request `number` is on the clock."""
        if self._timeout_ns is not None:
            self._entries.append((now + self._timeout_ns, number))

    def expired(self, now: int) -> list[int]:
        """Numbers whose time is up; whether they are still there is the caller's to find out."""
        numbers = []
        while self._entries and self._entries[0][0] <= now:
            numbers.append(self._entries.popleft()[1])
        return numbers

    @property
    def next_ns(self) -> int | None:
        """When the next one expires."""
        return self._entries[0][0] if self._entries else None
