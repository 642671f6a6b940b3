"""Drafts by a small model (Leviathan et al. 2023; STANDALONE in SGLang, draft_model in vLLM).

The draft model has its own KV pool, indexed by the same slots and page table as the target model's. So prefix hits,
chunks, retraction and rejected drafts apply to both. The draft model runs only when a plan verifies drafts of a row:
it computes the tokens that it has not seen, then drafts one token after the other. A token is drafted with the row's
temperature and the noise of its position, so that a draft model with the target's probabilities draws the same tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenyard.base import AcceptanceRate, Int32Array, Int64Array, StepPlan
from tokenyard.executor.drafter import NO_DRAFTS, Choose, Hidden, KeepTo, count_accepted, sampled_runs
from tokenyard.executor.forward_batch import ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.models.model_backend import ModelBackend

MAX_CATCH_UP_TOKENS = 1024
"""The most unseen tokens of a row that the draft model computes in one chunk."""

ANEW_EVERY = 64
"""A new row starts with the overall acceptance rate; one row in this many starts with the default rate instead."""

KEPT = 0.9
"""Weight of the old value in a running mean."""


@dataclass(slots=True)
class _Row:
    """A row that drafts.

    epoch: the epoch of the row's request.
    ids: the row's tokens.
    record: acceptance rate of the model's drafts.
    seen: leading tokens whose KV the draft model has; -1 if that must be looked up.
    drafts: drafts of the step in flight.
    forced: tokens that the row's grammar forces next. They are drafted without the model.
    jump_forward_record: acceptance rate of forced drafts.
    """

    epoch: int
    ids: list[int]
    record: AcceptanceRate
    seen: int = -1
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    forced: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    jump_forward_record: AcceptanceRate = field(default_factory=AcceptanceRate)


class DraftTimes:
    """Running means of the time of a draft and of a step of the target model; None before the first."""

    def __init__(self) -> None:
        self._draft_s: float | None = None
        self._step_s: float | None = None

    def drafted(self, seconds: float) -> None:
        """Record the seconds that one draft of each row took."""
        self._draft_s = _mean(self._draft_s, seconds)

    def stepped(self, seconds: float) -> None:
        """Record the seconds that a step of the target model took, without its drafts."""
        self._step_s = _mean(self._step_s, seconds)

    def worthwhile(self, chance: float, max_drafts: int) -> int:
        """Return how many drafts give the most tokens per second. chance: of a draft, if those before it are right."""
        if self._draft_s is None or not self._step_s:
            return max_drafts
        share, best, best_rate, expected = self._draft_s / self._step_s, 0, 1.0, 1.0
        for count in range(1, max_drafts + 1):
            expected += chance**count
            if expected / (1.0 + share * count) > best_rate:
                best, best_rate = count, expected / (1.0 + share * count)
        return best


def _mean(old: float | None, new: float) -> float:
    return new if old is None else KEPT * old + (1.0 - KEPT) * new


class ModelDrafter:
    """Drafts up to `max_drafts` tokens for each row, by a draft model. Rows with log-probabilities have no drafts.

    pool: the draft model's KV pool.
    pages: the page table of both models.
    choose: see `Choose`.
    clock: returns seconds.
    """

    def __init__(
        self,
        max_drafts: int,
        model: ModelBackend,
        pool: KvPool,
        pages: PageTable,
        choose: Choose,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_drafts, self.model, self._pages, self._choose, self.clock = max_drafts, model, pages, choose, clock
        self.pool = pool
        self._device = pages.tensor.device
        self._valid = torch.zeros(pool.tensor.shape[2], dtype=torch.bool, device=self._device)
        self.rows: dict[int, _Row] = {}
        self._overall = AcceptanceRate()
        self._started = 0
        self._times = DraftTimes()
        self._drafting_s = 0.0

    def use_model(self, model: ModelBackend) -> None:
        """Draft by other weights from the next step on. KV of the old ones is computed again."""
        self.model = model
        self._valid.zero_()
        for row in self.rows.values():
            row.seen = -1

    @torch.inference_mode()
    def warm_up(self, lengths: Sequence[int]) -> None:
        """Compile what the draft model needs; see Drafter."""
        row, first = np.zeros(1, np.int32), np.zeros(1, np.int64)
        for length in lengths:
            if length <= self._pages.tensor.shape[1] * self._pages.page_size:
                self._choose(self._compute(row, first, [[0] * length]), row, first)

    def take(self, plan: StepPlan) -> None:
        """Register the rows that start with a plan. The plan's page writes must be applied."""
        for start in plan.row_starts:
            self.rows.pop(start.pool_row, None)
            place = np.flatnonzero(plan.pool_rows == start.pool_row)
            if start.logprobs is None and len(place):
                epoch = int(plan.epochs[place[0]])
                self.rows[start.pool_row] = _Row(epoch, start.known_ids.tolist(), self._record())
        for pool_row, column in zip(plan.page_rows.tolist(), plan.page_columns.tolist(), strict=True):
            row = self.rows.get(pool_row)
            if row is not None and column * self._pages.page_size < row.seen:
                # Pages of the radix tree replaced the row's own pages.
                row.seen = -1
        columns = upload((np.repeat(plan.pool_rows, plan.counts), plan.positions), self._device)
        self._valid[self._pages.slots(columns[0], columns[1]).long()] = False

    def fill_in(self, plan: StepPlan) -> Int32Array:
        """The plan's input tokens, int32[sum(counts)], with the ids of its drafts."""
        tokens, began = plan.tokens.copy(), self.clock()
        verify = slice(plan.decode_rows, plan.chunks_from)
        pool_rows, counts = plan.pool_rows[verify], plan.counts[verify] - 1
        drafts = np.zeros((len(pool_rows), int(counts.max())), np.int32)
        forced = np.array([len(self.rows[row].forced) > 0 for row in pool_rows.tolist()])
        for place in np.flatnonzero(forced).tolist():
            ids = self.rows[int(pool_rows[place])].forced[: counts[place]]
            drafts[place, : len(ids)] = ids
        if not forced.all():
            own, starts = ~forced, plan.starts[verify].astype(np.int64)
            found = self._drafts(pool_rows[own], starts[own], counts[own], began)
            drafts[own, : found.shape[1]] = found
        ends = np.cumsum(plan.counts)[verify]
        for place, (pool_row, end, count) in enumerate(
            zip(pool_rows.tolist(), ends.tolist(), counts.tolist(), strict=True)
        ):
            self.rows[pool_row].drafts = drafts[place, :count]
            tokens[end - count : end] = drafts[place, :count]
        self._drafting_s = self.clock() - began
        return tokens

    def computed(self, plan: StepPlan, hidden: Hidden) -> None:
        """Do nothing: a draft model reads tokens alone."""

    def draft(
        self, plan: StepPlan, tokens: Int32Array, accepted: Int32Array, keep_to: KeepTo, seconds: float
    ) -> tuple[Int32Array, Int32Array]:
        """Observe a step's tokens and return how many drafts are worth their time; see `Drafter`.

        Tokens that a grammar forces are drafted without the model. Other drafts that it rejects fail verification.
        """
        if plan.chunks_from == len(plan.pool_rows) and plan.chunks_from:
            self._times.stepped(max(seconds - (self._drafting_s if plan.verify_rows else 0.0), 0.0))
        drafted, chances = np.zeros((2, len(accepted)), np.int32)
        for place, pool_row, row, run in sampled_runs(self.rows, plan, tokens, accepted):
            right, refused = count_accepted(row.drafts, run)
            if len(row.forced):
                row.jump_forward_record.observe(right, refused)
            else:
                row.record.observe(right, refused)
                self._overall.observe(right, refused)
            row.ids += run.tolist()
            # KV of rejected drafts does not belong to the row's tokens, and the last token has no KV yet.
            row.seen = min(row.seen, len(row.ids) - 1)
            row.forced, _ = keep_to(pool_row, NO_DRAFTS, self._max_drafts)
            row.drafts = row.forced
            if len(row.forced):
                drafted[place], chances[place] = len(row.forced), row.jump_forward_record.chance
                continue
            chances[place] = row.record.chance
            drafted[place] = self._times.worthwhile(row.record.chance / 1000, self._max_drafts)
        return drafted, chances

    def _record(self) -> AcceptanceRate:
        """The record of a new row."""
        record, overall = AcceptanceRate(), self._overall
        if self._started % ANEW_EVERY:
            record.right = record.tried * overall.right / overall.tried
        self._started += 1
        return record

    def _drafts(self, pool_rows: Int32Array, starts: Int64Array, counts: Int32Array, began: float) -> Int32Array:
        """int32[n, largest count], drafts of rows whose last token is at `starts` (int64[n])."""
        runs, firsts = [], starts.copy()
        for place, (pool_row, start) in enumerate(zip(pool_rows.tolist(), starts.tolist(), strict=True)):
            firsts[place] = self._take_in(pool_row, self._unseen(pool_row, start), start)
            runs.append(self.rows[pool_row].ids[firsts[place] : start + 1])
        logits, places = self._compute(pool_rows, firsts, runs), np.arange(len(pool_rows))
        found = torch.zeros(int(counts.max()), len(pool_rows), dtype=torch.int64, device=self._device)
        for index in range(len(found)):
            chosen = self._choose(logits, pool_rows[places], starts[places] + index + 1)
            found[index, upload((places,), self._device)[0]] = chosen
            places = np.flatnonzero(counts > index + 1)
            if len(places):
                inputs = found[index, upload((places,), self._device)[0]]
                batch = self._batch_of_ones(pool_rows[places], starts[places] + index + 1, inputs)
                logits = self.model.step(batch)
        # The host waits once, for all drafts: each is the input of the next on the device.
        drafts: Int32Array = found.T.cpu().numpy().astype(np.int32)
        if sum(map(len, runs)) <= 2 * len(runs):
            # Longer runs measure catching up, not drafting.
            self._times.drafted((self.clock() - began) / drafts.shape[1])
        for pool_row, seen in zip(pool_rows.tolist(), (starts + counts).tolist(), strict=True):
            self.rows[pool_row].seen = seen
        return drafts

    def _unseen(self, pool_row: int, start: int) -> int:
        """The first position, `start` at most, whose KV the draft model does not have."""
        row = self.rows[pool_row]
        if row.seen < 0:
            columns = upload((np.full(start, pool_row), np.arange(start)), self._device)
            row.seen = int(self._valid[self._pages.slots(columns[0], columns[1]).long()].cumprod(0).sum())
        return min(row.seen, start)

    def _take_in(self, pool_row: int, first: int, start: int) -> int:
        """Compute a row's tokens from `first` on in full chunks; returns the first position that is left."""
        ids = self.rows[pool_row].ids
        while start - first >= MAX_CATCH_UP_TOKENS:
            chunk = ids[first : first + MAX_CATCH_UP_TOKENS]
            self._compute(np.array([pool_row], np.int32), np.array([first]), [chunk])
            first += len(chunk)
        return first

    def _compute(self, pool_rows: Int32Array, firsts: Int64Array, runs: list[list[int]]) -> torch.Tensor:
        """Run the draft model over `runs` of tokens, which begin at positions `firsts`; logits at each run's end."""
        return self.model.step(self._batch_of_runs(pool_rows, firsts, runs))

    def _batch_of_runs(self, pool_rows: Int32Array, firsts: Int64Array, runs: list[list[int]]) -> ForwardBatch:
        """`runs` of tokens, which begin at positions `firsts`."""
        counts = np.array([len(run) for run in runs], np.int64)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
        columns = upload((np.concatenate(runs), positions, np.repeat(pool_rows, counts)), self._device)
        return self._batch(columns[0], columns[1], columns[2], firsts, counts)

    def _batch_of_ones(self, pool_rows: Int32Array, positions: Int64Array, tokens: torch.Tensor) -> ForwardBatch:
        """One token of each row, int64[n] on the device."""
        columns = upload((positions, pool_rows), self._device)
        return self._batch(tokens, columns[0], columns[1], positions, np.ones(len(pool_rows), np.int64))

    def _batch(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, firsts: Int64Array, counts: Int64Array
    ) -> ForwardBatch:
        """Tokens (int64[T] columns on the device) of runs, whose ends have logits."""
        slots = self._pages.slots(rows, positions).to(torch.int64)
        self._valid[slots] = True
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            pool_rows=rows,
            logit_tokens=upload((np.cumsum(counts) - 1,), self._device)[0],
            starts=firsts.astype(np.int64),
            counts=counts,
            decode_rows=len(counts) if len(tokens) == len(counts) else 0,
        )
