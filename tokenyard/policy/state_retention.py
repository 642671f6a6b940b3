"""Which prefixes of a model with recurrent states keep a checkpoint: `--mamba-retention-policy`.

A checkpoint is large, as large as the KV of some thousand tokens, so most prefixes cannot have one.

- `last` is what vLLM does with `--mamba-cache-mode align`: the end of a prompt and of an answer, least recently used
  first out. A prefix that prompts have in common gets none.
- `per-path` is SGLang's `--mamba-max-states-per-path`: also where a prompt branches off from others; on each path of
  the tree only the deepest few stay, and those where the path forks.
- `worth` ranks each checkpoint by the tokens that a hit saves, compared with the checkpoint before it, times the chance
  of a hit. The chance is learned from the gaps between uses, for each kind of checkpoint. KV is evicted by the same
  worth: first what no checkpoint makes usable.

Bounds. None delays a row, and none evicts while a slot is free. A checkpoint that was not used for longer than all
others is evicted by `last` and `per-path` before any other, and by `worth` once it was unused for `MAX_IDLE_NS`, so no
checkpoint stays for ever.
"""

import numpy as np

from tokenyard.base import NS_PER_S, ConfigError, Float64Array, Int32Array, SchedulerSettings
from tokenyard.cache.state_checkpoints import ANSWER, BRANCH, PROMPT, SPACED, StateCheckpoints, StateRetention
from tokenyard.policy.return_times import ReturnTimes

SPACING_TOKENS = 4096
"""Tokens of a long prompt between two checkpoints that `worth` saves while there is room, rounded up to pages."""

MAX_IDLE_NS = 3600 * NS_PER_S
_KINDS = 4


class LastState(StateRetention):
    """The end of a prompt and of an answer, least recently used first out."""

    ranks_kv = False

    def positions(self, start: int, end: int, branch: int, last: int, roomy: bool) -> list[tuple[int, int]]:
        """See StateRetention."""
        return [(last, PROMPT)] if start < last <= end else []

    def values(self, states: StateCheckpoints, slots: Int32Array, per_byte: bool) -> Float64Array:
        """All are worth the same."""
        return np.zeros(len(slots))

    def excess(self, states: StateCheckpoints, slot: int) -> list[int]:
        """None."""
        return []

    def hit(self, states: StateCheckpoints, slot: int) -> None:
        """Nothing is learned."""

    def lost(self, states: StateCheckpoints, slot: int) -> None:
        """Nothing is learned."""


class StatesPerPath(LastState):
    """Branches too, and at most `most` on each path, not counting those where the path forks; -1 for any number."""

    def __init__(self, most: int) -> None:
        self._most = most

    def positions(self, start: int, end: int, branch: int, last: int, roomy: bool) -> list[tuple[int, int]]:
        """See StateRetention."""
        wanted = {branch: BRANCH, last: PROMPT}
        return [(position, wanted[position]) for position in sorted(wanted) if start < position <= end]

    def excess(self, states: StateCheckpoints, slot: int) -> list[int]:
        """The shallowest ones of the path beyond the limit."""
        path, step = [], int(states.before[slot])
        while step:
            if not states.forks(step):
                path.append(step)
            step = int(states.before[step])
        left, found = len(path) + 1 - self._most, []
        for one in reversed(path) if self._most > 0 else ():
            if left <= 0:
                break
            if not states.users[states.page[one]]:
                found.append(one)
                left -= 1
        return found


class WorthOfStates(StatesPerPath):
    """By the tokens that a hit is expected to save per second of keeping a checkpoint."""

    ranks_kv = True

    def __init__(self, unit: int = 1) -> None:
        """unit: checkpoints lie after multiples of so many tokens."""
        super().__init__(-1)
        self._spacing = -(-SPACING_TOKENS // unit) * unit
        # By kind, whether a deeper checkpoint follows, and whether it was hit before.
        # A prompt that continues another one continues at the deeper checkpoint, unless it was seen to branch off.
        self._returns = ReturnTimes(4 * _KINDS, rare=[4 * kind + 2 for kind in (PROMPT, ANSWER, SPACED)])

    def positions(self, start: int, end: int, branch: int, last: int, roomy: bool) -> list[tuple[int, int]]:
        """See StateRetention."""
        found = dict(super().positions(start, end, branch, last, roomy))
        if roomy:
            for position in range((start // self._spacing + 1) * self._spacing, end + 1, self._spacing):
                found.setdefault(position, SPACED)
        return sorted(found.items())

    def values(self, states: StateCheckpoints, slots: Int32Array, per_byte: bool) -> Float64Array:
        """Expected tokens saved per second, per slot or per token of KV that is freed with it."""
        idle = states.now - states.used_ns[slots]
        kinds = self._classes(states, slots)
        rates = np.where(idle <= MAX_IDLE_NS, self._returns.index(kinds, idle), 0.0)
        saved = np.maximum(states.saved[slots], 1)
        if not per_byte:
            return rates * saved
        # KV behind the last checkpoint of a path is of no use.
        freed = np.where(kinds & 2, 0, saved) + states.slot_tokens
        found: Float64Array = rates * saved / np.maximum(freed, 1)
        return found

    def hit(self, states: StateCheckpoints, slot: int) -> None:
        """Learn from the gap since its last use."""
        self._returns.came_back(*self._gap(states, slot))

    def lost(self, states: StateCheckpoints, slot: int) -> None:
        """Learn that it was not used for so long."""
        self._returns.lost(*self._gap(states, slot))

    def _gap(self, states: StateCheckpoints, slot: int) -> tuple[int, int]:
        kind = self._classes(states, np.array([slot], np.int32))[0]
        return int(kind), states.now - int(states.used_ns[slot])

    def _classes(self, states: StateCheckpoints, slots: Int32Array) -> Int32Array:
        inner = np.zeros(states.num_slots + 2, np.bool_)
        inner[states.before] = True
        inner[0] = False
        found: Int32Array = (4 * states.kind[slots] + 2 * inner[slots] + (states.hits[slots] > 0)).astype(np.int32)
        return found


STATE_RETENTIONS = ("last", "per-path", "worth")


def create_state_retention(settings: SchedulerSettings) -> StateRetention:
    """The policy of `--mamba-retention-policy`. Raises ConfigError for an unknown name."""
    name = settings.mamba_retention_policy
    if name == "last":
        return LastState()
    if name == "per-path":
        return StatesPerPath(settings.mamba_max_states_per_path)
    if name == "worth":
        return WorthOfStates(settings.checkpoint_unit)
    raise ConfigError(f"--mamba-retention-policy is {name!r}; it must be one of {', '.join(STATE_RETENTIONS)}")
