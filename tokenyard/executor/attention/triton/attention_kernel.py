"""The attention kernel: blocks of queries of one row attend over the row's slots, read through the page table.

Keys are walked in tiles with a running softmax (Dao et al. 2022, arXiv 2205.14135). Where a block has few queries its
keys are cut into splits that are worked on at once and joined afterwards (Flash-Decoding, Dao et al. 2023). How keys
are cut depends on the row's length alone, so that an answer does not depend on what else is in the batch, and nothing
about a launch depends on lengths, so that it can be captured in a CUDA graph.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenyard.executor.attention.triton.packed_kv import SCALE_BYTES, TRITON_KINDS, load_scales

SPLITS = 16
"""Most splits of the keys of a row that decodes."""
SPLIT_KEYS = 256
"""Fewest keys of a split; more where the row is longer than its splits times that."""
MIN_SPLIT_PROGRAMS = 4
"""Fewest programs that share the splits of a block, so that a long row among many is not left to one."""
FULL_DEVICE_PROGRAMS = 2048
"""Programs of a launch beyond which more would only wait for their turn; the largest devices run some 700 at once."""
MAX_TILE_ROWS = 64
"""Queries times heads that a program works on, in a launch of long blocks."""
MAX_FLOAT32_TILE_ROWS = 16
"""The same in float32, whose products use no tensor cores: with more, a thread spills its registers by kilobytes."""
DECODE_STAGES, CHUNK_STAGES = 5, 3
"""Triton's num_stages of launches with splits, and of those with long blocks; see decode_stages."""
LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities of devices with 99 KiB a block, which would run one program with DECODE_STAGES and run two with
CHUNK_STAGES.
"""

COLUMNS = ("positions", "pool_rows", "tokens", "counts", "places", "owners")
"""Arguments that may begin at any number of an upload. A kernel must not be compiled again where one is not aligned."""


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Queries that attend in one launch. In a captured step some blocks have none.

    tokens: int64[blocks], the first token of each block in the batch.
    counts: int64[blocks], how many of the row's queries from there on are in the block, at most `size`; 0 for none.
    size: the most queries of a block.
    splits: into how many parts keys are cut at most, a power of two.
    stages: Triton's num_stages.
    scratch: where the splits are joined, None without splits.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    size: int
    splits: int
    stages: int = CHUNK_STAGES
    scratch: "SplitScratch | None" = None


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """What splits find, until they are joined: a line for each query.

    places: int64[blocks], the line of the first query of each block.
    owners: int64[lines], the block of each line. A line that is not of a query of its block is not used.
    partial: float32[lines * heads * splits * head_dim], outputs.
    sums: float32[lines * heads * splits].
    """

    places: torch.Tensor
    owners: torch.Tensor
    partial: torch.Tensor
    sums: torch.Tensor


@triton.jit
def _split_size(keys, SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of a split of a row that has so many: the same for every batch that the row is in."""
    share = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(share, SPLIT_KEYS)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _attend_kernel(
    out,
    partial,
    sums,
    q,
    keys,
    values,
    sinks,
    table,
    positions,
    pool_rows,
    tokens,
    counts,
    places,
    q_stride,
    table_stride,
    scale,
    softcap,
    heads,
    SLOT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, kv_head = tl.program_id(0), tl.program_id(1)
    # A head of bytes has its scale behind it.
    head_stride: tl.constexpr = HEAD_DIM if KIND is None else HEAD_DIM + SCALE_BYTES
    first = tl.load(tokens + block)
    count = tl.load(counts + block)
    begin = tl.load(positions + first).to(tl.int32)
    row = tl.load(pool_rows + first)
    # The end of the keys of the block's last query, and where the first query's window begins.
    last = begin + count.to(tl.int32)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(begin - (WINDOW - 1), 0)
    # How many keys the block sees; none without queries.
    reach = tl.where(count > 0, last - start, 0)
    size = tl.maximum(reach, 1)
    if SPLITS > 1:
        size = _split_size(reach, SPLITS, SPLIT_KEYS, BLOCK_N)
        own_line = tl.load(places + block)
    m = tl.arange(0, BLOCK_M)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    real = (query < count)[:, None] & (d < HEAD_DIM)[None, :]
    own = tl.load(q + (first + query)[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :], real, other=0.0)
    # A launch has fewer programs than splits where the batch is large, so that few of them find nothing to do.
    for split in range(tl.program_id(2), tl.cdiv(reach, size), tl.num_programs(2)):
        low = start + split * size
        high = tl.minimum(low + size, last)
        # Scores are kept in base 2, because exp2 is what the hardware has.
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS and SPLITS == 1:
            best = tl.load(sinks + head, query < count, other=0.0) * 1.4426950408889634
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for begin_n in range(low, high, BLOCK_N):
            n = begin_n + tl.arange(0, BLOCK_N)
            page = tl.load(table + row * table_stride + n // PAGE, n < high, other=0).to(tl.int64)
            place = (page * PAGE + n % PAGE) * SLOT_STRIDE + kv_head * head_stride
            there = (n < high)[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + place[:, None] + d[None, :], there, other=0.0)
            if KIND is not None:
                k = k.to(KIND, bitcast=True).to(own.dtype)
            scores = tl.dot(own, tl.trans(k), input_precision="ieee") * scale
            if KIND is not None:
                scores = scores * load_scales(keys, place + HEAD_DIM, n < high)[None, :]
            if SOFTCAP:
                # tanh(x) is 2 * sigmoid(2 x) - 1.
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            seen = (n[None, :] <= (begin + query)[:, None]) & (n < high)[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > (begin + query - WINDOW)[:, None])
            scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
            now = tl.maximum(best, tl.max(scores, 1))
            # A query may see nothing of a tile; -inf less -inf would be no number.
            base = tl.where(now == float("-inf"), 0.0, now)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(best - base)
            total = total * kept + tl.sum(weights, 1)
            v = tl.load(values + place[:, None] + d[None, :], there, other=0.0)
            if KIND is not None:
                weights = weights * load_scales(values, place + HEAD_DIM, n < high)[None, :]
                v = v.to(KIND, bitcast=True).to(own.dtype)
            found = found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = now
        found = found / tl.where(total > 0.0, total, 1.0)[:, None]
        if SPLITS > 1:
            line = ((own_line + query) * heads + head) * SPLITS + split
            tl.store(partial + line[:, None] * HEAD_DIM + d[None, :], found, real)
            tl.store(sums + line, best + tl.log2(total), query < count)
        else:
            line = (first + query) * heads + head
            tl.store(out + line[:, None] * HEAD_DIM + d[None, :], found.to(out.dtype.element_ty), real)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _join_kernel(
    out,
    partial,
    sums,
    sinks,
    positions,
    tokens,
    counts,
    places,
    owners,
    heads,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the splits of one query and head."""
    head = tl.program_id(1)
    block = tl.load(owners + tl.program_id(0))
    query = tl.program_id(0) - tl.load(places + block)
    count = tl.load(counts + block)
    if query < count:
        first = tl.load(tokens + block)
        begin = tl.load(positions + first).to(tl.int32)
        last = begin + count.to(tl.int32)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(begin - (WINDOW - 1), 0)
        keys = last - low
        used = tl.cdiv(keys, _split_size(keys, SPLITS, SPLIT_KEYS, BLOCK_N))
        split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
        line = (tl.program_id(0).to(tl.int64) * heads + head) * SPLITS + split
        mass = tl.load(sums + line, split < used, other=float("-inf"))
        best = tl.max(mass, 0)
        if SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
            best = tl.maximum(best, sink)
        weights = tl.exp2(mass - best)
        total = tl.sum(weights, 0)
        if SINKS:
            total += tl.exp2(sink - best)
        # A split that a query sees nothing of (before its window) has found zeros and weighs nothing.
        there = (split < used)[:, None] & (d < HEAD_DIM)[None, :]
        parts = tl.load(partial + line[:, None] * HEAD_DIM + d[None, :], there, other=0.0)
        found = tl.sum(parts * weights[:, None], 0) / total
        place = out + ((first + query) * heads + head) * HEAD_DIM + d
        tl.store(place, found.to(out.dtype.element_ty), d < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attends in one launch, and how (see AttentionSpec).

    q: [T, heads, head_dim], with the heads of a token in a row of memory.
    keys: [slot, kv heads, head_dim] of one layer; of a pool of bytes as KvPool has them.
    values: the same of the same layer.
    window: how many positions back a query attends.
    scale: factor on the scores.
    softcap: bound of the scores, 0 for none.
    sinks: float32[heads], or None.
    kind: of a pool of bytes, see KvPool.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    window: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    kind: torch.dtype | None = None


def attend(
    blocks: QueryBlocks,
    layer: AttentionInputs,
    table: torch.Tensor,
    page_size: int,
    positions: torch.Tensor,
    pool_rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write into out [T, heads, head_dim] what the queries of `blocks` find. table: int32[pool row, column]; positions,
    pool_rows: int64[T]. The keys of the queries' own tokens must be in the pool.
    """
    heads, head_dim = layer.q.shape[1:]
    kv_heads = layer.keys.shape[1]
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    block_n = key_tile(head_dim, layer.q.dtype)
    none = out  # a pointer that no kernel follows
    constants = {
        "HEAD_DIM": head_dim,
        "WINDOW": layer.window,
        "SINKS": layer.sinks is not None,
        "SPLITS": blocks.splits,
        "SPLIT_KEYS": SPLIT_KEYS,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }
    sinks = none if layer.sinks is None else layer.sinks
    scratch = blocks.scratch or SplitScratch(blocks.tokens, blocks.tokens, none, none)
    count = len(blocks.tokens)
    _attend_kernel[count, kv_heads, split_programs(blocks.splits, count * kv_heads)](
        *(out, scratch.partial, scratch.sums, layer.q, layer.keys, layer.values, sinks),
        *(table, positions, pool_rows, blocks.tokens, blocks.counts, scratch.places),
        *(layer.q.stride(0), table.stride(0), layer.scale, layer.softcap or 1.0, heads),
        **constants,
        # Not an argument: where it is no multiple of 16, as of bytes, the compiler would know of no alignment at all.
        SLOT_STRIDE=layer.keys.stride(0),
        KIND=TRITON_KINDS[layer.kind],
        GROUP=group,
        PAGE=page_size,
        SOFTCAP=bool(layer.softcap),
        BLOCK_M=max(16, triton.next_power_of_2(blocks.size * group)),
        num_warps=4 if head_dim * layer.q.dtype.itemsize <= 256 else 8,
        num_stages=blocks.stages,
    )
    if blocks.splits > 1:
        _join_kernel[len(scratch.owners), heads](
            *(out, scratch.partial, scratch.sums, sinks, positions, blocks.tokens, blocks.counts),
            *(scratch.places, scratch.owners, heads),
            **constants,
        )


def key_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many keys a program looks at at once, so that keys and values fit shared memory twice."""
    return 64 if head_dim * dtype.itemsize <= 256 else 32


def block_size(group: int, dtype: torch.dtype) -> int:
    """Return how many queries of a long run a block takes, for so many query heads per key-value head."""
    rows = MAX_TILE_ROWS if dtype.itemsize <= 2 else MAX_FLOAT32_TILE_ROWS
    return max(1, rows // group)


def split_programs(splits: int, others: int) -> int:
    """Return how many programs share the splits of a block, where a launch has `others` blocks and heads."""
    if splits <= MIN_SPLIT_PROGRAMS:
        return splits
    wanted = max(1, FULL_DEVICE_PROGRAMS // max(others, 1))
    return max(MIN_SPLIT_PROGRAMS, min(splits, 1 << (wanted.bit_length() - 1)))


def decode_stages(device: torch.device) -> int:
    """Return Triton's num_stages of a launch with splits, by the shared memory of a device.

    A decode reads keys and values once and computes little, so its speed is that of the loads in flight. 5 stages keep
    two tiles of each there (72 KiB for 128 dimensions), 3 keep one.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) in LITTLE_SHARED_MEMORY:
        return CHUNK_STAGES
    return DECODE_STAGES
