"""Speculative decoding in the simulator: an acceptance model as data, and the executor's side of it.

Each output token of a request has a mark: whether there is a draft for it, and whether that draft is right if those
    before it are. Marks are drawn from rates, or taken from the answers on a tape. The scheduler chooses how many
    drafts a step verifies, with the same code as in a server. The chances that it uses come from the record that an
    executor keeps (`base.AcceptanceRate`).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenyard.base import AcceptanceRate, ConfigError, Float64Array, Int32Array, Int64Array, StepPlan, StepResult
from tokenyard.sim.traces.prompt_ids import VOCAB_SIZE, stream_tokens

Int8Array = npt.NDArray[np.int8]

NO_DRAFT, WRONG, RIGHT = 0, 1, 2
"""Marks of an output token: there is no draft for it, the draft is wrong, or it is right."""

RIGHT_STREAM, COVERED_STREAM = 5 << 40, 6 << 40
"""Streams of `stream_tokens` for draws, far from those of prompts and answers."""


class AcceptanceTrace(Protocol):
    """The marks of all requests."""

    def at(self, numbers: Int64Array, indices: Int64Array) -> Int8Array:
        """Marks of output tokens `indices` of requests `numbers`, two arrays of one shape."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafts that a simulated engine has.

    tokens: most drafts per step of a request.
    acceptance: range of the chance that a draft is right if those before it are; each request draws its own uniformly.
    coverage: share of output tokens that have a draft.
    recorded: marks of earlier answers (int8[m] each, from the second output token on), used instead of the rates.
        Requests take these answers in turn.
    draft_s: seconds that the device needs for the drafts of a step, as for a draft model.
    """

    tokens: int
    acceptance: tuple[float, float] = (0.7, 0.7)
    coverage: float = 1.0
    recorded: tuple[Int8Array, ...] = ()
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of range."""
        low, high = self.acceptance
        if not 1 <= self.tokens <= 64:
            raise ConfigError(f"--speculative-num-draft-tokens is {self.tokens}; it must be from 1 to 64")
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(f"--draft-acceptance is {low:g}-{high:g}; it must be shares from 0 to 1, the lower first")
        if not 0.0 <= self.coverage <= 1.0:
            raise ConfigError(f"--draft-coverage is {self.coverage:g}; it must be a share from 0 to 1")
        if not 0.0 <= self.draft_s < 1e3:
            raise ConfigError(f"--draft-ms is {1e3 * self.draft_s:g}; it must be from 0 to 1e6")

    def marks(self, requests: int, seed: int) -> AcceptanceTrace:
        """The marks of a workload of `requests` requests."""
        if self.recorded:
            return RecordedMarks(self.recorded)
        low, high = self.acceptance
        return DrawnMarks(np.random.default_rng(seed).uniform(low, high, requests), self.coverage)


class DrawnMarks:
    """Marks drawn per token: request i has drafts for a share `coverage` of its tokens, of which a share `right[i]` is
    right.
    """

    def __init__(self, right: Float64Array, coverage: float) -> None:
        self._right, self._coverage = right, coverage

    def at(self, numbers: Int64Array, indices: Int64Array) -> Int8Array:
        """See `AcceptanceTrace.at`."""
        right = stream_tokens(RIGHT_STREAM + numbers, indices) < self._right[numbers] * VOCAB_SIZE
        marks = np.where(right, RIGHT, WRONG)
        if self._coverage < 1.0:
            marks[stream_tokens(COVERED_STREAM + numbers, indices) >= self._coverage * VOCAB_SIZE] = NO_DRAFT
        return marks.astype(np.int8)


class RecordedMarks:
    """Marks of earlier answers, each int8[m] with m at least 1."""

    def __init__(self, recorded: tuple[Int8Array, ...]) -> None:
        self._marks = np.concatenate(recorded)
        self._lengths = np.array([len(one) for one in recorded], np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def at(self, numbers: Int64Array, indices: Int64Array) -> Int8Array:
        """See `AcceptanceTrace.at`."""
        answers = numbers % len(self._lengths)
        found: Int8Array = self._marks[self._begins[answers] + np.maximum(indices - 1, 0) % self._lengths[answers]]
        return found


class SimDrafter:
    """Drafts for the rows of a simulated executor: how many are ready per row, how many of them are right, and the
    record.
    """

    def __init__(self, speculation: Speculation, marks: AcceptanceTrace, pool_rows: int) -> None:
        self._marks, self._ahead = marks, np.arange(speculation.tokens, dtype=np.int64)
        self._draft_s = speculation.draft_s
        self._ready = np.zeros(pool_rows, np.int64)
        self._right = np.zeros(pool_rows, np.int64)
        self._records = [AcceptanceRate() for _ in range(pool_rows)]

    def start(self, pool_row: int) -> None:
        """Reset the record of a pool row for a new request."""
        self._ready[pool_row] = self._right[pool_row] = 0
        self._records[pool_row] = AcceptanceRate()

    def accepted(self, plan: StepPlan) -> Int32Array:
        """Number of tokens that each row of a plan yields: int32[n]."""
        accepted = plan.samples.copy()
        verify = slice(plan.decode_rows, plan.chunks_from)
        right = self._right[plan.pool_rows[verify]]
        accepted[verify] = 1 + np.minimum(plan.counts[verify] - 1, right)
        return accepted

    def draft(
        self, plan: StepPlan, accepted: Int32Array, numbers: Int64Array, prompt_tokens: Int64Array
    ) -> tuple[Int32Array, Int32Array, float]:
        """Record the tokens that the rows of a plan yield (int32[n]) and draft for their next steps.

        numbers, prompt_tokens: int64[n], of the rows' requests.

        Returns the number of drafts per row and their chances in thousandths, both int32[n], and the seconds that
        drafting takes.
        """
        drafted, chances = np.zeros((2, len(accepted)), np.int32)
        places = np.flatnonzero(accepted)
        rows, tokens = plan.pool_rows[places], accepted[places]
        records = [self._records[row] for row in rows.tolist()]
        compared = np.minimum(self._ready[rows], tokens)
        right = np.minimum(self._right[rows], compared)
        for record, count, refused in zip(records, right.tolist(), (right < compared).tolist(), strict=True):
            record.observe(count, refused)
        next_index = (plan.starts + plan.counts - plan.samples)[places] + tokens + 1 - prompt_tokens[places]
        marks = self._marks.at(*np.broadcast_arrays(numbers[places][:, None], next_index[:, None] + self._ahead))
        self._ready[rows] = drafted[places] = (marks != NO_DRAFT).cumprod(axis=1).sum(axis=1)
        self._right[rows] = (marks == RIGHT).cumprod(axis=1).sum(axis=1)
        chances[places] = [record.chance for record in records]
        return drafted, chances, self._draft_s if drafted.any() else 0.0


class MarksOnTape:
    """Collects the marks of answers from the steps on a tape.

    For a token whose draft was not verified, it is unknown whether the draft was right. Its mark is drawn with the
    chance that the executor reported at the time. A retracted request counts as two answers.
    """

    def __init__(self) -> None:
        self._max_drafts = 0
        self._answers: list[list[int]] = []
        self._open: dict[int, list[int]] = {}
        self._ready: dict[int, tuple[int, int]] = {}
        self._rng = np.random.default_rng(0)

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Record a step: first the tokens that its rows yielded, then the drafts for their next steps."""
        for start in plan.row_starts:
            self._open[start.pool_row] = []
            self._answers.append(self._open[start.pool_row])
            self._ready[start.pool_row] = (0, 0)
        if result.drafted is None:
            return
        accepted = plan.samples if result.accepted is None else result.accepted
        chances = np.zeros_like(result.drafted) if result.chances is None else result.chances
        columns = (plan.pool_rows, plan.counts, accepted, result.drafted, chances)
        for place, (row, count, tokens, drafted, chance) in enumerate(
            zip(*map(np.ndarray.tolist, columns), strict=True)
        ):
            if row not in self._open:
                # The tape starts in the middle of this answer.
                continue
            if place < plan.chunks_from:
                self._open[row] += self._marks(count - 1, tokens, *self._ready[row])
            self._ready[row] = (drafted, chance)
            self._max_drafts = max(self._max_drafts, drafted)

    def _marks(self, verified: int, tokens: int, ready: int, chance: int) -> list[int]:
        """The marks of the `tokens` tokens of a row that verified `verified` of its `ready` drafts."""
        found = [RIGHT] * (tokens - 1)
        if tokens <= verified:
            return [*found, WRONG]
        if verified == ready < self._max_drafts:
            return [*found, NO_DRAFT]
        return [*found, RIGHT if self._rng.random() * 1000 < chance else WRONG]

    def speculation(self) -> Speculation | None:
        """The drafts recorded on the tape; None if there were none."""
        recorded = tuple(np.array(marks, np.int8) for marks in self._answers if marks)
        return Speculation(self._max_drafts, recorded=recorded) if self._max_drafts and recorded else None
