"""Drafts for speculative decoding: proposals for a row's next tokens, and their verification.

A draft is accepted if the row samples the same token at its position, with the noise of that position, so drafts never
change an answer. The drafter here is prompt lookup (Saxena 2023; NGRAM in SGLang, ngram in vLLM): the tokens that
followed an earlier occurrence of the row's latest tokens are likely to follow again. The text that a client predicts
(OpenAI's `prediction`) is searched as well. Where a grammar forces tokens, these are the drafts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from tokenyard.base import AcceptanceRate, Int32Array, Int64Array, RowStart, StepPlan

MAX_NGRAM, MIN_NGRAM = 8, 2
"""The longest and the shortest match of the latest tokens with earlier ones; longer matches win."""

MAX_CANDIDATES_CHECKED = 64
"""The most occurrences that are compared for a row, latest first, to bound the time."""

NO_DRAFTS = np.zeros(0, np.int32)

KeepTo = Callable[[int, Int32Array, int], tuple[Int32Array, bool]]
"""Cuts the drafts of a pool row to its grammar: `GrammarRows.drafts`."""

Hidden = Callable[[int, int], Any]
"""What a step found of some of its tokens: `ModelBackend.hidden`."""

Choose = Callable[[Any, Int32Array, Int64Array], Any]
"""Chooses tokens by logits, pool rows and positions without side effects: `Sampler.guess`."""


class DraftingRow(Protocol):
    """What every drafter keeps for a row: the epoch of its request."""

    epoch: int


Row = TypeVar("Row", bound=DraftingRow)


class Drafter(Protocol):
    """Proposes drafts and observes which are accepted."""

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Compile what drafts need, by runs of these lengths on page 0, which no request owns. Before the first row."""

    def take(self, plan: StepPlan) -> None:
        """Take over the rows that start with a plan, whose page writes are applied."""

    def fill_in(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, int32[sum(counts)], with the ids of its drafts."""

    def computed(self, plan: StepPlan, hidden: Hidden) -> None:
        """Observe what the model found in a step, which `hidden` returns until the next one."""

    def draft(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array, keep_to: KeepTo, seconds: float
    ) -> tuple[Int32Array, Int32Array]:
        """Observe a step's tokens and prepare drafts for the next step.

        tokens: int32[sum(accepted)], row after row.
        accepted: int32[n], tokens of each row of the plan.
        keep_to: cuts drafts to grammars, which have consumed these tokens already.
        seconds: how long the step took.

        Returns how many drafts each row has, and their acceptance rates in thousandths: int32[n] twice.
        """


class NgramIndex:
    """The tokens of one row, indexed by pairs of tokens.

    The index holds where each pair of tokens ended last and, for each end, where the same pair ended before. So the
    cost of a token does not depend on the row's length. It uses plain lists because numpy may release the GIL, and on
    a busy machine other threads then keep the interpreter for longer than a scan takes.
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
            # Index the pair before the token: now something follows it.
            end = len(ids)
            if end >= MIN_NGRAM:
                pair = ids[end - 2] << 32 | ids[end - 1]
                earlier.append(last.get(pair, 0))
                last[pair] = end
            ids.append(token)

    def propose(self, max_drafts: int) -> Int32Array:
        """Return `max_drafts` tokens that are likely to follow, none if the latest tokens have no match.

        The longest match wins, then the latest. If fewer than `max_drafts` tokens follow a match, they are repeated.
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
    """A row that drafts.

    epoch: the epoch of the row's request; results of other epochs are ignored.
    lookup: the index of the row's tokens.
    drafts: the drafts for the next step.
    record: acceptance rate of drafts from the lookup.
    jump_forward_record: acceptance rate of drafts that begin with a token that the grammar forces.
    forced: whether the row's grammar forces the first of `drafts`.
    """

    epoch: int
    lookup: NgramIndex
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    record: AcceptanceRate = field(default_factory=AcceptanceRate)
    jump_forward_record: AcceptanceRate = field(default_factory=AcceptanceRate)
    forced: bool = False

    def judge(self) -> AcceptanceRate:
        """Return the acceptance record that applies to the current drafts."""
        return self.jump_forward_record if self.forced else self.record


class NgramDrafter:
    """Drafts up to `max_drafts` tokens for each row, by prompt lookup. Rows with log-probabilities have no drafts."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._rows: dict[int, _Row] = {}

    def warm_up(self, lengths: Sequence[int]) -> None:
        """Do nothing: nothing is compiled."""

    def take(self, plan: StepPlan) -> None:
        """Register the rows that start with a plan."""
        for start in plan.row_starts:
            self._rows.pop(start.pool_row, None)
            # A calibration step starts rows without work; they draft nothing.
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

    def computed(self, plan: StepPlan, hidden: Hidden) -> None:
        """Do nothing: tokens say all."""

    def draft(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array, keep_to: KeepTo, seconds: float
    ) -> tuple[Int32Array, Int32Array]:
        """Observe a step's tokens and look up drafts for the next; see `Drafter`. `seconds` is not used."""
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
    """Yield (place in the plan, pool row, row, sampled tokens) for each row of `rows` that sampled in a plan.

    Results of an earlier request in the same pool row are skipped.

    rows: the rows that draft, by pool row.
    tokens: int32[sum(accepted)], the sampled tokens.
    accepted: int32[n], tokens of each row of the plan.
    """
    ends = np.cumsum(accepted)
    columns = zip(plan.pool_rows.tolist(), plan.epochs.tolist(), accepted.tolist(), ends.tolist(), strict=True)
    for place, (pool_row, epoch, count, end) in enumerate(columns):
        row = rows.get(pool_row)
        if row is not None and row.epoch == epoch and count:
            yield place, pool_row, row, tokens[end - count : end]


def count_accepted(drafts: Int32Array, tokens: Int32Array) -> tuple[int, bool]:
    """Return how many drafts of a row were right before the first wrong one, and whether one was wrong.

    drafts: int32[m]; tokens: int32[n], what the row sampled.
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
    """Return the samples that each row keeps: those that match its drafts, and the sample after them.

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
        # A row's last sample has no draft to match, so each row has a first refused sample.
        refused = sampled != drafts_to_verify(plan, inputs)
        until = np.where(refused, place + 1, np.repeat(samples, samples))
        accepted[rows] = np.minimum.reduceat(until, firsts[rows])
    kept = place < np.repeat(accepted, samples)
    return sampled[kept].astype(np.int32), accepted.astype(np.int32)


def _corpus(start: RowStart) -> Int32Array:
    """Return the tokens to search: the end of the prompt, the client's prediction, then all known tokens.

    The prediction follows the prompt's end, so that an answer that begins as predicted matches from its first token.
    """
    if not len(start.prediction):
        return start.known_ids
    prompt = start.known_ids[: start.prompt_tokens]
    return np.concatenate((prompt[-MAX_NGRAM:], start.prediction, start.known_ids))
