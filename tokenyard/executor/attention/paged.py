"""Attention in plain torch over the paged pool. It runs on any device and is the reference for faster kernels.

Decode rows are gathered into padded groups of like length and attend together; each chunk attends by itself. Query
heads that share a key-value head are handled without copying keys: in a decode group they stand where a sequence's
queries stand, in a chunk they are a batch dimension over which keys are expanded.

On a CPU, chunks attend by plain matrix products in blocks of queries instead of torch's fused attention, which takes
two to three times as long there (512 tokens of 9 heads of 64, bfloat16 and float32, one thread of a Zen 5).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tokenyard.executor.forward_batch import ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool

PADDING_TOKENS = 64
PADDING_SHARE = 0.25
"""A decode row joins a group if it pads it by at most this many tokens, or this share of the group's length."""

QUERY_BLOCK = 64
"""Queries of a chunk that attend at once by products; keys after the block's last query are left out."""

MASK_ELEMENTS = 1 << 24
"""A chunk's queries attend in blocks whose mask has at most this many elements."""


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows that attend together. index: their places in the batch, None for rows 0 .. rows - 1.
    slots: int32[rows * length]; mask: [rows, 1, 1, length] to add, or None if all rows have that length.
    """

    index: torch.Tensor | None
    rows: int
    length: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class _ChunkBlock:
    """Queries first .. last of the batch, all of one row. slots: int32[keys], or None where the keys are those of the
    same tokens, just computed. mask: [queries, keys] to add, or None where each query sees all keys up to its own, the
    last query the last key.
    """

    first: int
    last: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class _StepAttention:
    groups: list[_DecodeGroup]
    blocks: list[_ChunkBlock]


class PagedAttention:
    """Causal attention of a batch's tokens over their rows' slots, with an optional window per layer."""

    def __init__(self, pool: KvPool, pages: PageTable, windows: tuple[int, ...]) -> None:
        self._pool = pool
        self._pages = pages
        self._windows = windows
        self._fused = fuses_chunks(pool.tensor.device)
        self._attend_chunk = _attend_fused if self._fused else _attend_by_products

    def prepare(self, batch: ForwardBatch) -> None:
        """Work out, once for all layers, which slots and masks the step needs."""
        for window in dict.fromkeys(self._windows):
            batch.attention[window] = _StepAttention(
                self._decode_groups(batch, window) if batch.decode_rows else [],
                self._chunk_blocks(batch, window),
            )

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store k and v ([T, kv heads, head_dim]) and attend with q ([T, heads, head_dim]): [T, heads * head_dim]."""
        keys, values = self._pool.layer(layer)
        keys.index_copy_(0, batch.slots, k)
        values.index_copy_(0, batch.slots, v)
        step: _StepAttention = batch.attention[self._windows[layer]]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in step.groups:
            _attend_decode(group, q, keys, values, out)
        for block in step.blocks:
            own = slice(block.first, block.last)
            if block.slots is None:
                out[own] = self._attend_chunk(q[own], k[own], v[own], block.mask)
            else:
                chunk_keys = keys.index_select(0, block.slots)
                out[own] = self._attend_chunk(q[own], chunk_keys, values.index_select(0, block.slots), block.mask)
        return out.flatten(1)

    def _decode_groups(self, batch: ForwardBatch, window: int) -> list[_DecodeGroup]:
        lengths = batch.starts[: batch.decode_rows] + 1
        if window:
            lengths = np.minimum(lengths, window)
        groups = []
        for members in _group_by_length(lengths):
            whole = len(members) == len(lengths)
            index = None if whole else upload((members,), batch.positions.device)[0]
            groups.append(self._decode_group(batch, index, lengths[members], window))
        return groups

    def _decode_group(
        self, batch: ForwardBatch, index: torch.Tensor | None, lengths: npt.NDArray[np.int64], window: int
    ) -> _DecodeGroup:
        rows = batch.pool_rows[: batch.decode_rows]
        last = batch.positions[: batch.decode_rows]
        if index is not None:
            rows, last = rows[index], last[index]
        longest = int(lengths.max())
        # Keys end at the row's own position and begin at 0, or where the window begins.
        first = (last - (window - 1)).clamp_min_(0) if window else torch.zeros_like(last)
        positions = first[:, None] + torch.arange(longest, device=last.device)
        seen = positions <= last[:, None]
        # Padding reads the row's first token: masked, but finite, whatever other requests left behind in the pool.
        slots = self._pages.slots(rows[:, None], torch.where(seen, positions, 0))
        mask = None
        if int(lengths.min()) < longest:
            mask = _additive(seen, self._pool.tensor.dtype)[:, None, None, :]
        return _DecodeGroup(index, len(lengths), longest, slots.flatten(), mask)

    def _chunk_blocks(self, batch: ForwardBatch, window: int) -> list[_ChunkBlock]:
        blocks: list[_ChunkBlock] = []
        first = batch.decode_rows
        for start, count in zip(
            batch.starts[batch.decode_rows :].tolist(), batch.counts[batch.decode_rows :].tolist(), strict=True
        ):
            end = start + count
            if (start and self._fused) or (window and end > window):
                blocks += self._masked_blocks(batch, first, start, count, window)
            else:
                slots = self._slots(batch, first, 0, end) if start else None
                blocks.append(_ChunkBlock(first, first + count, slots, None))
            first += count
        return blocks

    def _masked_blocks(self, batch: ForwardBatch, first: int, start: int, count: int, window: int) -> list[_ChunkBlock]:
        """Cut a chunk whose keys are not just its own tokens into blocks of queries with a bounded mask."""
        device = batch.positions.device
        size = max(16, MASK_ELEMENTS // (start + count))
        blocks = []
        for offset in range(0, count, size):
            queries = min(size, count - offset)
            begin = start + offset
            key_begin = max(0, begin - (window - 1)) if window else 0
            key_positions = torch.arange(key_begin, begin + queries, device=device)
            query_positions = torch.arange(begin, begin + queries, device=device)[:, None]
            seen = key_positions <= query_positions
            if window:
                seen &= key_positions > query_positions - window
            mask = _additive(seen, self._pool.tensor.dtype)
            slots = self._slots(batch, first, key_begin, begin + queries)
            blocks.append(_ChunkBlock(first + offset, first + offset + queries, slots, mask))
        return blocks

    def _slots(self, batch: ForwardBatch, token: int, begin: int, end: int) -> torch.Tensor:
        """Slots of positions begin .. end - 1 of the row that a token of the batch belongs to."""
        # A slice, not an element: indexing by a single device number would wait for the device.
        row = batch.pool_rows[token : token + 1]
        return self._pages.slots(row, torch.arange(begin, end, device=row.device))


def fuses_chunks(device: torch.device) -> bool:
    """Whether chunks attend by torch's fused attention rather than by products."""
    return device.type != "cpu"


def _group_by_length(lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Part rows into groups of like length, so that short rows are not padded to a long one: lists of indices."""
    if int(lengths.max()) - int(lengths.min()) <= max(PADDING_TOKENS, PADDING_SHARE * float(lengths.max())):
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while len(order):
        longest = float(lengths[order[0]])
        enough = longest - max(PADDING_TOKENS, PADDING_SHARE * longest)
        members = int(np.searchsorted(-lengths[order], -enough, side="right"))
        groups.append(order[:members])
        order = order[members:]
    return groups


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a bool mask into one to add to scores."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _attend_decode(
    group: _DecodeGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    """Attend with one query per row; q heads of one kv head stand in the place of a sequence's queries."""
    heads, head_dim = q.shape[1:]
    kv_heads = keys.shape[1]
    queries = q[: group.rows] if group.index is None else q[group.index]
    shape = (group.rows, group.length, kv_heads, head_dim)
    found = F.scaled_dot_product_attention(
        queries.view(group.rows, kv_heads, heads // kv_heads, head_dim),
        keys.index_select(0, group.slots).view(shape).transpose(1, 2),
        values.index_select(0, group.slots).view(shape).transpose(1, 2),
        attn_mask=group.mask,
    ).reshape(group.rows, heads, head_dim)
    if group.index is None:
        out[: group.rows] = found
    else:
        out[group.index] = found


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend with [queries, heads, head_dim] over [keys, kv heads, head_dim], in one call of torch.

    Without a mask there must be as many keys as queries.
    """
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    found = F.scaled_dot_product_attention(
        q.reshape(queries, kv_heads, group, head_dim).permute(2, 1, 0, 3),
        k.transpose(0, 1).expand(group, -1, -1, -1),
        v.transpose(0, 1).expand(group, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return found.permute(2, 1, 0, 3).reshape(queries, heads, head_dim)


def _attend_by_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same by matrix products, a block of queries at a time; the softmax is in float32.

    Without a mask the queries are the last of the keys' positions.
    """
    queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[:2]
    group = heads // kv_heads
    scaled = (q * head_dim**-0.5).view(queries, kv_heads, group, head_dim)
    k, v = k.permute(1, 2, 0), v.transpose(0, 1)
    later = _additive(torch.ones(QUERY_BLOCK, QUERY_BLOCK).tril_().bool(), q.dtype)
    out = torch.empty(queries, heads, head_dim, dtype=q.dtype, device=q.device)
    for first in range(0, queries, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, queries)
        size, seen = last - first, keys - queries + last
        block = scaled[first:last].permute(1, 2, 0, 3).reshape(kv_heads, group * size, head_dim)
        scores = torch.matmul(block, k[:, :, :seen]).view(kv_heads, group, size, seen)
        if mask is None:
            scores[..., -size:] += later[:size, :size]
        else:
            scores += mask[first:last, :seen]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        found = torch.matmul(weights.view(kv_heads, group * size, seen), v[:, :seen])
        out[first:last] = found.view(kv_heads, group, size, head_dim).permute(2, 0, 1, 3).reshape(size, heads, head_dim)
    return out
