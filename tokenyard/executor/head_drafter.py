"""Drafts by a head that reads the target's hidden states: one that the checkpoint brings (NEXTN, vLLM's `mtp`), or one
that was trained for it (EAGLE, EAGLE3).

The head reads what the target model found at a position, and the token after it. So it follows the target from step to
step: what a step found is kept until the next tokens are known, and taken in before the next draft, or earlier where it
is much, as that of a prompt. Its KV is in a pool of its own, indexed by the same slots and page table. KV that the head
never computed, as that of a prefix from elsewhere, makes drafts worse and changes no answer.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from tokenyard.base import Int32Array, Int64Array, StepPlan
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.drafter import Choose, Hidden
from tokenyard.executor.forward_batch import PageTable, upload
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.models.draft_head import DraftHead
from tokenyard.executor.models.model_backend import TorchModel

MAX_HELD = 16
"""The most positions of a row that wait for their draft before the head takes them in."""


class HeadDrafter(ModelDrafter):
    """Drafts up to `max_drafts` tokens for each row, each from the one before. Rows with log-probabilities have none.

    head: the draft head; model: runs its layers over `pool`. The others: see ModelDrafter.
    inputs: what the head reads of a step; None for the hidden states behind the last norm.
    """

    def __init__(
        self,
        max_drafts: int,
        head: DraftHead,
        model: TorchModel,
        pool: KvPool,
        pages: PageTable,
        choose: Choose,
        inputs: Hidden | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(max_drafts, model, pool, pages, choose, clock)
        self._head, self._model = head, model
        self._inputs = inputs
        self._held: dict[int, tuple[int, torch.Tensor]] = {}

    def take(self, plan: StepPlan) -> None:
        """Register the rows that start with a plan."""
        super().take(plan)
        for start in plan.row_starts:
            self._held.pop(start.pool_row, None)

    @torch.inference_mode()
    def computed(self, plan: StepPlan, hidden: Hidden) -> None:
        """Keep what the step found of rows that draft, and take in what the head can."""
        if not self.rows:
            return
        found = (self._inputs or hidden)(0, len(plan.tokens)).split(plan.counts.tolist())
        for pool_row, start, own in zip(plan.pool_rows.tolist(), plan.starts.tolist(), found, strict=True):
            if pool_row in self.rows:
                self._hold(pool_row, start, own)

    def _hold(self, pool_row: int, start: int, found: torch.Tensor) -> None:
        """Keep what was found from `start` on, [n, hidden], behind what is kept before that."""
        first, held = self._held.get(pool_row, (start, found[:0]))
        if first <= start <= first + len(held):
            # What is behind `start` are drafts that were refused.
            found = torch.cat((held[: start - first], found))
        else:
            first = start
        known = len(self.rows[pool_row].ids) - 1 - first
        if len(found) > MAX_HELD and known > 0:
            tokens = self.rows[pool_row].ids[first + 1 : first + 1 + min(known, len(found))]
            row, begin = np.array([pool_row], np.int32), np.array([first], np.int64)
            self._advance(row, begin, [tokens], found[: len(tokens)], logits=False)
            first, found = first + len(tokens), found[len(tokens) :].clone()
        self._held[pool_row] = first, found

    def _drafts(self, pool_rows: Int32Array, starts: Int64Array, counts: Int32Array, began: float) -> Int32Array:
        """int32[n, largest count], drafts of rows whose last token is at `starts` (int64[n])."""
        firsts, runs, held = starts.copy(), [], []
        for place, (pool_row, start) in enumerate(zip(pool_rows.tolist(), starts.tolist(), strict=True)):
            first, kept = self._held.pop(pool_row)
            firsts[place] = first
            runs.append(self.rows[pool_row].ids[first + 1 : start + 1])
            held.append(kept[: start - first])
        hidden, logits = self._advance(pool_rows, firsts, runs, torch.cat(held))
        places = np.arange(len(pool_rows))
        drafts = torch.zeros(int(counts.max()), len(pool_rows), dtype=torch.int64, device=self._device)
        for index in range(len(drafts)):
            drafts[index, upload((places,), self._device)[0]] = self._choose(
                logits, pool_rows[places], starts[places] + index + 1
            )
            left = np.flatnonzero(counts[places] > index + 1)
            places = places[left]
            if len(places):
                hidden = hidden[upload((left,), self._device)[0]]
                inputs = drafts[index, upload((places,), self._device)[0]]
                batch = self._batch_of_ones(pool_rows[places], starts[places] + index, inputs)
                hidden, logits = self._head.step(self._model, batch, hidden)
        found: Int32Array = drafts.T.cpu().numpy().astype(np.int32)
        self._times.drafted((self.clock() - began) / found.shape[1])
        return found

    def _compute(self, pool_rows: Int32Array, firsts: Int64Array, runs: list[list[int]]) -> torch.Tensor:
        """See ModelDrafter. The head reads zeros, as if nothing was found."""
        nothing = self._head.layers.hidden_states(sum(map(len, runs))).zero_()
        return self._advance(pool_rows, firsts, runs, nothing)[1]

    def _advance(
        self,
        pool_rows: Int32Array,
        firsts: Int64Array,
        runs: list[list[int]],
        hidden: torch.Tensor,
        *,
        logits: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over positions of rows from `firsts` on. runs: the tokens after them; hidden: [tokens, hidden],
        what was found at them. Returns what DraftHead.step does of the runs' ends, of none without `logits`.
        """
        batch = self._batch_of_runs(pool_rows, firsts, runs)
        if not logits:
            batch.logit_tokens = batch.logit_tokens[:0]
        return self._head.step(self._model, batch, hidden)
