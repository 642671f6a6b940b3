"""The attention backend over Triton kernels."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.attention.backend import AttentionSpec, FusedKvWriteAttention, KvSlots, set_kv_buffer
from tokenyard.executor.attention.triton.attention_kernel import (
    SPLITS,
    AttentionInputs,
    QueryBlocks,
    SplitScratch,
    attend,
    block_size,
    decode_stages,
)
from tokenyard.executor.attention.triton.layer_kernels import add_norm, norm, rotate_and_store, silu_gate
from tokenyard.executor.attention.triton.packed_kv import store_packed
from tokenyard.executor.attention.varlen import PromptRun, attend_prompts, prompt_runs
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.forward_batch import Bucket, ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool

FEW_QUERIES = 16
"""Rows of at most so many queries (drafts to verify, ends of prompts) have their keys cut into splits too, ..."""
FEW_SPLITS = 4
"""... of which they have fewer than decodes, as each of their queries needs scratch for each split."""


class TritonAttention(FusedKvWriteAttention):
    """An AttentionBackend by own kernels, straight over the page table: decodes, drafts to verify, and chunks.

    launches: those of the prepared step, in each layer.
    prompts: rows of the prepared step that torch attends to.
    """

    def __init__(
        self,
        pool: KvPool,
        pages: PageTable,
        spec: AttentionSpec,
        heads: int,
        dtype: torch.dtype,
        *,
        varlen: bool = False,
    ) -> None:
        """heads: of queries, which are of `dtype`. varlen: whether torch attends to prompts without a prefix."""
        self._pool, self._pages, self._spec, self._heads = pool, pages, spec, heads
        self._sinks = [layer.float().contiguous() for layer in spec.sinks]
        kv_heads, self._head_dim = pool.tensor.shape[3], pool.head_dim
        self._block_size = block_size(heads // kv_heads, dtype)
        device = pool.tensor.device
        self._stages = decode_stages(device)
        # A step of nothing but decodes needs no more than these, so nothing is sent to the device for it.
        self._numbers = torch.arange(len(pages.tensor), device=device)
        self._ones = torch.ones_like(self._numbers)
        self.launches: list[QueryBlocks] = []
        self.prompts: list[PromptRun] = []
        self._varlen = varlen
        self._few = min(FEW_QUERIES, self._block_size)
        self._bucket_columns = self._numbers[:0]

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the step into blocks of queries; see AttentionBackend."""
        self.prompts = []
        if batch.bucket is not None:
            self.launches = self._bucket_launches(batch.bucket)
            return
        self.launches = []
        decodes = batch.decode_rows
        if decodes:
            own = self._numbers[:decodes]
            self.launches.append(self._split(own, self._ones[:decodes], own, own, 1, SPLITS))
        counts = batch.counts[decodes:]
        if not len(counts):
            return
        firsts = decodes + np.cumsum(counts) - counts
        device, few = batch.positions.device, counts <= self._few
        if few.any():
            own_counts = counts[few]
            columns = firsts[few], own_counts, *lines_of(own_counts)
            block = to_device(np.concatenate(columns), device)
            tokens, sizes, places, owners = torch.split(block, [len(column) for column in columns])
            # Kernels are compiled for each size: five powers of two, not sixteen.
            size = power_of_two(int(own_counts.max()))
            self.launches.append(self._split(tokens, sizes, places, owners, size, FEW_SPLITS))
        long = ~few
        if self._varlen:
            fresh = long & (batch.starts[decodes:] == 0)
            self.prompts = prompt_runs(firsts, counts, fresh, device)
            long &= ~fresh
        if long.any():
            tokens, sizes = upload(cut(firsts[long], counts[long], self._block_size), device)
            self.launches.append(QueryBlocks(tokens, sizes, self._block_size, 1))

    def plan_bucket(self, batch: ForwardBatch, bucket: Bucket) -> None:
        """Say which queries of a batch the blocks of a captured step have; see PlansTokenBuckets."""
        sizes, counts = self.bucket_sizes(bucket), batch.counts
        firsts, few, long = np.cumsum(counts) - counts, counts > 1, counts > max(self._few, 1)
        few &= ~long
        columns = [
            *(firsts[counts == 1], counts[counts == 1]),
            *(firsts[few], counts[few], *lines_of(counts[few])),
            *cut(firsts[long], counts[long], self._block_size),
        ]
        block = np.zeros(sum(sizes), np.int64)
        for begin, column in zip(np.cumsum(sizes) - sizes, columns, strict=True):
            block[begin : begin + len(column)] = column
        # Lines behind those of queries belong to the last block in use, which has no such query.
        owners = block[sum(sizes[:5]) : sum(sizes[:6])]
        owners[len(columns[5]) :] = max(int(np.count_nonzero(few)) - 1, 0)
        if len(self._bucket_columns) < len(block):
            # The largest step is planned first, before any is captured.
            self._bucket_columns = self._numbers.new_zeros(len(block))
        self._bucket_columns[: len(block)].copy_(to_device(block, self._numbers.device))

    def bucket_sizes(self, bucket: Bucket) -> list[int]:
        """Return the lengths of the columns of a captured step, as many as it can need: tokens and counts of rows of
        one query; tokens, counts, places and owners of rows of few; tokens and counts of blocks of longer ones.
        """
        tokens, rows = bucket.tokens, min(bucket.rows, len(self._numbers))
        single, few = min(tokens, rows), min(tokens // 2, rows)
        # A row that is cut has more than FEW_QUERIES tokens, and at most one block that is not full.
        long = tokens // self._block_size + tokens // (self._few + 1)
        return [single, single, few, few, few, tokens, long, long]

    def _bucket_launches(self, bucket: Bucket) -> list[QueryBlocks]:
        sizes = self.bucket_sizes(bucket)
        single, ones, few, counts, places, owners, long, long_counts = torch.split(
            self._bucket_columns[: sum(sizes)], sizes
        )
        own = self._numbers[: sizes[0]]
        launches = [
            self._split(single, ones, own, own, 1, SPLITS),
            self._split(few, counts, places, owners, power_of_two(self._few), FEW_SPLITS),
        ]
        return [*launches, QueryBlocks(long, long_counts, self._block_size, 1)] if sizes[-1] else launches

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
        for blocks in self.launches:
            attend(blocks, how, self._pages.tensor, self._pages.page_size, batch.positions, batch.pool_rows, out)
        for run in self.prompts:
            attend_prompts(run, q, keys, values, batch.slots, layer, spec, out)
        return out.flatten(1)

    def _split(
        self,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        places: torch.Tensor,
        owners: torch.Tensor,
        size: int,
        splits: int,
    ) -> QueryBlocks:
        """Blocks whose keys are cut, with scratch for what the splits find; see SplitScratch."""
        lines = len(owners) * self._heads * splits
        scratch = torch.empty(lines * (self._head_dim + 1), dtype=torch.float32, device=tokens.device)
        own = SplitScratch(places, owners, scratch[lines:], scratch[:lines])
        return QueryBlocks(tokens, counts, size, splits, self._stages, own)


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


def lines_of(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return `places` and `owners` (see SplitScratch) of blocks of so many queries."""
    return np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not less than a number above 0."""
    return 1 << (number - 1).bit_length()
