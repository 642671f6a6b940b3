"""Which worker serves a request: pure functions of what the router knows, shared by the router and the simulator."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from typing_extensions import override

from tokenyard.base import ConfigError

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MATCH_BLOCK_BYTES = 512
MAX_BLOCKS_PER_WORKER = 1 << 18


@dataclass(slots=True)
class WorkerLoad:
    """What a worker has on its hands: requests not finished yet, and the seconds of prefill they began with."""

    requests: int = 0
    prefill_s: float = 0.0

    def add(self, prefill_s: float) -> None:
        """A request was sent to the worker."""
        self.requests += 1
        self.prefill_s += prefill_s

    def remove(self, prefill_s: float) -> None:
        """A request of the worker ended."""
        self.requests -= 1
        self.prefill_s -= prefill_s


class Chooser(Protocol):
    """Picks a worker. `needs_prompt` says whether `choose` looks at the prompt's bytes."""

    needs_prompt: bool

    def choose(self, loads: Sequence[WorkerLoad], prompt: bytes) -> int:
        """Index of the worker that shall serve a request whose prompt's token ids are `prompt` (int32, raw)."""


class RoundRobin(Chooser):
    """One after the other."""

    needs_prompt = False

    def __init__(self, workers: int, seed: int) -> None:
        self._next = 0

    @override
    def choose(self, loads: Sequence[WorkerLoad], prompt: bytes) -> int:
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoad(Chooser):
    """The worker with the least prefill work, then with the fewest requests."""

    needs_prompt = False

    def __init__(self, workers: int, seed: int) -> None:
        pass

    @override
    def choose(self, loads: Sequence[WorkerLoad], prompt: bytes) -> int:
        return min(range(len(loads)), key=lambda i: (loads[i].prefill_s, loads[i].requests))


class PowerOfTwo(Chooser):
    """The one with fewer requests of two drawn at random (Mitzenmacher 2001)."""

    needs_prompt = False

    def __init__(self, workers: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    @override
    def choose(self, loads: Sequence[WorkerLoad], prompt: bytes) -> int:
        if len(loads) == 1:
            return 0
        one, other = self._rng.choice(len(loads), 2, replace=False).tolist()
        return int(one if loads[one].requests <= loads[other].requests else other)


class CacheAware(Chooser):
    """The worker that has seen the longest part of the prompt, unless the load is out of balance (sgl-router's rule).

    Out of balance means: the most loaded worker has more than `BALANCE_ABS_THRESHOLD` requests more, and more than
    `BALANCE_REL_THRESHOLD` times as many, as the least loaded one; then that one is taken. In balance the best match is
    taken if it covers more than `CACHE_THRESHOLD` of the prompt, else the least loaded worker.

    What a worker has seen is remembered as chained digests of blocks, the oldest forgotten first.
    """

    needs_prompt = True

    def __init__(self, workers: int, seed: int) -> None:
        self._seen: list[dict[bytes, None]] = [{} for _ in range(workers)]

    @override
    def choose(self, loads: Sequence[WorkerLoad], prompt: bytes) -> int:
        chain = _chain(prompt)
        chosen = self._pick(loads, chain)
        seen = self._seen[chosen]
        for link in chain:
            seen.pop(link, None)
            seen[link] = None
        while len(seen) > MAX_BLOCKS_PER_WORKER:
            del seen[next(iter(seen))]
        return chosen

    def _pick(self, loads: Sequence[WorkerLoad], chain: list[bytes]) -> int:
        counts = [load.requests for load in loads]
        least, most = min(counts), max(counts)
        idlest = counts.index(least)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            return idlest
        matches = [_covered(chain, seen) for seen in self._seen]
        best = max(range(len(loads)), key=lambda i: (matches[i], -counts[i]))
        return best if chain and matches[best] > CACHE_THRESHOLD * len(chain) else idlest


def _chain(prompt: bytes) -> list[bytes]:
    """One digest per whole block; equal digests mean an equal prompt up to there."""
    chain, link = [], b""
    for start in range(0, len(prompt) - MATCH_BLOCK_BYTES + 1, MATCH_BLOCK_BYTES):
        link = blake2b(link + prompt[start : start + MATCH_BLOCK_BYTES], digest_size=8).digest()
        chain.append(link)
    return chain


def _covered(chain: list[bytes], seen: dict[bytes, None]) -> int:
    """How many links from the front are known."""
    for count, link in enumerate(chain):
        if link not in seen:
            return count
    return len(chain)


CHOOSERS: dict[str, Callable[[int, int], Chooser]] = {
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "least_load": LeastLoad,
    "cache_aware": CacheAware,
}


def make_chooser(name: str, workers: int, seed: int = 0) -> Chooser:
    """The choice function called `name` for `workers` workers. Raises ConfigError with near names if there is none."""
    if name not in CHOOSERS:
        near = difflib.get_close_matches(name, CHOOSERS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(CHOOSERS))}"
        raise ConfigError(f"there is no router policy {name!r}; {hint}")
    return CHOOSERS[name](workers, seed)
