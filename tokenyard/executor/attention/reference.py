"""Attention over the paged pool by gathering keys. It runs on any device and is the reference for faster kernels.

Decode rows are gathered into padded groups of like length and attend together; each chunk attends by itself. Keys are
gathered head by head, so that the products that follow read them in a row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.attention.backend import AttentionSpec
from tokenyard.executor.attention.torch_native import additive, choose_torch_attention
from tokenyard.executor.forward_batch import ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool

PADDING_TOKENS = 64
PADDING_SHARE = 0.25
"""A decode row joins a group if it is padded by at most this many tokens, or this share of the group's length; lengths
are those of whole blocks where keys attend in such."""

GATHER_BYTES = 1 << 29
"""Decode rows attend in groups whose gathered keys and values take at most this much, or one row's. The pool's size is
no bound: rows that share a prefix each get a copy of it."""

MASK_ELEMENTS = 1 << 24
"""Queries that need a mask attend in blocks whose mask has at most this many elements."""


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows that attend together.

    index: their places in the batch, None for rows 0 .. rows - 1.
    rows: how many there are.
    vectors: int32[rows * kv heads * length], which head vectors of the pool they read, head by head.
    mask: [rows, 1, 1, length] to add, or None if all rows have that length.
    """

    index: torch.Tensor | None
    rows: int
    vectors: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class _ChunkBlock:
    """A block of queries of one row.

    first, last: its tokens are first .. last - 1 of the batch.
    vectors: int32[kv heads * keys], or None where the keys are those of the same tokens, just computed.
    start, mask: see TorchAttention.chunk.
    """

    first: int
    last: int
    vectors: torch.Tensor | None
    start: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _StepAttention:
    groups: list[_DecodeGroup]
    blocks: list[_ChunkBlock]


class GatherAttention:
    """An AttentionBackend in plain torch: it gathers the keys and values of rows and attends over the copies."""

    def __init__(self, pool: KvPool, pages: PageTable, spec: AttentionSpec) -> None:
        self._pool = pool
        self._pages = pages
        self._windows = spec.windows
        self._kv_heads, self._head_dim = pool.tensor.shape[3:]
        self._head_numbers = torch.arange(self._kv_heads, dtype=torch.int32, device=pool.tensor.device)[:, None]
        self._attend = choose_torch_attention(pool.tensor.device, spec)
        self.workspace = pool.tensor.new_empty(2, 0, self._head_dim)

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute which vectors of the pool and which masks the step needs; see AttentionBackend."""
        for window in dict.fromkeys(self._windows):
            batch.attention[window] = _StepAttention(
                self._decode_groups(batch, window) if batch.decode_rows else [],
                self._chunk_blocks(batch, window),
            )

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store keys and values and attend; see AttentionBackend."""
        keys, values = self._pool.layer(layer)
        keys.index_copy_(0, batch.slots, k)
        values.index_copy_(0, batch.slots, v)
        step: _StepAttention = batch.attention[self._windows[layer]]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in step.groups:
            queries = q[: group.rows] if group.index is None else q[group.index]
            found = self._attend.decode(layer, queries, *self._gather(layer, group.vectors, group.rows), group.mask)
            if group.index is None:
                out[: group.rows] = found
            else:
                out[group.index] = found
        for block in step.blocks:
            own = slice(block.first, block.last)
            if block.vectors is None:
                seen = k[own].transpose(0, 1).contiguous(), v[own].transpose(0, 1).contiguous()
            else:
                seen = self._gather(layer, block.vectors)
            out[own] = self._attend.chunk(layer, q[own], *seen, block.start, block.mask)
        return out.flatten(1)

    def _gather(self, layer: int, vectors: torch.Tensor, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [*rows, kv heads, keys, head_dim]; they are valid until the next call."""
        count = len(vectors)
        if self.workspace.shape[1] < count:
            # One space for all layers and steps: on a CPU, fresh memory of this size costs more than filling it. With
            # room to spare, because each step of a decode needs a little more than the one before.
            self.workspace = self.workspace.new_empty(2, 0, self._head_dim)
            self.workspace = self.workspace.new_empty(2, count + count // 4, self._head_dim)
        found = []
        for source, target in zip(self._pool.layer(layer), self.workspace, strict=True):
            target = target[:count]
            torch.index_select(source.view(-1, self._head_dim), 0, vectors, out=target)
            found.append(target.view(*rows, self._kv_heads, -1, self._head_dim))
        return found[0], found[1]

    def _vectors(self, slots: torch.Tensor) -> torch.Tensor:
        """Numbers of the head vectors in slots [..., keys], as if the pool were one list: int32[... * heads * keys]."""
        return (slots.unsqueeze(-2) * self._kv_heads + self._head_numbers).flatten().to(torch.int32)

    def _decode_groups(self, batch: ForwardBatch, window: int) -> list[_DecodeGroup]:
        lengths = batch.starts[: batch.decode_rows] + 1
        if window:
            lengths = np.minimum(lengths, window)
        multiple = self._attend.key_multiple
        padded = -(-lengths // multiple) * multiple
        bytes_per_token = 2 * self._kv_heads * self._head_dim * self._pool.tensor.itemsize
        groups = []
        for members in group_by_length(padded, GATHER_BYTES // bytes_per_token):
            whole = len(members) == len(lengths)
            index = None if whole else upload((members,), batch.positions.device)[0]
            groups.append(self._decode_group(batch, index, lengths[members], int(padded[members].max()), window))
        return groups

    def _decode_group(
        self, batch: ForwardBatch, index: torch.Tensor | None, lengths: npt.NDArray[np.int64], longest: int, window: int
    ) -> _DecodeGroup:
        rows = batch.pool_rows[: batch.decode_rows]
        last = batch.positions[: batch.decode_rows]
        if index is not None:
            rows, last = rows[index], last[index]
        # Keys end at the row's own position and begin at 0, or where the window begins.
        first = (last - (window - 1)).clamp_min_(0) if window else torch.zeros_like(last)
        positions = first[:, None] + torch.arange(longest, device=last.device)
        seen = positions <= last[:, None]
        # Padding reads the row's first token: masked, but finite, whatever other requests have left in the pool.
        slots = self._pages.slots(rows[:, None], torch.where(seen, positions, 0))
        mask = None
        if int(lengths.min()) < longest:
            mask = additive(seen, self._pool.tensor.dtype)[:, None, None, :]
        return _DecodeGroup(index, len(lengths), self._vectors(slots), mask)

    def _chunk_blocks(self, batch: ForwardBatch, window: int) -> list[_ChunkBlock]:
        blocks: list[_ChunkBlock] = []
        first = batch.decode_rows
        for start, count in zip(
            batch.starts[batch.decode_rows :].tolist(), batch.counts[batch.decode_rows :].tolist(), strict=True
        ):
            end = start + count
            if (start and not self._attend.plain_prefix) or (window and end > window):
                blocks += self._masked_blocks(batch, first, start, count, window)
            else:
                multiple = self._attend.key_multiple
                plain = not start and multiple == 1
                vectors = None if plain else self._vectors_of_row(batch, first, 0, end, -end % multiple)
                blocks.append(_ChunkBlock(first, first + count, vectors, start, None))
            first += count
        return blocks

    def _masked_blocks(self, batch: ForwardBatch, first: int, start: int, count: int, window: int) -> list[_ChunkBlock]:
        """Cut a chunk whose queries do not simply see all before them into blocks of queries with a bounded mask."""
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
            mask = additive(seen, self._pool.tensor.dtype)
            vectors = self._vectors_of_row(batch, first, key_begin, begin + queries)
            blocks.append(_ChunkBlock(first + offset, first + offset + queries, vectors, begin - key_begin, mask))
        return blocks

    def _vectors_of_row(self, batch: ForwardBatch, token: int, begin: int, end: int, padding: int = 0) -> torch.Tensor:
        """Vectors of positions begin .. end - 1 of the row that a token of the batch belongs to, and of its first
        position `padding` times more, which the causal mask hides.
        """
        # A slice, not an element: indexing by a single device number would wait for the device.
        row = batch.pool_rows[token : token + 1]
        positions = torch.arange(begin, end + padding, device=row.device)
        positions[end - begin :] = begin
        return self._vectors(self._pages.slots(row, positions))


def group_by_length(lengths: npt.NDArray[np.int64], max_group_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Group rows of similar length, so that short rows are not padded to a long one: lists of indices.

    A group has one row, or at most `max_group_tokens` tokens with its padding.
    """
    longest = int(lengths.max())
    alike = longest - int(lengths.min()) <= max(PADDING_TOKENS, PADDING_SHARE * longest)
    if alike and len(lengths) * longest <= max_group_tokens:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while len(order):
        longest = int(lengths[order[0]])
        enough = longest - max(PADDING_TOKENS, PADDING_SHARE * longest)
        members = int(np.searchsorted(-lengths[order], -enough, side="right"))
        members = max(1, min(members, max_group_tokens // longest))
        groups.append(order[:members])
        order = order[members:]
    return groups
