"""Keys and values of one byte in Triton's kernels: a head of a token has its numbers and then their scale, a float32.

The layout is that of the native kernels, so that pages of a CPU and of a GPU are the same.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN201, ANN202, SIM300

import torch
import triton
import triton.language as tl

from tokenyard.executor.kv_pool import SCALE_BYTES as _SCALE_BYTES

SCALE_BYTES = tl.constexpr(_SCALE_BYTES)
TRITON_KINDS = {
    None: None,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
"""Triton's names of the kinds of pools, see KvPool."""


@triton.jit
def load_scales(side, place, there):
    """Load the float32 that lie at the bytes `place` of a side of the pool, 0 where not `there`."""
    return tl.load((side + place).to(tl.pointer_type(tl.float32)), there, other=0.0)


@triton.jit
def store_heads(side, place, x, real, own, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Round heads x, float32[heads, dimensions], and store them at the bytes `place` of a side of the pool.

    real: where x has numbers, which are 0 elsewhere. own: which heads are to be stored.
    """
    largest: tl.constexpr = 127.0 if KIND == tl.int8 else (448.0 if KIND == tl.float8e4nv else 57344.0)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / largest
    # A maximum drops a NaN, which must not become a number.
    scale += tl.sum(tl.where(x != x, x, 0.0), 1)
    x = tl.minimum(tl.maximum(x / scale[:, None], -largest), largest)
    if KIND == tl.int8:
        x = tl.floor(x + 0.5)
    d = tl.arange(0, x.shape[1])
    code = x.to(KIND).to(tl.uint8, bitcast=True)
    tl.store(side + place[:, None] + d[None, :], code, real & own[:, None])
    tl.store((side + place + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale, own)


@triton.jit
def _store_kernel(
    keys,
    values,
    k,
    v,
    slots,
    k_stride,
    v_stride,
    SLOT_STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All heads of one token."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    own = head < HEADS
    real = own[:, None] & (d < HEAD_DIM)[None, :]
    place = tl.load(slots + token) * SLOT_STRIDE + head * (HEAD_DIM + SCALE_BYTES)
    number = head[:, None] * HEAD_DIM + d[None, :]
    x = tl.load(k + token * k_stride + number, real, other=0.0).to(tl.float32)
    store_heads(keys, place, x, real, own, HEAD_DIM, KIND)
    x = tl.load(v + token * v_stride + number, real, other=0.0).to(tl.float32)
    store_heads(values, place, x, real, own, HEAD_DIM, KIND)


def store_packed(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, kind: torch.dtype, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Round keys and values ([T, kv heads, head_dim]) and write them to their slots (int64[T]).

    keys, values: a layer's pool, uint8[slot, kv heads, head_dim + SCALE_BYTES]. kind: see KvPool.
    """
    tokens, heads, head_dim = k.shape
    k, v = (side if side.stride()[1:] == (head_dim, 1) else side.contiguous() for side in (k, v))
    if tokens:
        _store_kernel[tokens,](
            *(keys, values, k, v, slots, k.stride(0), v.stride(0)),
            SLOT_STRIDE=keys.stride(0),
            KIND=TRITON_KINDS[kind],
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(head_dim),
        )
