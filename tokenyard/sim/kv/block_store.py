"""Stores of KV blocks in virtual time: which blocks are stored, and when reads and writes end."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import NS_PER_S
from tokenyard.base.blocks import touch_all

NEVER_NS = 2**63 - 1
At = Callable[[int, Callable[[int], None]], None]
"""Has a call run at a time (ns)."""


class SimBlockStore:
    """The blocks of one tier: at most `most`. The least recently used are evicted, as in `kv_store.store`."""

    def __init__(self, most: int) -> None:
        self.evicted = 0
        self._max_blocks = most
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._order

    def touch(self, digests: list[bytes]) -> None:
        """Mark the blocks of a prompt, in order, as used. The first block becomes the most recently used."""
        touch_all(self._order, digests)

    def put(self, digest: bytes) -> None:
        """Store a block."""
        if digest in self._order or self._max_blocks < 1:
            return
        if len(self._order) >= self._max_blocks:
            self._order.popitem(last=False)
            self.evicted += 1
        self._order[digest] = None


@dataclass(slots=True, eq=False)
class ChannelJob:
    """A read or write.

    took_ns: its duration.
    until_ns: when it times out.
    done: called as `done(part, now)` with the part that was done by then, from 0 to 1.
    begins: called when its turn comes; returns the duration where that is not known earlier.
    dropped: whether its result is no longer needed.
    """

    took_ns: int
    until_ns: int
    done: Callable[[float, int], None]
    begins: Callable[[], int] | None = None
    began_ns: int = -1
    dropped: bool = False


class IoChannel:
    """Runs jobs one after the other.

    busy_ns: total time that it has worked.
    """

    def __init__(self, at: At) -> None:
        self.busy_ns = 0
        self._at = at
        self._jobs: deque[ChannelJob] = deque()

    def add(self, job: ChannelJob, now: int) -> None:
        """Queue a job behind all earlier ones. A job that waits past its timeout ends unstarted."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin(job, now)
        elif job.until_ns < NEVER_NS:
            self._at(max(job.until_ns, now), lambda at: self._give_up(job, at))

    def _begin(self, job: ChannelJob, now: int) -> None:
        job.began_ns = now
        if job.begins is not None:
            job.took_ns = job.begins()
        self._at(max(min(now + job.took_ns, job.until_ns), now), lambda at: self._end(job, at))

    def _end(self, job: ChannelJob, now: int) -> None:
        if not self._jobs or self._jobs[0] is not job:
            return
        spent_ns = now - job.began_ns
        self.busy_ns += spent_ns
        self._jobs.popleft()
        if not job.dropped:
            job.done(spent_ns / job.took_ns if job.took_ns else 1.0, now)
        while self._jobs and self._jobs[0].dropped:
            self._jobs.popleft()
        if self._jobs and self._jobs[0].began_ns < 0:
            self._begin(self._jobs[0], now)

    def _give_up(self, job: ChannelJob, now: int) -> None:
        if job.began_ns < 0 and not job.dropped:
            job.dropped = True
            job.done(0.0, now)


def block_ns(num_bytes: int, bytes_per_s: float) -> int:
    """Nanoseconds that the transfer of a block takes."""
    return round(num_bytes / bytes_per_s * NS_PER_S)
