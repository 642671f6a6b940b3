"""How many tokens admission holds back, so that running requests can grow to their end."""

from collections import deque
from typing import Protocol

import numpy as np
from typing_extensions import override

from tokenyard.base import ConfigError, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.views import Columns, Views, tokens_generated

MAX_OUTPUTS_KEPT = 1000
DEFAULT_OUTPUT_TOKENS = 200
POOL_SHARE = 0.97
"""Past-Future admission fills the pool no further than this, as its forecast is a sample."""

GOLDEN_STEP = 0.6180339887498949
"""Fractional part of the golden ratio: the fractional parts of its multiples spread evenly over the unit interval."""


class Headroom(Protocol):
    """Predicts the growth of requests. The scheduler calls the hooks below as requests progress.

    ratio: the share of the output tokens still allowed that is held back; 0 for methods without such a share.
    needs_shared: whether it reads the column `shared`.
    """

    ratio: float
    needs_shared: bool

    def running_tokens(self, views: Views) -> int:
        """Tokens to hold back for the running rows. Called at the start of a step's admission."""

    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        """Tokens to hold back for the answer of a row about to be admitted."""

    def admitted(self, columns: Columns, row: int) -> None:
        """The row was admitted; later newcomers of this step come on top of it."""

    def decoded(self) -> None:
        """A decode step was planned without a retraction."""

    def retracted(self, columns: Columns, survivors: Int32Array) -> None:
        """Pages ran out; `survivors` still run."""

    def finished(self, output_tokens: int) -> None:
        """A request ended after `output_tokens` output tokens."""

    def idle(self) -> None:
        """No request is left."""


class NoHeadroom(Headroom):
    """Hold nothing back, as vLLM does: a request that does not fit later is retracted and computed again."""

    ratio = 0.0
    needs_shared = False

    @override
    def running_tokens(self, views: Views) -> int:
        return 0

    @override
    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        return 0

    @override
    def admitted(self, columns: Columns, row: int) -> None:
        pass

    @override
    def decoded(self) -> None:
        pass

    @override
    def retracted(self, columns: Columns, survivors: Int32Array) -> None:
        pass

    @override
    def finished(self, output_tokens: int) -> None:
        pass

    @override
    def idle(self) -> None:
        pass


class RatioHeadroom(NoHeadroom):
    """SGLang's new_token_ratio: hold back a share of the output that running requests may still write.

    The share starts at `init_new_token_ratio * schedule_conservativeness`, falls linearly over
    `new_token_ratio_decay_steps` decode steps, is estimated again after a retraction and starts over when idle. Answers
    are clipped to `clip_max_new_tokens` (as in SGLang's scheduler).
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._initial = min(settings.init_new_token_ratio * settings.schedule_conservativeness, 1.0)
        self._min_ratio = self._initial * settings.min_new_token_ratio_factor
        self._decay = (self._initial - self._min_ratio) / settings.new_token_ratio_decay_steps
        self.ratio = self._initial

    @override
    def running_tokens(self, views: Views) -> int:
        rows = np.concatenate((views.running, views.prefilling))
        rest = views.columns.limit[rows] + 1 - views.columns.known[rows]
        return int(np.minimum(rest, self._settings.clip_max_new_tokens).sum() * self.ratio)

    @override
    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        rest = int(columns.limit[row]) + 1 - int(columns.known[row])
        return min(rest, self._settings.clip_max_new_tokens)

    @override
    def decoded(self) -> None:
        self.ratio = max(self.ratio - self._decay, self._min_ratio)

    @override
    def retracted(self, columns: Columns, survivors: Int32Array) -> None:
        """The new ratio is the share of their allowed output tokens that the survivors have written."""
        generated = int(tokens_generated(columns, survivors).sum())
        allowed = int((columns.limit[survivors] + 1 - columns.prompt_tokens[survivors]).sum())
        reserve = self._settings.retract_decode_steps * len(survivors)
        self.ratio = min(1.0, (generated + reserve) / (allowed + 1))

    @override
    def idle(self) -> None:
        self.ratio = self._initial


class HistoryHeadroom(NoHeadroom):
    """Hold back the mean residual length E[o^2] / (2 E[o]) of past outputs for every decoding row and newcomer.

    A request in the middle of its answer has that many tokens left on average (renewal theory), for any distribution of
    lengths. The last `MAX_OUTPUTS_KEPT` outputs count; before the first one, `DEFAULT_OUTPUT_TOKENS` is assumed. No row
    is predicted to grow beyond its own limit.
    """

    def __init__(self) -> None:
        self._outputs: deque[int] = deque()
        self._sum = 0
        self._sum_of_squares = 0

    @property
    def residual_tokens(self) -> int:
        """Tokens that an answer has left on average."""
        return self._sum_of_squares // (2 * self._sum) if self._sum else DEFAULT_OUTPUT_TOKENS

    @override
    def running_tokens(self, views: Views) -> int:
        rest = views.columns.limit[views.running] + 1 - views.columns.known[views.running]
        return int(np.minimum(rest, self.residual_tokens).sum())

    @override
    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        return min(int(columns.limit[row]) + 1 - int(columns.known[row]), self.residual_tokens)

    @override
    def finished(self, output_tokens: int) -> None:
        self._outputs.append(output_tokens)
        self._sum += output_tokens
        self._sum_of_squares += output_tokens**2
        if len(self._outputs) > MAX_OUTPUTS_KEPT:
            oldest = self._outputs.popleft()
            self._sum -= oldest
            self._sum_of_squares -= oldest**2


class PastFutureHeadroom(NoHeadroom):
    """Admit by the predicted peak of memory (Past-Future scheduler, Gong et al. 2025).

    Each row's output length is a draw from past outputs longer than what it has written; the draw is a fixed quantile
    for each request, so that its forecast stays the same from step to step. With rows sorted by what remains, longest
    first, the memory when the i-th ends is what the first i hold plus i times its remainder; the largest of these is
    the peak. Held back are the peak minus what is held now, and the share of the pool beyond `POOL_SHARE`.
    """

    def __init__(self) -> None:
        self._outputs: deque[int] = deque(maxlen=MAX_OUTPUTS_KEPT)
        self._sorted: Int64Array | None = None
        self._held = np.empty(0, np.int64)
        self._rest = np.empty(0, np.int64)
        self._growth = 0

    @override
    def running_tokens(self, views: Views) -> int:
        rows = np.concatenate((views.running, views.prefilling))
        self._held = np.maximum(views.columns.target[rows], views.columns.known[rows]).astype(np.int64)
        self._rest = self._remaining(views.columns, rows)
        self._growth = _growth_to_peak(self._held, self._rest)
        return self._growth + int((1.0 - POOL_SHARE) * views.total_tokens)

    @override
    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        """Below 0 if the newcomer ends before the peak of the others."""
        return _growth_to_peak(*self._with(columns, row)) - self._growth

    @override
    def admitted(self, columns: Columns, row: int) -> None:
        self._held, self._rest = self._with(columns, row)
        self._growth = _growth_to_peak(self._held, self._rest)

    @override
    def finished(self, output_tokens: int) -> None:
        self._outputs.append(output_tokens)
        self._sorted = None

    def _with(self, columns: Columns, row: int) -> tuple[Int64Array, Int64Array]:
        rest = self._remaining(columns, np.array([row], np.int32))
        return np.append(self._held, int(columns.target[row])), np.concatenate((self._rest, rest))

    def _remaining(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Output tokens that each row is predicted to write still, int64[len(rows)]."""
        written = tokens_generated(columns, rows).astype(np.int64)
        limit = (columns.limit[rows] + 1 - columns.known[rows]).astype(np.int64)
        if self._sorted is None:
            self._sorted = np.array(sorted(self._outputs) or [DEFAULT_OUTPUT_TOKENS], np.int64)
        longer = np.searchsorted(self._sorted, written, side="right")
        candidates = len(self._sorted) - longer
        quantile = columns.seq[rows] * GOLDEN_STEP % 1.0
        drawn = self._sorted[np.minimum(longer + (quantile * candidates).astype(np.int64), len(self._sorted) - 1)]
        # A request that is longer than all recorded outputs is predicted to write as much again.
        rest: Int64Array = np.minimum(np.where(candidates > 0, drawn - written, written), limit)
        return rest


class MaxTokensHeadroom(NoHeadroom):
    """Admit by the peak of the memory if every answer is as long as its max_new_tokens allows: no request is retracted.

    It suits clients that request no more tokens than they need. Decoding rows grow by one token in each step and end in
    the order of what remains. Two things are unknown, and the worst case is assumed for both:

    - When the end of a row gives back what it shares with others: never, as those may last longer.
    - When a prompt that is not computed yet begins to decode: its row may still be there when all others have ended,
      and may have grown as much as the fastest of them.
    """

    needs_shared = True

    def __init__(self, settings: SchedulerSettings) -> None:
        # A row that has nothing left to plan keeps its pages until its last step has committed.
        self._steps_to_end = settings.max_in_flight - 1
        self._running = self._starting = np.empty(0, np.int32)
        self._newcomers: list[int] = []
        self._page_size = 1
        self._growth = self._now = 0

    @override
    def running_tokens(self, views: Views) -> int:
        if views.now != self._now:
            self._now, self._newcomers = views.now, []
        self._page_size, self._running = views.page_size, views.running
        known = {*views.running.tolist(), *views.prefilling.tolist(), *views.loading.tolist()}
        # Asked again in the same step, after a preemption, it counts the rows that this step has admitted.
        self._newcomers = [row for row in self._newcomers if views.columns.held[row]]
        admitted = [row for row in self._newcomers if row not in known]
        self._starting = np.concatenate((views.prefilling, views.loading, np.array(admitted, np.int32)))
        self._growth = self._growth_to_peak(views.columns, self._starting)
        return self._growth

    @override
    def newcomer_tokens(self, columns: Columns, row: int) -> int:
        starting = self._starting if row in self._newcomers else np.append(self._starting, np.int32(row))
        return self._growth_to_peak(columns, starting) - self._growth

    @override
    def admitted(self, columns: Columns, row: int) -> None:
        self._newcomers.append(row)
        self._starting = np.append(self._starting, np.int32(row))
        self._growth = self._growth_to_peak(columns, self._starting)

    def _growth_to_peak(self, columns: Columns, starting: Int32Array) -> int:
        """Tokens by which memory rises above what the running rows and the prompts of `starting` ones take."""
        rows, size = np.concatenate((self._running, starting)), self._page_size
        if not len(rows):
            return 0
        held, shared = columns.held[rows].astype(np.int64), columns.shared[rows]
        start = np.maximum(held, columns.target[rows])
        taken = -(-held // size) * size + start - held - shared
        rest = columns.limit[rows] - start
        lasts = np.arange(len(rows)) >= len(self._running)
        order = np.argsort(-rest, kind="stable")
        # Each row may have a page that is full but for one token.
        own, rest, lasts = (start - shared + size - 1)[order], rest[order], lasts[order]
        growing = np.cumsum(own) + (rest + self._steps_to_end) * np.arange(1, len(rows) + 1)
        growing = np.minimum(growing, np.cumsum(own + rest))
        grown = np.where(lasts, own + rest, 0)
        peak = int((growing + grown.sum() - np.cumsum(grown)).max())
        return max(peak - int(taken.sum()), 0)


def _growth_to_peak(held: Int64Array, rest: Int64Array) -> int:
    """Tokens by which memory rises above what is held now before the last row ends; both arrays by row."""
    if not len(held):
        return 0
    order = np.argsort(-rest, kind="stable")
    at_each_end = np.cumsum(held[order]) + rest[order] * np.arange(1, len(order) + 1)
    return max(int(at_each_end.max()) - int(held.sum()), 0)


def create_headroom(settings: SchedulerSettings) -> Headroom:
    """The method that `settings.headroom` names. Raises ConfigError for an unknown name."""
    if settings.headroom == "ratio":
        return RatioHeadroom(settings)
    if settings.headroom == "limit":
        return MaxTokensHeadroom(settings)
    made: dict[str, type[NoHeadroom]] = {
        "history": HistoryHeadroom,
        "past-future": PastFutureHeadroom,
        "none": NoHeadroom,
    }
    if settings.headroom not in made:
        raise ConfigError(f"--headroom is {settings.headroom!r}; choose one of ratio, limit, {', '.join(made)}")
    return made[settings.headroom]()
