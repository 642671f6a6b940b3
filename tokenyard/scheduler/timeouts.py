"""Queue and run timeouts, checked in O(1) a step: all have the same length, so they expire in order of entry."""

from collections import deque


class ExpiryQueue:
    """Requests in the order in which they expire. `timeout_s` below 0 disables it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9) if timeout_s >= 0 else None
        self._entries: deque[tuple[int, int]] = deque()

    def start(self, number: int, now: int) -> None:
        """Start the timeout of request `number` at `now` (ns)."""
        if self._timeout_ns is not None:
            self._entries.append((now + self._timeout_ns, number))

    def expired(self, now: int) -> list[int]:
        """Numbers of expired requests; the caller checks whether they are still open."""
        numbers = []
        while self._entries and self._entries[0][0] <= now:
            numbers.append(self._entries.popleft()[1])
        return numbers

    @property
    def next_ns(self) -> int | None:
        """When the next one expires."""
        return self._entries[0][0] if self._entries else None
