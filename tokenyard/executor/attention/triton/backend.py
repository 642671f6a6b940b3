"""The attention backend over Triton kernels."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.attention.backend import AttentionSpec, FusedKvWriteAttention, KvSlots, set_kv_buffer
from tokenyard.executor.attention.triton.attention_kernel import (
    SPLITS,
    AttentionInputs,
    QueryBlocks,
    attend,
    block_size,
    decode_stages,
)
from tokenyard.executor.attention.triton.layer_kernels import add_norm, norm, rotate_and_store, silu_gate
from tokenyard.executor.attention.triton.packed_kv import store_packed
from tokenyard.executor.forward_batch import ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool

FEW_QUERIES = 16
"""Rows of at most so many queries (drafts to verify, ends of prompts) have their keys cut into splits too, ..."""
FEW_SPLITS = 4
"""... of which they have fewer than decodes, as each of their queries needs scratch for each split."""


class TritonAttention(FusedKvWriteAttention):
    """An AttentionBackend by own kernels, straight over the page table: decodes, drafts to verify, and chunks."""

    def __init__(self, pool: KvPool, pages: PageTable, spec: AttentionSpec, heads: int, dtype: torch.dtype) -> None:
        """heads: of queries, which are of `dtype`."""
        self._pool, self._pages, self._spec, self._heads = pool, pages, spec, heads
        self._sinks = [layer.float().contiguous() for layer in spec.sinks]
        kv_heads, self._head_dim = pool.tensor.shape[3], pool.head_dim
        self._block_size = block_size(heads // kv_heads, dtype)
        device = pool.tensor.device
        self._stages = decode_stages(device)
        # A step of nothing but decodes needs no more than these, so nothing is sent to the device for it.
        self._numbers = torch.arange(len(pages.tensor), device=device)
        self._ones = torch.ones_like(self._numbers)
        self._launches: list[QueryBlocks] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the step into blocks of queries; see AttentionBackend."""
        self._launches = []
        decodes = batch.decode_rows
        if decodes:
            self._launches.append(self._split(self._numbers[:decodes], self._ones[:decodes], 1, SPLITS))
        counts = batch.counts[decodes:]
        if not len(counts):
            return
        firsts = decodes + np.cumsum(counts) - counts
        device, few = batch.positions.device, counts <= min(FEW_QUERIES, self._block_size)
        if few.any():
            tokens, sizes = upload((firsts[few], counts[few]), device)
            # Kernels are compiled for each size: five powers of two, not sixteen.
            size = 1 << (int(counts[few].max()) - 1).bit_length()
            self._launches.append(self._split(tokens, sizes, size, FEW_SPLITS))
        if not few.all():
            tokens, sizes = upload(cut(firsts[~few], counts[~few], self._block_size), device)
            self._launches.append(QueryBlocks(tokens, sizes, self._block_size, 1))

    def place(self, layer: int, batch: ForwardBatch) -> KvSlots:
        """Where a layer's keys and values of a batch belong; see FusedKvWriteAttention."""
        return KvSlots(batch.slots, *self._pool.layer(layer), self._pool.kind)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store keys and values and attend; see AttentionBackend."""
        place = self.place(layer, batch)
        if place.kind is None:
            set_kv_buffer(place, k, v)
        else:
            store_packed(place.keys, place.values, place.slots, place.kind, k, v)
        return self.attend(layer, q, batch)

    def attend(self, layer: int, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend with keys and values that are in the pool; see FusedKvWriteAttention."""
        keys, values = self._pool.layer(layer)
        if q.stride(2) != 1 or q.stride(1) != self._head_dim:
            q = q.contiguous()
        out = torch.empty(len(q), self._heads, self._head_dim, dtype=q.dtype, device=q.device)
        spec = self._spec
        how = AttentionInputs(
            *(q, keys, values, spec.windows[layer], spec.scale, spec.softcap),
            self._sinks[layer] if self._sinks else None,
            self._pool.kind,
        )
        for blocks in self._launches:
            attend(blocks, how, self._pages.tensor, self._pages.page_size, batch.positions, batch.pool_rows, out)
        return out.flatten(1)

    def _split(self, tokens: torch.Tensor, counts: torch.Tensor, size: int, splits: int) -> QueryBlocks:
        """Blocks whose keys are cut, with scratch for what the splits find."""
        lines = len(tokens) * size * self._heads * splits
        scratch = torch.empty(lines * (self._head_dim + 1), dtype=torch.float32, device=tokens.device)
        return QueryBlocks(tokens, counts, size, splits, self._stages, scratch[lines:], scratch[:lines])


class TritonKernels:
    """FusedKernels by Triton, around what attends."""

    norm = staticmethod(norm)
    add_norm = staticmethod(add_norm)
    silu_gate = staticmethod(silu_gate)

    def __init__(self, attention: FusedKvWriteAttention) -> None:
        self._attention = attention

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Rotate, store and attend; see FusedKernels."""
        q = rotate_and_store(qkv, cos_sin, self._attention.place(layer, batch), norm_weight, eps)
        return self._attention.attend(layer, q, batch)


def cut(
    firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut rows of `counts` queries, from token `firsts` on, into blocks of at most `size`: first tokens and counts."""
    pieces = -(-counts // size)
    rows = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return firsts[rows] + number * size, np.minimum(counts[rows] - number * size, size)
