"""Random numbers that are a function of (seed, position) alone.

A request that is retracted and resumed, or batched with others, draws the same numbers again: nothing but its own
seed and the position of the token being sampled goes in.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 48


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return float64[n] in [0, 1), multiples of 2**-48, for int64[n] seeds and positions.

    A counter-based generator: the finaliser of splitmix64 (Steele, Lea and Flood 2014) over the hashed seed plus the
    position times the golden ratio, in 64-bit arithmetic that wraps.
    """
    state = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return _shift(state, 64 - _UNIFORM_BITS).to(torch.float64) * 2.0**-_UNIFORM_BITS


def signed_seed(seed: int) -> int:
    """Fold any whole number into the range of an int64."""
    folded = seed % (1 << 64)
    return folded - (1 << 64) if folded >= 1 << 63 else folded


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as if unsigned; torch has no such shift on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
