"""Links between simulated engines: a fixed bandwidth, one transfer after the other."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import NS_PER_S


@dataclass(slots=True, eq=False)
class LinkDirection:
    """One direction of an engine's link, first in, first out.

    busy_ns: how long it has carried KV.
    moved_bytes: bytes of KV that it has carried.
    """

    ns_per_byte: float
    free_ns: int = 0
    busy_ns: int = 0
    moved_bytes: int = 0

    @classmethod
    def of(cls, bytes_per_s: float) -> "LinkDirection":
        """A link direction of this bandwidth."""
        return cls(NS_PER_S / bytes_per_s)


@dataclass(slots=True)
class LinkSpan:
    """The time of a transfer on one link direction, in ns."""

    wire: LinkDirection
    begin_ns: int
    end_ns: int

    @classmethod
    def on(cls, wire: LinkDirection, num_bytes: int, earliest_ns: int) -> "LinkSpan":
        """Queue a transfer behind all that `wire` carries, from `earliest_ns` on."""
        begin, took = max(earliest_ns, wire.free_ns), round(num_bytes * wire.ns_per_byte)
        wire.free_ns = begin + took
        wire.busy_ns += took
        wire.moved_bytes += num_bytes
        return cls(wire, begin, wire.free_ns)

    def move(self, begin_ns: int) -> None:
        """Move the span to another start."""
        self.begin_ns, self.end_ns = begin_ns, begin_ns + self.end_ns - self.begin_ns

    def cut(self, num_bytes: int, now: int) -> None:
        """End now, with the part of the `num_bytes` that was sent."""
        took, left = self.end_ns - self.begin_ns, self.end_ns - max(self.begin_ns, now)
        if left > 0:
            self.wire.busy_ns -= left
            self.wire.moved_bytes -= round(num_bytes * left / took)
            self.end_ns -= left


@dataclass(slots=True, eq=False)
class Transfer:
    """KV in transit from one engine to another.

    asked_ns: when it was requested.
    out: its time on the sender's link.
    into: its time on the receiver's link.
    ends: called with it when it ends.
    """

    num_bytes: int
    asked_ns: int
    out: LinkSpan
    into: LinkSpan
    ends: Callable[["Transfer"], None]

    @property
    def begin_ns(self) -> int:
        """When its first byte arrives."""
        return self.into.begin_ns

    @property
    def end_ns(self) -> int:
        """When its last byte has arrived."""
        return max(self.out.end_ns, self.into.end_ns)


class LinkScheduler:
    """All transfers between engines, in the order of their requests.

    A transfer uses both of its link directions in that order. The switch between them has a buffer, so that a transfer
    that waits for the receiver does not block the sender's other transfers.
    """

    def __init__(self) -> None:
        self._open: list[Transfer] = []

    def carry(
        self, way_out: LinkDirection, way_in: LinkDirection, num_bytes: int, now: int, ends: Callable[[Transfer], None]
    ) -> Transfer:
        """Send KV from one engine to another, from `now` (ns) on.

        ends: called with the transfer, now and whenever the end of its transfer changes because another one is stopped.
        """
        self._open = [one for one in self._open if one.end_ns > now]
        out = LinkSpan.on(way_out, num_bytes, now)
        found = Transfer(num_bytes, now, out, LinkSpan.on(way_in, num_bytes, out.begin_ns), ends)
        self._open.append(found)
        ends(found)
        return found

    def stop(self, transfer: Transfer, now: int) -> None:
        """Stop a transfer. Transfers behind it move forward."""
        if transfer not in self._open:
            return
        for span in (transfer.out, transfer.into):
            span.cut(transfer.num_bytes, now)
        place = self._open.index(transfer)
        free = {id(span.wire): now for span in (transfer.out, transfer.into)}
        for one in self._open[:place]:
            _note(free, one)
        moved = []
        for one in self._open[place + 1 :]:
            before = one.end_ns
            if one.out.begin_ns > now:
                one.out.move(max(one.asked_ns, now, free.get(id(one.out.wire), 0)))
            if one.into.begin_ns > now:
                one.into.move(max(one.out.begin_ns, now, free.get(id(one.into.wire), 0)))
            _note(free, one)
            if one.end_ns != before:
                moved.append(one)
        for one in self._open[place:]:
            for wire in (one.out.wire, one.into.wire):
                wire.free_ns = free[id(wire)]
        del self._open[place]
        for one in moved:
            one.ends(one)


def _note(free: dict[int, int], transfer: Transfer) -> None:
    """Record when the link directions of a transfer are free again."""
    for span in (transfer.out, transfer.into):
        free[id(span.wire)] = max(span.end_ns, free.get(id(span.wire), 0))
