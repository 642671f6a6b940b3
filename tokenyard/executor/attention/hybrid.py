"""Attention of a model whose layers with a window have a separate KV pool."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from tokenyard.executor.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    FusedKvWriteAttention,
    KvSlots,
    PlansCapturedSteps,
    PlansTokenBuckets,
)
from tokenyard.executor.forward_batch import Bucket, ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool

Backend = TypeVar("Backend", bound=AttentionBackend)


class HybridAttention(Generic[Backend]):
    """An AttentionBackend over two others: one for the layers that see all tokens, one for those with a window.

    Each has the pool and the page table of its layers, which it numbers from 0. For the layers with a window, a batch
    has other slots, and is otherwise the same. Without a page table of theirs, these layers have the others' pages.
    """

    def __init__(
        self,
        make: Callable[[KvPool, PageTable, AttentionSpec], Backend],
        pool: KvPool,
        pages: PageTable,
        spec: AttentionSpec,
    ) -> None:
        """`pool` and `pages` are those of the layers that see all tokens; they refer to those of the other layers."""
        assert pool.windows is not None
        full = [layer for layer, window in enumerate(spec.windows) if not window]
        local = [layer for layer, window in enumerate(spec.windows) if window]
        self._window_pages = pages.windows or pages
        self._backends = [make(pool.windows, self._window_pages, _part(spec, local))]
        if full:
            self._backends.append(make(pool, pages, _part(spec, full)))
        self._places = {layer: (0, own) for own, layer in enumerate(local)}
        self._places |= {layer: (1, own) for own, layer in enumerate(full)}
        self.batches: list[ForwardBatch] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute what the step needs in each group; see AttentionBackend."""
        slots = self._window_pages.slots(batch.pool_rows, batch.positions).to(torch.int64)
        # Rows that fill up a recorded batch write to page 0 in either pool; they only look like pool row 0.
        slots.masked_fill_(batch.slots < self._window_pages.page_size, 0)
        self.batches = [replace(batch, slots=slots, attention={}), batch]
        for backend, own in zip(self._backends, self.batches, strict=False):
            backend.prepare(own)

    def plan_captured(self, batch: ForwardBatch, size: int) -> None:
        """Prepare each group that needs it; see PlansCapturedSteps."""
        for backend in self._backends:
            if isinstance(backend, PlansCapturedSteps):
                backend.plan_captured(batch, size)

    def plan_bucket(self, batch: ForwardBatch, bucket: Bucket) -> None:
        """Prepare each group; see PlansTokenBuckets."""
        for backend in self._backends:
            assert isinstance(backend, PlansTokenBuckets)
            backend.plan_bucket(batch, bucket)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store keys and values in the layer's group and attend; see AttentionBackend."""
        backend, own, own_batch = self._own(layer)
        return backend.forward(own, q, k, v, own_batch)

    def _own(self, layer: int) -> tuple[Backend, int, ForwardBatch]:
        """Return the backend of a layer's group, the layer's number there and the prepared batch."""
        group, own = self._places[layer]
        return self._backends[group], own, self.batches[group]


class HybridFusedKvWriteAttention(HybridAttention[FusedKvWriteAttention]):
    """A FusedKvWriteAttention over two others."""

    def place(self, layer: int, batch: ForwardBatch) -> KvSlots:
        """Return where a layer's keys and values go in its group; see FusedKvWriteAttention."""
        backend, own, own_batch = self._own(layer)
        return backend.place(own, own_batch)

    def attend(self, layer: int, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend in the layer's group; see FusedKvWriteAttention."""
        backend, own, own_batch = self._own(layer)
        return backend.attend(own, q, own_batch)


def _part(spec: AttentionSpec, layers: Sequence[int]) -> AttentionSpec:
    """Return how some layers attend."""
    sinks = tuple(spec.sinks[layer] for layer in layers) if spec.sinks else ()
    return replace(spec, windows=tuple(spec.windows[layer] for layer in layers), sinks=sinks)
