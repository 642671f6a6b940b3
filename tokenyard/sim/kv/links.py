"""Links between simulated engines: so many bytes a second, one transfer after the other."""

from dataclasses import dataclass

from tokenyard.base import NS_PER_S


@dataclass(slots=True)
class Wire:
    """One direction of an engine's link. What is sent first arrives first; nothing overtakes.

    busy_ns: how long it has carried KV. moved_bytes: of KV.
    """

    ns_per_byte: float
    free_ns: int = 0
    busy_ns: int = 0
    moved_bytes: int = 0

    @classmethod
    def of(cls, bytes_per_s: float) -> "Wire":
        """A wire of this speed."""
        return cls(NS_PER_S / bytes_per_s)

    def carry(self, num_bytes: int, now: int) -> tuple[int, int]:
        """Send `num_bytes` from `now` (ns) on, after all that was sent before: (begin, end) in ns."""
        begin, took = max(now, self.free_ns), round(num_bytes * self.ns_per_byte)
        self.free_ns = begin + took
        self.busy_ns += took
        self.moved_bytes += num_bytes
        return begin, self.free_ns


def carry(way_out: Wire, way_in: Wire, num_bytes: int, now: int) -> tuple[int, int]:
    """Send KV from one engine to another: (begin, end) in ns.

    Both wires are used in the order of the calls. The switch between them has a buffer, so that a transfer that waits
    for the receiver does not hold up the sender's other ones.
    """
    begin, out_end = way_out.carry(num_bytes, now)
    begin, in_end = way_in.carry(num_bytes, begin)
    return begin, max(out_end, in_end)
