"""Drafts for speculative decoding: guesses of a row's next tokens, and which of them its samples confirm.

A draft is accepted if the row samples the same token at its position, with the noise of that position, so drafts never
change an answer. The drafter here is prompt lookup (Saxena 2023; NGRAM in SGLang, ngram in vLLM): what followed the
last occurrence of the row's latest tokens is likely to follow again. What a client predicts (OpenAI's `prediction`) is
looked up as well, and where a grammar leaves no choice its tokens are the drafts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from tokenyard.base import AcceptanceRate, Int32Array, Int64Array, RowStart, StepPlan

MAX_NGRAM, MIN_NGRAM = 8, 2
"""How many of the latest tokens must occur before; longer matches come first."""

MAX_CANDIDATES_CHECKED = 64
"""Occurrences of the latest tokens that are compared, the latest first, so that no row takes long."""

NO_DRAFTS = np.zeros(0, np.int32)

KeepTo = Callable[[int, Int32Array, int], tuple[Int32Array, bool]]
"""Cuts the drafts of a pool row to its grammar: `GrammarRows.drafts`."""

Choose = Callable[[Any, Int32Array, Int64Array], Any]
"""Chooses tokens by logits, pool rows and positions without a trace: `Sampler.guess`. Logits and tokens are tensors."""


class DraftingRow(Protocol):
    """What every drafter keeps of a row: the epoch of its request."""

    epoch: int


Row = TypeVar("Row", bound=DraftingRow)


class Drafter(Protocol):
    """What fills in drafts and judges them."""

    def take(self, plan: StepPlan) -> None:
        """Take over the rows that start with a plan, whose page writes are applied."""

    def fill_in(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, int32[sum(counts)], with the ids of its drafts."""

    def draft(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array, keep_to: KeepTo, seconds: float
    ) -> tuple[Int32Array, Int32Array]:
        """Take in a step's tokens (int32[sum(accepted)], row after row), which took `seconds`, and say how many drafts
        each row of the plan has for the next, and their chances in thousandths: int32[n] twice. `keep_to` cuts drafts
        to grammars, which have taken in these tokens.
        """


class NgramIndex:
    """The tokens of one row, and what followed when its latest tokens occurred before.

    It knows where each pair of tokens ended last, and of each end where the same pair ended before, so that a token
    costs the same however long the row is. Plain lists, because numpy lets other threads in, which on a busy machine
    keep the interpreter for longer than a scan takes.
    """

    def __init__(self, ids: Int32Array) -> None:
        self._ids: list[int] = []
        self._last: dict[int, int] = {}
        self._earlier: list[int] = []
        self.append(ids.tolist())

    def append(self, tokens: list[int]) -> None:
        """Add tokens at the end."""
        ids, last, earlier = self._ids, self._last, self._earlier
        for token in tokens:
            # The pair before a token is known from then on: something follows it.
            end = len(ids)
            if end >= MIN_NGRAM:
                pair = ids[end - 2] << 32 | ids[end - 1]
                earlier.append(last.get(pair, 0))
                last[pair] = end
            ids.append(token)

    def propose(self, max_drafts: int) -> Int32Array:
        """The `max_drafts` tokens that are likely to follow, none if the latest tokens are new.

        The longest match counts, of equally long ones the latest. A match near the end is continued by its own copy.
        """
        ids, count = self._ids, len(self._ids)
        if count <= MIN_NGRAM:
            return NO_DRAFTS
        end = self._last.get(ids[-2] << 32 | ids[-1], 0)
        best, longest = end, MIN_NGRAM
        for _ in range(MAX_CANDIDATES_CHECKED):
            if not end or longest >= MAX_NGRAM:
                break
            matched = self._matched(end, longest)
            if matched > longest:
                best, longest = end, matched
            end = self._earlier[end - MIN_NGRAM]
        if not best:
            return NO_DRAFTS
        following = np.array(ids[best : best + max_drafts], np.int32)
        return np.resize(following, max_drafts) if len(following) < max_drafts else following

    def _matched(self, end: int, longest: int) -> int:
        """How many tokens before `end` are the row's latest ones, at most MAX_NGRAM; less than that does not count
        if it is no more than `longest`.
        """
        ids, count = self._ids, len(self._ids)
        if end <= longest or ids[end - 1 - longest] != ids[count - 1 - longest]:
            return 0
        matched = MIN_NGRAM
        while matched < min(MAX_NGRAM, end) and ids[end - 1 - matched] == ids[count - 1 - matched]:
            matched += 1
        return matched


@dataclass(slots=True)
class _Row:
    """A row that drafts. `epoch` is the request's, which a result must have to be of this row's answer. `forced`: the
    row's grammar forces the first of its drafts; such drafts have a record of their own.
    """

    epoch: int
    lookup: NgramIndex
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    record: AcceptanceRate = field(default_factory=AcceptanceRate)
    jump_forward_record: AcceptanceRate = field(default_factory=AcceptanceRate)
    forced: bool = False

    def judge(self) -> AcceptanceRate:
        """The record of drafts such as it has."""
        return self.jump_forward_record if self.forced else self.record


class NgramDrafter:
    """Drafts up to `max_drafts` tokens for each row, by prompt lookup. Rows with log-probabilities have none."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._rows: dict[int, _Row] = {}

    def take(self, plan: StepPlan) -> None:
        """Take over the rows that start with a plan."""
        for start in plan.row_starts:
            self._rows.pop(start.pool_row, None)
            # A step of a calibration hands out rows without work; they draft nothing.
            place = np.flatnonzero(plan.pool_rows == start.pool_row)
            if start.logprobs is None and len(place):
                self._rows[start.pool_row] = _Row(int(plan.epochs[place[0]]), NgramIndex(_corpus(start)))

    def fill_in(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, int32[sum(counts)], with the ids of its drafts."""
        tokens = plan.tokens.copy()
        ends = np.cumsum(plan.counts)
        for place in range(plan.decode_rows, plan.chunks_from):
            count = int(plan.counts[place]) - 1
            drafts = self._rows[int(plan.pool_rows[place])].drafts
            tokens[ends[place] - count : ends[place]] = drafts[:count]
        return tokens

    def draft(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array, keep_to: KeepTo, seconds: float
    ) -> tuple[Int32Array, Int32Array]:
        """Take in a step's tokens and look up drafts for the next; see `Drafter`. They take no time worth measuring."""
        drafted, chances = np.zeros((2, len(accepted)), np.int32)
        for place, pool_row, row, run in sampled_runs(self._rows, plan, tokens, accepted):
            if len(row.drafts):
                row.judge().observe(*count_accepted(row.drafts, run))
            row.lookup.append(run.tolist())
            row.drafts, row.forced = keep_to(pool_row, row.lookup.propose(self._max_drafts), self._max_drafts)
            drafted[place], chances[place] = len(row.drafts), row.judge().chance
        return drafted, chances


def sampled_runs(
    rows: Mapping[int, Row], plan: StepPlan, tokens: Int32Array, accepted: Int32Array
) -> Iterator[tuple[int, int, Row, Int32Array]]:
    """The rows of a plan that sampled something, of those that draft (`rows` by pool row): (place in the plan, pool
    row, row, sampled tokens). A result of an earlier request in the same pool row is left out.

    tokens: int32[sum(accepted)], what the rows sampled. accepted: int32[n], how many tokens each.
    """
    ends = np.cumsum(accepted)
    columns = zip(plan.pool_rows.tolist(), plan.epochs.tolist(), accepted.tolist(), ends.tolist(), strict=True)
    for place, (pool_row, epoch, count, end) in enumerate(columns):
        row = rows.get(pool_row)
        if row is not None and row.epoch == epoch and count:
            yield place, pool_row, row, tokens[end - count : end]


def count_accepted(drafts: Int32Array, tokens: Int32Array) -> tuple[int, bool]:
    """How many of a row's drafts (int32[m]) were right before the first wrong one, and whether one was wrong, by what
    it sampled (int32[n]).
    """
    count = min(len(drafts), len(tokens))
    wrong = np.flatnonzero(drafts[:count] != tokens[:count])
    return (int(wrong[0]), True) if len(wrong) else (count, False)


def drafts_to_verify(plan: StepPlan, inputs: Int32Array) -> Int32Array:
    """The draft that each sample of a plan must confirm, int32[sum(samples)]; -1 for a row's last sample.

    inputs: int32[sum(counts)], the plan's tokens with the ids of drafts.
    """
    samples = plan.samples.astype(np.int64)
    ends = np.cumsum(plan.counts, dtype=np.int64)
    # The draft after a sampled position is the next input. Index among all samples plus a constant per row.
    following = np.arange(1, int(samples.sum()) + 1) + np.repeat(ends - np.cumsum(samples), samples)
    drafts = np.append(inputs, -1)[following]
    drafts[np.cumsum(samples)[samples > 0] - 1] = -1
    return drafts


def accepted_runs(plan: StepPlan, inputs: Int32Array, sampled: Int32Array) -> tuple[Int32Array, Int32Array]:
    """What each row yields of its samples: those that confirm its drafts, and the sample after them.

    inputs: int32[sum(counts)], the plan's tokens with the ids of drafts. sampled: int32[sum(samples)]. Returns the
    tokens, int32[sum(accepted)], and `accepted`, int32[n].
    """
    if not plan.verify_rows:
        return sampled.astype(np.int32, copy=False), plan.samples
    samples = plan.samples.astype(np.int64)
    firsts = np.cumsum(samples) - samples
    place = np.arange(len(sampled)) - np.repeat(firsts, samples)
    accepted, rows = samples.copy(), np.flatnonzero(samples)
    if len(rows):
        # A row's last sample confirms nothing, so that the first "refused" one is always there.
        refused = sampled != drafts_to_verify(plan, inputs)
        until = np.where(refused, place + 1, np.repeat(samples, samples))
        accepted[rows] = np.minimum.reduceat(until, firsts[rows])
    kept = place < np.repeat(accepted, samples)
    return sampled[kept].astype(np.int32), accepted.astype(np.int32)


def _corpus(start: RowStart) -> Int32Array:
    """What is looked up: the tokens known so far, and before them what is predicted, behind the prompt's end, so that
    an answer that begins as predicted finds the prediction with its first token.
    """
    if not len(start.prediction):
        return start.known_ids
    prompt = start.known_ids[: start.prompt_tokens]
    return np.concatenate((prompt[-MAX_NGRAM:], start.prediction, start.known_ids))
