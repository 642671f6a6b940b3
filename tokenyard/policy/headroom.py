"""How many tokens to hold back at admission, so that running requests can grow to their end."""

from typing import Protocol

import numpy as np

from tokenyard.base import Int32Array, SchedulerSettings
from tokenyard.policy.views import Columns, Views, tokens_generated


class Headroom(Protocol):
    """Foresees the growth of requests. Told what happens, asked at admission."""

    def running_tokens(self, views: Views) -> int:
        """Tokens to hold back for the rows that run already."""

    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        """Tokens to hold back for the answer of a row about to be admitted."""

    def decoded(self) -> None:
        """A decode step was planned without a retraction."""

    def retracted(self, columns: Columns, survivors: Int32Array) -> None:
        """Pages ran out; `survivors` still run."""

    def finished(self, output_tokens: int) -> None:
        """A request ended after so many output tokens."""

    def idle(self) -> None:
        """Nothing is left to do."""


class RatioHeadroom:
    """SGLang's new_token_ratio: hold back a share of the output that running requests may still write.

    The share starts at `init_new_token_ratio * schedule_conservativeness`, falls linearly over
    `new_token_ratio_decay_steps` decode steps, is estimated anew after a retraction and starts over when idle. Answers
    are clipped to `clip_max_new_tokens` (see SGLang's scheduler; reference notes, section 5).
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._initial = min(settings.init_new_token_ratio * settings.schedule_conservativeness, 1.0)
        self._least = self._initial * settings.min_new_token_ratio_factor
        self._decay = (self._initial - self._least) / settings.new_token_ratio_decay_steps
        self.ratio = self._initial

    def running_tokens(self, views: Views) -> int:
        """See `Headroom.running_tokens`."""
        rows = np.concatenate((views.running, views.partial))
        rest = views.columns.limit[rows] + 1 - views.columns.known[rows]
        return int(np.minimum(rest, self._settings.clip_max_new_tokens).sum() * self.ratio)

    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        """See `Headroom.newcomer_tokens`."""
        rest = int(columns.limit[row]) + 1 - int(columns.known[row])
        return min(rest, self._settings.clip_max_new_tokens)

    def decoded(self) -> None:
        """See `Headroom.decoded`."""
        self.ratio = max(self.ratio - self._decay, self._least)

    def retracted(self, columns: Columns, survivors: Int32Array) -> None:
        """See `Headroom.retracted`. The estimate is what survivors have written of what they may write."""
        generated = int(tokens_generated(columns, survivors).sum())
        allowed = int((columns.limit[survivors] + 1 - columns.prompt_tokens[survivors]).sum())
        reserve = self._settings.retract_decode_steps * len(survivors)
        self.ratio = min(1.0, (generated + reserve) / (allowed + 1))

    def finished(self, output_tokens: int) -> None:
        """See `Headroom.finished`; the ratio learns nothing from it."""

    def idle(self) -> None:
        """See `Headroom.idle`."""
        self.ratio = self._initial
