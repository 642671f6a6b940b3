"""The memory of recurrent states, and which of them a step reads and writes."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenyard.base import Int32Array, KvPieces, StepPlan
from tokenyard.base.protocols import MAX_STATE_SAVES
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.models.config import DeltaNetConfig, Mamba2Config, ShortConvConfig

RecurrentConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens of one row, `first` to `end` of the batch, computed in one go.

    slot: the row's working state, which they continue unless `fresh`, as a row's first tokens do.
    targets: slots of the state after them, the working one among them; none for tokens that end in drafts, of which
        some may be refused.
    """

    first: int
    end: int
    slot: int
    fresh: bool
    targets: tuple[int, ...]


Replay = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""From a number of leading tokens of a run to the states of one layer after them, as `StatePool.layer` has them."""


@dataclass(slots=True)
class StateBatch:
    """The states of one forward pass.

    decode_slots: int64[decode_rows], the working slot of each row that decodes.
    decode_saves: of these rows, which ones are saved, and the slots, both int64; None for none.
    runs: those of the other rows.
    unverified: for each run that ends in drafts, by its first token, how each layer computes its states again.
    replay: the same for all of these runs at once, where native steps compute: takes how many tokens of each count.
    """

    pool: "StatePool"
    decode_slots: torch.Tensor
    decode_saves: tuple[torch.Tensor, torch.Tensor] | None
    runs: list[StateRun]
    unverified: dict[int, list[Replay]] = field(default_factory=dict)
    replay: Callable[[Sequence[int]], None] | None = None

    def save_decodes(self) -> None:
        """Save the states of rows that decode, after a captured step, which computes working states alone."""
        if self.decode_saves is not None:
            saved, targets = self.decode_saves
            self.pool.copy(self.decode_slots[saved], targets)


class PagedCheckpoints:
    """Checkpoints as raw bytes in pages of the KV pool, which a page of KV may take at any time.

    kv: the pool, [layers, 2, slots, kv heads, head_dim].
    """

    def __init__(self, kv: torch.Tensor, page_size: int) -> None:
        planes, slots = kv.shape[0] * kv.shape[1], kv.shape[2]
        self._bytes = kv.view(torch.uint8).view(planes, slots // page_size, -1)
        # Pages with bytes of a state, which may be NaN to whoever reads them as KV.
        self._raw = np.zeros(slots // page_size, np.bool_)

    def read(self, pages: Int32Array) -> torch.Tensor:
        """Return the bytes in pages (int32[n])."""
        return self._bytes[:, self._index(pages)].flatten()

    def write(self, pages: Int32Array, content: torch.Tensor) -> None:
        """Put bytes into pages (int32[n])."""
        planes, _, width = self._bytes.shape
        whole = content.new_zeros(planes * len(pages) * width)
        whole[: len(content)] = content
        self._bytes[:, self._index(pages)] = whole.view(planes, len(pages), width)
        self._raw[pages] = True

    def clear(self, pages: Int32Array) -> None:
        """`pages` (int32[n]) are for KV now, of which slots that were not written are zero."""
        raw = pages[self._raw[pages]]
        if len(raw):
            self._bytes[:, self._index(raw)] = 0
            self._raw[raw] = False

    def _index(self, pages: Int32Array) -> torch.Tensor:
        return to_device(pages.astype(np.int64), self._bytes.device)


class StatePool:
    """The states of all layers that have one: a slot for each pool row, then those of the checkpoints, and one
    (`padding_slot`) for rows that fill up a captured step.

    Where checkpoints are in pages of the KV pool (`paged`), `keep` copies them there after a step: those of rows that
    decode or verify from their working states, those within chunks from the last `MAX_STATE_SAVES` slots.

    conv: [layers, slots, kernel - 1, channels], the last inputs of the convolution, in the dtype of the model.
    recurrent: float32[layers, slots, *state_shape].
    """

    def __init__(
        self,
        config: RecurrentConfig,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        paged: PagedCheckpoints | None = None,
    ) -> None:
        self._paged, self._first_save = paged, slots - MAX_STATE_SAVES
        self.padding_slot = slots
        layers, slots = len(config.layers), slots + 1
        # Not torch.empty and zero_: a CPU gives a slot its memory when it is first written to.
        self.conv = torch.zeros(layers, slots, config.kernel - 1, config.channels, device=device, dtype=dtype)
        self.recurrent = torch.zeros(layers, slots, *config.state_shape, device=device, dtype=torch.float32)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of one layer, by slot."""
        return self.conv[index], self.recurrent[index]

    def pieces(self, slots: Int32Array) -> KvPieces:
        """Return where the states in slots (int32[n]) lie, in pieces of one size: those of all convolutions first."""
        parts = [states for states in (self.conv, self.recurrent) if states.numel()]
        sizes = [states.stride(1) * states.itemsize for states in parts]
        piece, columns = math.gcd(*sizes), []
        for states, nbytes in zip(parts, sizes, strict=True):
            layers = states.data_ptr() + np.arange(len(states)) * (states.stride(0) * states.itemsize)
            origins = (layers[:, None] + np.arange(0, nbytes, piece)).ravel()
            columns.append(origins + slots.astype(np.int64)[:, None] * nbytes)
        return KvPieces(np.concatenate(columns, axis=1), piece, str(self.conv.device))

    def prepare(self, plan: StepPlan) -> StateBatch:
        """Apply a plan's copies; return what its forward pass reads and writes."""
        device = self.conv.device
        if self._paged is not None:
            for (_, target), pages in zip(plan.state_copies.tolist(), plan.state_pages, strict=False):
                self._set(target, self._paged.read(pages))
            self._paged.clear(plan.page_ids)
        elif len(plan.state_copies):
            sources, targets = to_device(plan.state_copies.T.astype(np.int64), device)
            self.copy(sources, targets)
        saves: dict[int, list[tuple[int, int]]] = {}
        for (pool_row, position, _), slot in zip(plan.state_saves.tolist(), self._saved_to(plan), strict=True):
            saves.setdefault(pool_row, []).append((position, slot))
        decodes, pool_rows = plan.decode_rows, plan.pool_rows.tolist()
        # A prompt of one token may come as a decode: it continues nothing.
        fresh = [pool_rows[row] for row in (plan.starts[:decodes] == 0).nonzero()[0].tolist()]
        if fresh:
            slots = to_device(np.array(fresh, np.int64), device)
            for states in (self.conv, self.recurrent):
                states.index_fill_(1, slots, 0)
        kept = [
            (row, slot)
            for row in (range(decodes) if saves else ())
            for _, slot in saves.get(pool_rows[row], ())
            if slot != pool_rows[row]
        ]
        columns = to_device(np.array(kept, np.int64).reshape(-1, 2).T, device) if kept else None
        return StateBatch(
            pool=self,
            decode_slots=to_device(plan.pool_rows[:decodes].astype(np.int64), device),
            decode_saves=None if columns is None else (columns[0], columns[1]),
            runs=_runs(plan, saves),
        )

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states of all layers from slots to slots, both int64[n]."""
        for states in (self.conv, self.recurrent):
            states[:, targets] = states[:, sources]

    def keep(self, plan: StepPlan) -> None:
        """Copy what the plan's forward pass saved to pages of the KV pool, if checkpoints are there."""
        if self._paged is not None:
            for slot, pages in zip(self._saved_to(plan), plan.state_pages[len(plan.state_copies) :], strict=True):
                parts = [states[:, slot].flatten().view(torch.uint8) for states in (self.conv, self.recurrent)]
                self._paged.write(pages, torch.cat(parts))

    def confirm(self, batch: StateBatch, plan: StepPlan, accepted: Int32Array) -> None:
        """Advance the states of rows that verified drafts: by their inputs that count, whose states are computed again.

        batch: what `prepare` returned for the plan. accepted: int32[n], the samples that each row of the plan keeps.
        """
        ends = np.cumsum(plan.counts)
        kept = {int(ends[row] - plan.counts[row]): int(accepted[row]) for row in range(len(ends))}
        firsts = np.array(list(kept))
        runs, counts = [run for run in batch.runs if not run.targets], list[int]()
        for run in runs:
            # The tokens of the row before this run were certain.
            first = int(firsts[firsts <= run.first][-1])
            counts.append(max(0, kept[first] - (run.first - first)))
        if batch.replay is not None:
            batch.replay(counts)
            return
        for run, count in zip(runs, counts, strict=True):
            for layer, replay in enumerate(batch.unverified[run.first] if count else ()):
                self.conv[layer, run.slot], self.recurrent[layer, run.slot] = replay(count)

    def _saved_to(self, plan: StepPlan) -> list[int]:
        """The slot of each of a plan's saves after its forward pass, and before `confirm`."""
        if self._paged is None:
            return [slot for _, _, slot in plan.state_saves.tolist()]
        within = itertools.count(self._first_save)
        chunks = set(plan.pool_rows[plan.chunks_from :].tolist())
        # Other rows save the state after their last certain token, which is their working state until then.
        return [next(within) if pool_row in chunks else pool_row for pool_row in plan.state_saves[:, 0].tolist()]

    def _set(self, slot: int, content: torch.Tensor) -> None:
        """Set the states in a slot from the bytes that `keep` made of one."""
        for states in (self.conv, self.recurrent):
            part = states[:, slot]
            size = part.numel() * part.element_size()
            # A copy, because a view of another type needs bytes that are aligned for it.
            states[:, slot] = content[:size].clone().view(states.dtype).view(part.shape)
            content = content[size:]


def state_bytes(config: RecurrentConfig, dtype: torch.dtype) -> int:
    """Bytes of one slot, over all layers."""
    recurrent = math.prod(config.state_shape) * torch.float32.itemsize
    return len(config.layers) * (recurrent + (config.kernel - 1) * config.channels * dtype.itemsize)


def _runs(plan: StepPlan, saves: dict[int, list[tuple[int, int]]]) -> list[StateRun]:
    """Cut the tokens of each row that does not decode where its state is saved."""
    verifies = np.arange(len(plan.pool_rows)) < plan.chunks_from
    columns = (plan.pool_rows, plan.starts, plan.counts, verifies)
    runs, first = [], plan.decode_rows
    for pool_row, start, count, verifies in zip(
        *(column[plan.decode_rows :].tolist() for column in columns), strict=True
    ):
        own = saves.get(pool_row, ())
        cuts = sorted({start, start + count, *(position for position, _ in own)})
        for begin, end in itertools.pairwise(cuts):
            unverified = verifies and end == cuts[-1]
            saved = (slot for position, slot in own if position == end and slot != pool_row)
            targets = () if unverified else (pool_row, *saved)
            runs.append(StateRun(first, first + end - begin, pool_row, begin == 0, targets))
            first += end - begin
    return runs
