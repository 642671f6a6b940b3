"""The native kernels of every instruction set against float64, on random inputs, odd sizes and poisoned memory.

Bounds: float32 results stay within a few hundred roundings of the sum of magnitudes, bfloat16 ones within two
roundings of bfloat16 of it in addition to those of inputs, which are exact here.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tokenyard.executor.attention.backend import AttentionSpec
from tokenyard.executor.formats.weight_format import INT8, STORED
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.native.attention import NativeAttention
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
NAN = float("nan")


def engine(level, threads=2):
    return NativeRuntime(LIBRARY, threads, level)


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(on, x, weights, bias=None, gated=False, int8=False):
    """Multiply by the library; the output is poisoned first."""
    rows, inputs = x.shape
    outputs = len(weights)
    active = on.active_dtype(weights.dtype)
    out = torch.full((rows, outputs // 2 if gated else outputs), NAN, dtype=active if gated else torch.float32)
    given = x.to(active).contiguous()
    formats, sizes = (ctypes.c_int32 * 1)(INT8 if int8 else STORED), (ctypes.c_int64 * 1)(outputs)
    functions = on.functions
    linear = functions.ty_linear_new(on.pool, on.level, DTYPES[weights.dtype], inputs, gated, 1, formats, sizes)
    assert linear
    functions.ty_linear_set(linear, 0, address(weights), None if bias is None else address(bias))
    assert not functions.ty_linear_run(linear, address(given), rows, address(out))
    functions.ty_linear_free(linear)
    return out


SIZES = [
    (1, 2, 1),
    (1, 576, 67),
    (3, 34, 16),
    (7, 48, 130),
    (13, 66, 33),
    (5, 33, 20),
    (49, 20, 47),
    (130, 64, 96),
    (200, 96, 31),
]


@KERNELS
@DTYPE
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_products(level, dtype, rows, inputs, outputs, with_bias):
    x = random(rows, inputs, seed=1, dtype=dtype)
    weights = random(outputs, inputs, seed=2, dtype=dtype)
    bias = random(outputs, seed=3) if with_bias else None
    found = product(engine(level), x, weights, bias)
    expected = x.double() @ weights.double().T + (bias.double() if with_bias else 0.0)
    magnitude = x.double().abs() @ weights.double().abs().T + 1.0
    # Products are summed in float32 whatever the inputs.
    assert ((found - expected).abs() <= 64 * ROUNDING[torch.float32] * magnitude).all()


@KERNELS
@DTYPE
@pytest.mark.parametrize(("rows", "inputs", "half"), [(1, 32, 5), (6, 48, 80), (20, 66, 33), (3, 37, 9), (100, 34, 16)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_gated_products(level, dtype, rows, inputs, half, with_bias):
    x = random(rows, inputs, seed=4, dtype=dtype)
    weights = random(2 * half, inputs, seed=5, dtype=dtype)
    bias = random(2 * half, seed=6) if with_bias else None
    found = product(engine(level), x, weights, bias, gated=True)
    both = x.double() @ weights.double().T + (bias.double() if with_bias else 0.0)
    expected = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    magnitude = (x.double().abs() @ weights.double().abs().T + 1.0).view(rows, 2, half).prod(dim=1)
    bound = 64 * ROUNDING[torch.float32] * magnitude + 2 * ROUNDING[found.dtype] * expected.abs()
    assert ((found.double() - expected).abs() <= bound).all()


@KERNELS
@DTYPE
@pytest.mark.parametrize("int8", [False, True], ids=["as stored", "int8"])
def test_a_row_does_not_depend_on_the_others(level, dtype, int8):
    on = engine(level)
    x, weights = random(61, 96, seed=7, dtype=dtype), random(70, 96, seed=8, dtype=dtype)
    whole = product(on, x, weights, int8=int8)
    for rows in (1, 2, 5, 6, 7, 12, 13, 48, 60):
        assert torch.equal(product(on, x[:rows].contiguous(), weights, int8=int8), whole[:rows])


def rounded(x):
    """Rows as bytes, and the scale of each, in float64."""
    top = x.float().abs().amax(dim=1, keepdim=True)
    # A number is divided by a tensor by way of its reciprocal, which rounds twice.
    up = torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)
    return (x.float() * up).round().double(), top.double() / 127


@KERNELS
@DTYPE
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_int8_products(level, dtype, rows, inputs, outputs, with_bias):
    x, weights = random(rows, inputs, seed=1, dtype=dtype), random(outputs, inputs, seed=2, dtype=dtype)
    x[0] = 0.0
    weights[-1] = 0.0
    bias = random(outputs, seed=3) if with_bias else None
    found = product(engine(level), x, weights, bias, int8=True)
    (bytes_of_x, x_scales), (bytes_of_weights, scales) = rounded(x), rounded(weights)
    sums = (bytes_of_x @ bytes_of_weights.T) * x_scales * scales.T
    expected = sums + (bias.double() if with_bias else 0.0)
    assert ((found - expected).abs() <= 8 * ROUNDING[torch.float32] * (sums.abs() + 1.0)).all()


@KERNELS
@DTYPE
def test_int8_products_are_the_same_by_every_instruction_set(level, dtype):
    x, weights = random(13, 130, seed=9, dtype=dtype), random(67, 130, seed=10, dtype=dtype)
    assert torch.equal(product(engine(level), x, weights, int8=True), product(engine(0), x, weights, int8=True))


@KERNELS
@DTYPE
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_an_odd_number_is_not_hidden_by_rounding(level, dtype, odd):
    x, weights = random(3, 37, seed=11, dtype=dtype), random(20, 37, seed=12, dtype=dtype)
    whole = product(engine(level), x, weights, int8=True)
    x[1, 35] = odd
    found = product(engine(level), x, weights, int8=True)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@KERNELS
@DTYPE
@pytest.mark.parametrize(("rows", "inputs", "half"), [(1, 32, 5), (20, 66, 33), (100, 34, 16)])
def test_gated_int8_products(level, dtype, rows, inputs, half):
    x, weights = random(rows, inputs, seed=4, dtype=dtype), random(2 * half, inputs, seed=5, dtype=dtype)
    on = engine(level)
    found = product(on, x, weights, gated=True, int8=True)
    both = product(on, x, weights, int8=True).double()
    expected = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    bound = 64 * ROUNDING[torch.float32] * (expected.abs() + 1.0) + 2 * ROUNDING[found.dtype] * expected.abs()
    assert ((found.double() - expected).abs() <= bound).all()


@dataclass
class Scene:
    """Rows over a poisoned pool: only the rows' own slots hold numbers."""

    batch: ForwardBatch
    pages: PageTable
    pool: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Pool:
    """As much of a KvPool as attention needs."""

    def __init__(self, tensor, page_size):
        self.tensor, self.page_size = tensor, page_size

    def layer(self, index):
        return self.tensor[index, 0], self.tensor[index, 1]


def scene(rows, heads, kv_heads, dim, page_size, dtype, seed=0):
    """rows: (start, count) pairs."""
    rng = np.random.default_rng(seed)
    starts, counts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    columns = int(-(-(starts + counts).max() // page_size)) + 1
    needed = len(rows) * columns
    ids = rng.permutation(needed).reshape(len(rows), columns) + 1
    pages = PageTable(len(rows) + 2, columns * page_size, page_size, torch.device("cpu"))
    pages.tensor.fill_(2**30)
    pool_rows = rng.permutation(len(rows) + 2)[: len(rows)]
    for row, own in zip(pool_rows, ids, strict=True):
        used = -(-(starts + counts)[list(pool_rows).index(row)] // page_size)
        pages.tensor[row, :used] = torch.from_numpy(own[:used]).to(torch.int32)
    tensor = torch.full((1, 2, (needed + 1) * page_size, kv_heads, dim), NAN, dtype=dtype)
    of_token = torch.from_numpy(np.repeat(pool_rows, counts))
    positions = torch.from_numpy(np.concatenate([np.arange(s, s + c) for s, c in rows]))
    for number, row in enumerate(pool_rows):
        before = pages.slots(torch.tensor([row]), torch.arange(int(starts[number]))).long()
        for side in range(2):
            tensor[0, side, before] = random(len(before), kv_heads, dim, seed=seed + 10 * number + side, dtype=dtype)
    total = int(counts.sum())
    batch = ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=positions,
        slots=pages.slots(of_token, positions).long(),
        pool_rows=of_token,
        logit_tokens=torch.zeros(0, dtype=torch.int64),
        starts=starts,
        counts=counts,
        decode_rows=0,
    )
    q = random(total, heads, dim, seed=seed + 100, dtype=dtype)
    k, v = (random(total, kv_heads, dim, seed=seed + 101 + side, dtype=dtype) for side in range(2))
    return Scene(batch, pages, tensor, q, k, v)


def spec_of(dim, window=0, **facts):
    return AttentionSpec((window,), facts.pop("scale", dim**-0.5), **facts)


def exact(given, spec):
    """Attention in float64, token by token."""
    (window,) = spec.windows
    group = given.q.shape[1] // given.k.shape[1]
    out = torch.empty(given.q.shape, dtype=torch.float64)
    for token, (row, position) in enumerate(zip(given.batch.pool_rows, given.batch.positions, strict=True)):
        first = max(0, int(position) + 1 - window) if window else 0
        slots = given.pages.slots(row, torch.arange(first, int(position) + 1)).long()
        k, v = (given.pool[0, side, slots].double().repeat_interleave(group, dim=1) for side in range(2))
        scores = torch.einsum("hd,nhd->hn", given.q[token].double(), k) * spec.scale
        if spec.softcap:
            scores = (scores / spec.softcap).tanh() * spec.softcap
        if spec.sinks:
            scores = torch.cat((scores, spec.sinks[0].double()[:, None]), dim=1)
        out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(v)], v)
    return out.flatten(1)


SCENES = {
    "one": ([(0, 1)], 1, 1, 8, 1, 0),
    "decode": ([(0, 1), (1, 1), (63, 1), (64, 1), (200, 1)], 9, 3, 64, 1, 0),
    "pages": ([(5, 1), (130, 1)], 8, 1, 40, 16, 0),
    "long": ([(1100, 1), (3, 1)], 4, 2, 128, 4, 0),
    "drafts": ([(70, 5), (0, 3), (511, 4), (30, 1)], 4, 2, 24, 4, 0),
    "chunks": ([(0, 70), (64, 65), (100, 33)], 6, 2, 72, 1, 0),
    "chunk-group7": ([(10, 20), (0, 64)], 14, 2, 64, 16, 0),
    "mixed": ([(90, 1), (17, 1), (129, 60), (0, 33)], 9, 3, 64, 4, 0),
    "wide": ([(40, 1), (20, 50)], 2, 1, 256, 1, 0),
    "odd": ([(40, 2), (3, 40)], 4, 2, 12, 1, 0),
    "window": ([(90, 1), (600, 1), (70, 5), (2, 90), (150, 40)], 4, 2, 32, 4, 37),
    "window-one": ([(9, 1), (20, 30)], 4, 4, 16, 1, 1),
}


@pytest.mark.part(6)
@KERNELS
@DTYPE
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SCENES)
def test_attention(level, dtype, threads, name):
    rows, heads, kv_heads, dim, page_size, window = SCENES[name]
    given = scene(rows, heads, kv_heads, dim, page_size, dtype, seed=len(name))
    spec = spec_of(dim, window)
    attention = NativeAttention(engine(level, threads), Pool(given.pool, page_size), given.pages, spec, heads)
    attention.prepare(given.batch)
    for _ in range(2):  # a second layer finds all counters as the first one did
        found = attention.forward(0, given.q, given.k, given.v, given.batch)
        # Weights and outputs are rounded to the activations' dtype once each; values are about 1.
        bound = 3e-6 if dtype == torch.float32 else 2.5e-2
        assert (found.double() - exact(given, spec)).abs().max() <= bound


FACTS = {
    "scale": {"scale": 0.31},
    "softcap": {"scale": 1.5, "softcap": 4.0},
    "sinks": {"sinks": (torch.tensor([0.5, -3.0, 2.0, 12.0]),)},
    "all": {"scale": 0.7, "softcap": 3.0, "sinks": (torch.tensor([-1.0, 0.0, 1.0, 4.0]),)},
}


@KERNELS
@DTYPE
@pytest.mark.parametrize("name", FACTS)
def test_attention_with_sinks_and_soft_caps(level, dtype, name):
    # A decode of several parts, drafts, a chunk: each with and without a window.
    for window in (0, 37):
        spec = spec_of(24, window, **FACTS[name])
        given = scene([(1100, 1), (70, 5), (150, 40), (0, 9)], 4, 2, 24, 4, dtype, seed=window)
        attention = NativeAttention(engine(level), Pool(given.pool, 4), given.pages, spec, 4)
        attention.prepare(given.batch)
        found = attention.forward(0, given.q, given.k, given.v, given.batch)
        bound = 6e-6 if dtype == torch.float32 else 2.5e-2
        assert (found.double() - exact(given, spec)).abs().max() <= bound


@KERNELS
@DTYPE
def test_a_decode_does_not_depend_on_the_batch(level, dtype):
    rows = [(700, 1), (40, 1), (1300, 1)]
    given = scene(rows, 4, 2, 64, 1, dtype)
    attention = NativeAttention(engine(level), Pool(given.pool, 1), given.pages, spec_of(64), 4)
    attention.prepare(given.batch)
    together = attention.forward(0, given.q, given.k, given.v, given.batch)
    for number in range(3):
        own = slice(number, number + 1)
        batch = ForwardBatch(
            *(column[own].contiguous() for column in (given.batch.token_ids, given.batch.positions)),
            *(column[own].contiguous() for column in (given.batch.slots, given.batch.pool_rows)),
            logit_tokens=given.batch.logit_tokens,
            starts=given.batch.starts[own],
            counts=given.batch.counts[own],
            decode_rows=1,
        )
        attention.prepare(batch)
        assert torch.equal(attention.forward(0, given.q[own], given.k[own], given.v[own], batch), together[own])


@pytest.mark.slow
def test_attention_at_32k_and_4096_rows():
    on = engine(LIBRARY.level)
    for rows in ([(32000, 1), (31990, 10)], [(number % 7, 1) for number in range(4096)]):
        given = scene(rows, 2, 1, 16, 16, torch.float32)
        attention = NativeAttention(on, Pool(given.pool, 16), given.pages, spec_of(16), 2)
        attention.prepare(given.batch)
        found = attention.forward(0, given.q, given.k, given.v, given.batch)
        assert (found.double() - exact(given, spec_of(16))).abs().max() <= 3e-6


def test_the_structures_are_those_of_the_library():
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    assert LIBRARY.levels()[0] == 0
    assert LIBRARY.functions.ty_level_name(99) is None
