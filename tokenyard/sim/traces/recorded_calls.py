"""Sessions from calls that were recorded one by one, with their times: what each waited for, and the gaps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenyard.base import Int64Array
from tokenyard.sim.traces.sessions import SessionRecord, Turn, check_turn

MAX_TOKENS = 1 << 20


@dataclass(slots=True)
class RecordedCall:
    """One call of a session."""

    where: str
    """File and line, for error messages."""
    session: str
    """The name of its session."""
    begin_s: float
    """When it was sent."""
    end_s: float
    """When its answer ended; `begin_s` if that was not recorded."""
    turn: Turn
    """The call without `after` and `gap_s`, which are set from the times."""
    tenant: str = ""
    """Its tenant."""


def sessions_of(calls: Sequence[RecordedCall]) -> list[SessionRecord]:
    """The sessions of `calls`, in order of their first call.

    A call waits for the calls of its session that had ended when it was sent and that no call before it waited for; if
    there is none, for the one that ended last. So calls at the same time fork, and what follows all of them joins.
    Raises ConfigError for a length out of range.
    """
    by_session: dict[str, list[RecordedCall]] = {}
    for call in sorted(calls, key=lambda call: (call.begin_s, call.end_s)):
        check_turn(call.turn, call.where, MAX_TOKENS)
        by_session.setdefault(call.session, []).append(call)
    return [_session(name, mine) for name, mine in by_session.items()]


def _session(name: str, calls: Sequence[RecordedCall]) -> SessionRecord:
    free: list[int] = []
    for index, call in enumerate(calls):
        ended = [place for place in range(index) if calls[place].end_s <= call.begin_s]
        after = [place for place in free if place in ended] or ended[-1:]
        if after:
            call.turn.after = tuple(after)
            call.turn.gap_s = call.begin_s - max(calls[place].end_s for place in after)
        else:
            call.turn.gap_s = call.begin_s - calls[0].begin_s
        free = [place for place in free if place not in after] + [index]
    return SessionRecord(name, [call.turn for call in calls], calls[0].begin_s, calls[0].tenant)


@dataclass(slots=True)
class GrowingPrompts:
    """Runs of blocks of one token for prompts of which only the lengths are known.

    A prompt that is at least as long as the one before it in the same conversation begins with it. A shorter one has
    nothing in common with it: the context was compacted.
    """

    begins: dict[str, int] = field(default_factory=dict)
    """The first block of each conversation's present context."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of its last prompt."""
    used: int = 0
    """Blocks that are taken."""

    def runs(self, conversation: str, tokens: int) -> Int64Array:
        """int64[1, 2], the prompt of the next call of `conversation`."""
        if tokens < self.lengths.get(conversation, 1 << 62):
            self.begins[conversation] = self.used
            self.used += MAX_TOKENS
        self.lengths[conversation] = tokens
        return np.array([[self.begins[conversation], tokens]], np.int64)


GUESSED_PREFIXES = "prompts whose content is unknown are taken to begin with the prompt before them in their session"
