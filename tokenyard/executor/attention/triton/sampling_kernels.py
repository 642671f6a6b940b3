"""Kernels that choose tokens: the likeliest of a row, and a draw by temperature, top_k, top_p and min_p.

Nothing is sorted. The smallest logit that stays in is searched for among the bits of a float32, with three pivots a
pass, so that a quarter of the range is left after each: at most 16 passes over a row, and the same answer every time
(Park et al. 2026, Qrita, arXiv 2602.01518; before that FlashInfer's sampling, Xing et al. 2025,
flashinfer.ai/2025/03/10/sampling.html, whose draws and pivots are one, and which so cannot repeat another's draw).
Which tokens stay in, the order in which they are drawn and the numbers they are drawn with are those of
sampling/top_k_top_p.py and sampling/noise.py.
"""

# Triton reads the annotations of kernels itself; only compile-time constants have one.
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

from tokenyard.executor.sampling.top_k_top_p import SamplingInputs

MAX_SPLITS = 32
"""Most parts of a row in which its largest logit is looked for at once."""
SPLIT_BLOCK = 1024
DRAW_BLOCK = 4096
DRAW_WARPS = 16


class TritonSamplingBackend:
    """A Drawer by Triton kernels: two launches for the likeliest tokens of a step and one for all its draws."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first of the largest logits of each row; see Drawer."""
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocabulary, SPLIT_BLOCK)))
            share = triton.cdiv(triton.cdiv(vocabulary, splits), SPLIT_BLOCK) * SPLIT_BLOCK
            found = torch.empty(2, rows, splits, dtype=torch.int32, device=logits.device)
            _largest_kernel[rows, splits](
                *(found[0], found[1], logits, logits.stride(0), vocabulary, share), SPLITS=splits, BLOCK=SPLIT_BLOCK
            )
            _join_kernel[rows,](tokens, found[0], found[1], SPLITS=splits, num_warps=1)
        return tokens

    def draw(self, logits: torch.Tensor, draws: SamplingInputs) -> torch.Tensor:
        """Draw a token for each of `draws`; see Drawer."""
        tokens, kept = torch.empty_like(draws.rows), draws.parameters
        if len(tokens):
            _draw_kernel[len(tokens),](
                *(tokens, logits, logits.stride(0), logits.shape[1]),
                *(draws.rows, draws.pool_rows, draws.positions, draws.likeliest),
                *(kept.floats, kept.integers, kept.floats.stride(0), kept.integers.stride(0)),
                BLOCK=DRAW_BLOCK,
                num_warps=DRAW_WARPS,
            )
        return tokens


@triton.jit
def _ordered(x):
    """int32 of float32: rises with it, the same for both zeros, and largest for what is no number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit(do_not_specialize_on_alignment=("keys", "places"))  # parts of one tensor
def _largest_kernel(keys, places, logits, stride, vocabulary, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a part of a row, and its first place."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * share
    end = tl.minimum(begin + share, vocabulary)
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for tile in range(begin, end, BLOCK):
        i = tile + tl.arange(0, BLOCK)
        key = tl.where(i < end, _ordered(tl.load(logits + row * stride + i, i < end, other=0.0)), -0x80000000)
        larger = key > best
        best, place = tl.where(larger, key, best), tl.where(larger, i, place)
    top = tl.max(best, 0)
    tl.store(keys + row * SPLITS + split, top)
    tl.store(places + row * SPLITS + split, tl.min(tl.where(best == top, place, vocabulary), 0))


@triton.jit(do_not_specialize_on_alignment=("keys", "places"))
def _join_kernel(tokens, keys, places, SPLITS: tl.constexpr):
    """The first place of the largest of a row's parts."""
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    key = tl.load(keys + row * SPLITS + split)
    place = tl.load(places + row * SPLITS + split)
    tl.store(tokens + row, tl.min(tl.where(key == tl.max(key, 0), place, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def _mixed(x):
    """The finaliser of splitmix64, of uint64; see sampling/noise.py."""
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """A float64 in [0, 1) of int64 seed and position; see sampling/noise.py."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mixed(seed.to(tl.uint64, bitcast=True) + golden) + position.to(tl.uint64, bitcast=True) * golden
    return (_mixed(state) >> 16).to(tl.int64, bitcast=True).to(tl.float64) * 3.552713678800501e-15


@triton.jit
def _scaled(line, i, vocabulary, top, temperature):
    """Logits of a row and what they are below the largest one, by its temperature; -inf beyond the vocabulary."""
    x = tl.load(line + i, i < vocabulary, other=float("-inf"))
    return x, (x - top) / temperature


@triton.jit
def _above(line, vocabulary, top, temperature, first, second, third, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits are above each of three keys, or what these weigh; the largest one weighs 1."""
    over_first = tl.zeros([BLOCK], tl.float32)
    over_second = tl.zeros([BLOCK], tl.float32)
    over_third = tl.zeros([BLOCK], tl.float32)
    for tile in range(0, vocabulary, BLOCK):
        x, lower = _scaled(line, tile + tl.arange(0, BLOCK), vocabulary, top, temperature)
        key, each = _ordered(x).to(tl.int64), tl.full([BLOCK], 1.0, tl.float32)
        if not COUNT:
            each = tl.exp(lower)
        over_first += tl.where(key > first, each, 0.0)
        over_second += tl.where(key > second, each, 0.0)
        over_third += tl.where(key > third, each, 0.0)
    return tl.sum(over_first, 0), tl.sum(over_second, 0), tl.sum(over_third, 0)


@triton.jit
def _least_kept(line, vocabulary, top, temperature, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key above which there is less than `goal`: of logits if COUNT, else of weight."""
    low = tl.full([], -0x7F800001, tl.int64)  # that of -inf
    high = _ordered(top).to(tl.int64)
    while low < high:
        size = high - low
        first, second, third = low + size // 4, low + size // 2, low + size * 3 // 4
        one, two, three = _above(line, vocabulary, top, temperature, first, second, third, COUNT, BLOCK)
        in_first, in_second, in_third = one < goal, two < goal, three < goal
        low = tl.where(in_first, low, tl.where(in_second, first + 1, tl.where(in_third, second + 1, third + 1)))
        high = tl.where(in_first, first, tl.where(in_second, second, tl.where(in_third, third, high)))
    return low


@triton.jit
def _kept_weight(line, i, vocabulary, top, temperature, least, bound):
    """Weights of logits, 0 for those below the key `least` or the scaled logit `bound`."""
    x, lower = _scaled(line, i, vocabulary, top, temperature)
    return tl.where((_ordered(x) >= least) & (lower >= bound), tl.exp(lower), 0.0)


@triton.jit
def _threshold(line, vocabulary, top, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """The key of the smallest logit that top_k and top_p leave in."""
    least = tl.full([], -0x7F800001, tl.int64)
    if (top_k < vocabulary) | (top_p < 1.0):
        if top_k < vocabulary:
            least = _least_kept(line, vocabulary, top, temperature, top_k.to(tl.float64), True, BLOCK)
        if top_p < 1.0:
            nothing = tl.full([], -0x80000000, tl.int64)
            weight, everything, _ = _above(line, vocabulary, top, temperature, least, nothing, nothing, False, BLOCK)
            mass = everything.to(tl.float64)
            if top_k < vocabulary:
                # Of logits as large as the last one, so many as make top_k.
                count, _, _ = _above(line, vocabulary, top, temperature, least, nothing, nothing, True, BLOCK)
                bits = least.to(tl.int32)
                last = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                mass = weight.to(tl.float64) + (top_k - count) * tl.exp((last - top) / temperature).to(tl.float64)
            mass *= top_p
            # A top_p of 0 leaves the likeliest token in.
            least = tl.maximum(least, _least_kept(line, vocabulary, top, temperature, mass, False, BLOCK))
    return least


@triton.jit(do_not_specialize_on_alignment=("rows", "pool_rows", "positions"))  # parts of one upload
def _draw_kernel(
    tokens,
    logits,
    stride,
    vocabulary,
    rows,
    pool_rows,
    positions,
    likeliest,
    floats,
    integers,
    floats_stride,
    integers_stride,
    BLOCK: tl.constexpr,
):
    """One draw, by the inverse of the cumulative distribution in the order of token ids."""
    one = tl.program_id(0)
    row, own = tl.load(rows + one), tl.load(pool_rows + one)
    line = logits + row * stride
    top = tl.load(line + tl.load(likeliest + row))
    token = tl.full([], 0, tl.int64) + vocabulary - 1
    # Rows of what is no number, or infinite, end inside the vocabulary.
    if top - top == 0.0:
        temperature, top_p = tl.load(floats + own * floats_stride), tl.load(floats + own * floats_stride + 1)
        min_p = tl.load(floats + own * floats_stride + 2)
        top_k, seed = tl.load(integers + own * integers_stride), tl.load(integers + own * integers_stride + 1)
        least = _threshold(line, vocabulary, top, temperature, top_k, top_p, BLOCK)
        bound = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))
        i = tl.arange(0, BLOCK)
        total = tl.full([], 0.0, tl.float64)
        for tile in range(0, vocabulary, BLOCK):
            weight = _kept_weight(line, tile + i, vocabulary, top, temperature, least, bound)
            total += tl.sum(weight, 0).to(tl.float64)
        target = _uniform(seed, tl.load(positions + one)) * total
        # The same sums in the same order, so one of the tiles goes beyond the target.
        before = tl.full([], 0.0, tl.float64)
        begin = tl.full([], 0, tl.int32)
        weight = _kept_weight(line, i, vocabulary, top, temperature, least, bound)
        after = tl.sum(weight, 0).to(tl.float64)
        while (after <= target) & (begin + BLOCK < vocabulary):
            before, begin = after, begin + BLOCK
            weight = _kept_weight(line, begin + i, vocabulary, top, temperature, least, bound)
            after = before + tl.sum(weight, 0).to(tl.float64)
        reached = tl.min(tl.where(before + tl.cumsum(weight.to(tl.float64), 0) > target, i, BLOCK), 0)
        # Rounding may leave none; then it is the last one with a chance.
        last = tl.max(tl.where(weight > 0.0, i, 0), 0)
        token = (begin + tl.where(reached < BLOCK, reached, last)).to(tl.int64)
    tl.store(tokens + one, token)
