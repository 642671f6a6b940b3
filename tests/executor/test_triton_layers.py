"""Triton's norms, rotation, writes of keys and values, and gates against torch's."""

import pytest
import torch

from tests.executor.checked_backends import MAX_DROPPED, ROUNDING, numbers_of
from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton
from tokenyard.executor.kv_pool import KV_BYTES, SCALE_BYTES

need_triton()

from tokenyard.executor.attention.backend import KvSlots  # noqa: E402
from tokenyard.executor.attention.triton.layer_kernels import add_norm, norm, rotate_and_store, silu_gate  # noqa: E402
from tokenyard.executor.attention.triton.packed_kv import store_packed  # noqa: E402
from tokenyard.executor.layers.mlp import silu  # noqa: E402
from tokenyard.executor.layers.norm import RMSNorm  # noqa: E402
from tokenyard.executor.layers.rotary import rotate  # noqa: E402

EPS = 1e-5


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [8, 120, 576, 1024])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms(rows, size):
    x, other, weight = draw(rows, size), draw(rows, size) * 3, draw(size)
    judge = RMSNorm(weight, EPS)
    close(norm(x, weight, EPS), judge(x))
    summed, normed = add_norm(x, other, weight, EPS)
    assert torch.equal(summed, x + other)
    close(normed, judge(x + other))


def test_norms_read_rows_of_wider_tensors():
    wide, weight = draw(4, 96), draw(40)
    close(norm(wide[:, :40], weight, EPS), RMSNorm(weight, EPS)(wide[:, :40]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(4, 2, 16, 16), (3, 1, 40, 40), (14, 2, 64, 48), (1, 1, 256, 256), (2, 2, 80, 40)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_writes(heads, kv_heads, head_dim, rotated, normed):
    tokens, slots = 7, torch.tensor([3, 19, 0, 7, 8, 12, 5], device=DEVICE)
    qkv, cos_sin = draw(tokens, heads + 2 * kv_heads, head_dim), draw(tokens, 2, 1, rotated // 2)
    weight = draw(heads + kv_heads, head_dim) if normed else None
    pool = torch.full((2, 20, kv_heads, head_dim), float("nan"), device=DEVICE)
    found = rotate_and_store(qkv, cos_sin, KvSlots(slots, pool[0], pool[1]), weight, EPS)
    qk = qkv[:, : heads + kv_heads]
    expected = rotate(qk if weight is None else RMSNorm(weight, EPS)(qk), cos_sin)
    close(found, expected[:, :heads])
    close(pool[0, slots], expected[:, heads:])
    assert torch.equal(pool[1, slots], qkv[:, heads + kv_heads :])
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[slots] = False
    assert pool[:, untouched].isnan().all()


@pytest.mark.parametrize("kind", KV_BYTES.values(), ids=KV_BYTES)
def test_rotation_rounds_what_it_writes_to_bytes(kind):
    heads, kv_heads, head_dim = 3, 2, 40
    slots = torch.tensor([3, 19, 0], device=DEVICE)
    qkv, cos_sin = draw(3, heads + 2 * kv_heads, head_dim), draw(3, 2, 1, 10)
    numbers = torch.full((2, 20, kv_heads, head_dim), float("nan"), device=DEVICE)
    pool = torch.full((2, 20, kv_heads, head_dim + SCALE_BYTES), 0xFF, dtype=torch.uint8, device=DEVICE)
    expected = rotate_and_store(qkv, cos_sin, KvSlots(slots, numbers[0], numbers[1]), None, EPS)
    found = rotate_and_store(qkv, cos_sin, KvSlots(slots, pool[0], pool[1], kind), None, EPS)
    close(found, expected)
    apart = torch.full_like(pool, 0xFF)
    store_packed(apart[0], apart[1], slots, kind, numbers[0, slots], numbers[1, slots])
    # The product with a cosine may be fused with the sum in one kernel and not in the other.
    off = numbers_of(pool[:, slots], kind) - numbers[:, slots]
    tolerance = ROUNDING[kind] * numbers[:, slots].abs().amax(-1, keepdim=True)
    assert (off.abs() > tolerance).double().mean() <= MAX_DROPPED[kind]
    assert (pool != apart).double().mean() < 0.01
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[slots] = False
    assert (pool[:, untouched] == 0xFF).all()


@pytest.mark.parametrize("size", [8, 200, 1500])
def test_gates_read_halves_of_a_product(size):
    gate, up = draw(3, 2 * size).chunk(2, dim=-1)
    close(silu_gate(gate, up), silu(gate, up))
