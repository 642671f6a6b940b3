"""Eviction policies of one's own: what cached KV is worth, in place of the value of `--radix-eviction-policy reuse`."""

import math
from dataclasses import dataclass

from tokenyard.base import ConfigError
from tokenyard.policy.priority_function import load_object
from tokenyard.policy.views import SessionState

FLAG = "--radix-eviction-policy"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix in the cache whose end may be evicted.

    tokens: from the beginning of the prompt to its end.
    idle_s: seconds since it was last used.
    hits: admissions that used its end.
    priority: the highest priority of its requests.
    recompute_s: seconds to compute its last token again.
    returns_per_s: how often its end is expected to be used, by the gaps seen so far (`ReturnTimes.index`).
    sessions: copies of the sessions whose latest prompt ends here.
    now: ns.
    """

    tokens: int
    idle_s: float
    hits: int
    priority: int
    recompute_s: float
    returns_per_s: float
    sessions: tuple[SessionState, ...]
    now: int


class EvictionValue:
    """What `--radix-eviction-policy my_pkg:MyValue` names; this one is the value of "reuse"."""

    def value(self, prefix: CachedPrefix) -> float:
        """What it is worth to keep the end of `prefix`; a finite number. The lowest is evicted first."""
        return prefix.returns_per_s * prefix.recompute_s


class GuardedValue:
    """Answers of a user's `EvictionValue` as long as they are valid, then those of "reuse".

    failure: what was wrong, "" for nothing.
    """

    def __init__(self, inner: EvictionValue, path: str) -> None:
        self._inner = inner
        self._path = path
        self.failure = ""

    def value(self, prefix: CachedPrefix) -> float:
        """The value of `inner`, or of `EvictionValue` once that has raised or returned anything but a finite number."""
        if not self.failure:
            try:
                found = float(self._inner.value(prefix))
                if math.isfinite(found):
                    return found
                self.failure = f"{self._path} failed: value returned {found}"
            except Exception as error:
                self.failure = f"{self._path} failed: it raised {error!r}"
        return EvictionValue().value(prefix)


def load_eviction_value(path: str) -> GuardedValue | None:
    """The guarded value at `my_pkg:MyValue`; None if `path` is the name of a built-in policy.

    Raises ConfigError if it cannot be imported or made, or is no subclass of `EvictionValue`.
    """
    if ":" not in path:
        return None
    found = load_object(path, FLAG)
    if not (isinstance(found, type) and issubclass(found, EvictionValue)):
        raise ConfigError(f"{FLAG} {path}: it is not a subclass of tokenyard.policy.EvictionValue")
    try:
        return GuardedValue(found(), path)
    except Exception as error:
        raise ConfigError(f"{FLAG} {path}: making it failed: {error}") from error
