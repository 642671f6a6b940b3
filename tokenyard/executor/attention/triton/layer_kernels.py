"""Kernels for what a layer does around its products: norms, rotation with the write of keys and values, gating."""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

from tokenyard.executor.attention.backend import KvSlots
from tokenyard.executor.attention.triton.packed_kv import SCALE_BYTES, TRITON_KINDS, store_heads

GATE_BLOCK = 1024


@triton.jit
def _norm_kernel(
    out,
    summed,
    x,
    other,
    weight,
    x_stride,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + i, i < size, other=0.0)
    if ADD:
        value += tl.load(other + row * size + i, i < size, other=0.0)
        # What is stored is rounded, and the norm is that of what is stored.
        tl.store(summed + row * size + i, value, i < size)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    found = value * scale * tl.load(weight + i, i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, found.to(out.dtype.element_ty), i < size)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of [rows, size], times weight [size]; computed in float32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(out, out, x, x, weight, eps, add=False)
    return out


def add_norm(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + other, and the RMS norm of it; both [rows, size], the last one like `norm`'s."""
    out, summed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(out, summed, x, other.contiguous(), weight, eps, add=True)
    return summed, out


def _launch_norm(
    out: torch.Tensor,
    summed: torch.Tensor,
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    rows, size = x.shape
    if rows:
        block = triton.next_power_of_2(size)
        warps = min(16, max(1, block // 512))
        _norm_kernel[rows,](
            out, summed, x, other, weight, x.stride(0), size, eps, ADD=add, BLOCK=block, num_warps=warps
        )


@triton.jit
def _rotate_kernel(
    q,
    keys,
    values,
    qkv,
    cos_sin,
    slots,
    weight,
    qkv_stride,
    eps,
    SLOT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some heads of one token: norm, rotation of the first 2 * HALF dimensions, and their way to q or to the pool."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    d = tl.arange(0, BLOCK_D)
    own = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    turned = (head < HEADS + KV_HEADS)[:, None]
    x = tl.load(own + d[None, :], real, other=0.0).to(tl.float32)
    # The dimension that each one is rotated with, half of the rotated ones away.
    mate = tl.where(d < HALF, d + HALF, d - HALF)
    in_turn = turned & (d < 2 * HALF)[None, :]
    y = tl.load(own + mate[None, :], real & in_turn, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weights = weight + head[:, None] * HEAD_DIM
        x = tl.where(turned, x * scale * tl.load(weights + d[None, :], real & turned, other=0.0).to(tl.float32), x)
        y = y * scale * tl.load(weights + mate[None, :], real & in_turn, other=0.0).to(tl.float32)
    angle = cos_sin + token * (2 * HALF) + tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angle, d < 2 * HALF, other=1.0)[None, :]
    sin = tl.load(angle + HALF, d < 2 * HALF, other=0.0)[None, :]
    sin = tl.where((d < HALF)[None, :], -sin, sin)
    x = tl.where(in_turn, x * cos + y * sin, x)
    is_q = head < HEADS
    to_q = q + (token * HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(to_q, x.to(q.dtype.element_ty), real & is_q[:, None])
    slot = tl.load(slots + token) * SLOT_STRIDE
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    if KIND is None:
        to_k = keys + slot + k_head[:, None] * HEAD_DIM + d[None, :]
        tl.store(to_k, x.to(keys.dtype.element_ty), real & is_k[:, None])
        to_v = values + slot + v_head[:, None] * HEAD_DIM + d[None, :]
        tl.store(to_v, x.to(values.dtype.element_ty), real & is_v[:, None])
    else:
        store_heads(keys, slot + k_head * (HEAD_DIM + SCALE_BYTES), x, real, is_k, HEAD_DIM, KIND)
        store_heads(values, slot + v_head * (HEAD_DIM + SCALE_BYTES), x, real, is_v, HEAD_DIM, KIND)


def rotate_and_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    place: KvSlots,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Rotate queries and keys and write keys and values into their slots; returns the queries [T, heads, head_dim].

    qkv: [T, heads + 2 kv heads, head_dim] as the product gave it. cos_sin: float32[T, 2, 1, rotated / 2], see
    Rotary.at. norm_weight: [heads + kv heads, head_dim] of a norm of each head before its rotation, or None.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = place.keys.shape[1]
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    block_d = triton.next_power_of_2(head_dim)
    tile = max(1, min(triton.next_power_of_2(all_heads), 1024 // block_d))
    _rotate_kernel[tokens, triton.cdiv(all_heads, tile)](
        *(q, place.keys, place.values, qkv, cos_sin, place.slots, q if norm_weight is None else norm_weight),
        *(qkv.stride(0), eps),
        SLOT_STRIDE=place.keys.stride(0),
        KIND=TRITON_KINDS[place.kind],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=cos_sin.shape[-1],
        NORM=norm_weight is not None,
        TILE_HEADS=tile,
        BLOCK_D=block_d,
    )
    return q


@triton.jit
def _silu_kernel(out, gate, up, gate_stride, up_stride, size, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_stride + i, i < size, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + i, i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), i < size)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, size], which may be halves of one tensor; computed in float32."""
    rows, size = gate.shape
    out = torch.empty(rows, size, dtype=gate.dtype, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(size, GATE_BLOCK))
        _silu_kernel[grid](out, gate, up, gate.stride(0), up.stride(0), size, BLOCK=GATE_BLOCK)
    return out
