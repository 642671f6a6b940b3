"""Stores of KV blocks in virtual time: which blocks are stored, and when reads and writes end."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.base import NS_PER_S
from tokenyard.base.blocks import touch_all

At = Callable[[int, Callable[[int], None]], None]
"""Has a call run at a time (ns)."""


class SimBlockStore:
    """The blocks of one store: at most `most`. The least recently used are evicted, as in `kv_store.store`."""

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
    """A read or write."""

    begins: Callable[[], int]
    """Called when its turn comes; returns how long it takes (ns)."""
    done: Callable[[float, float, int], None]
    """Called once, as `done(part, seconds, now)`, with the part that was done, from 0 to 1, and the time it took."""
    began_ns: int = -1
    took_ns: int = 0


class IoChannel:
    """Runs jobs one after the other."""

    def __init__(self, at: At) -> None:
        self.busy_ns = 0
        """Total time that it has worked."""
        self._at = at
        self._jobs: deque[ChannelJob] = deque()

    def add(self, job: ChannelJob, now: int) -> None:
        """Queue a job behind all earlier ones."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin(now)

    def cancel(self, job: ChannelJob, now: int) -> None:
        """End a job now, whether it has begun or not; nothing for one that has ended."""
        if job not in self._jobs:
            return
        if job.began_ns >= 0:
            self._end(job, now)
        else:
            self._jobs.remove(job)
            job.done(0.0, 0.0, now)

    def _begin(self, now: int) -> None:
        job = self._jobs[0]
        job.began_ns, job.took_ns = now, job.begins()
        self._at(now + job.took_ns, lambda at: self._end(job, at))

    def _end(self, job: ChannelJob, now: int) -> None:
        if not self._jobs or self._jobs[0] is not job:
            return
        spent_ns = now - job.began_ns
        self.busy_ns += spent_ns
        self._jobs.popleft()
        if self._jobs:
            self._begin(now)
        job.done(spent_ns / job.took_ns if job.took_ns else 1.0, spent_ns / NS_PER_S, now)


def block_ns(num_bytes: int, bytes_per_s: float) -> int:
    """Nanoseconds that the transfer of a block takes."""
    return round(num_bytes / bytes_per_s * NS_PER_S)
