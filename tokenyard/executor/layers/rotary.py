"""Rotary position embedding, half-split layout (Su et al. 2021, arXiv 2104.09864), and its stretched kinds."""

import math

import torch

from tokenyard.executor.models.config import RopeConfig


class Rotary:
    """Tables of cosines and sines, float32[positions, rotated / 2], for positions up to the context's length.

    rotated: dimensions of a head that are rotated, see RopeConfig.share.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> None:
        self._table = rotary_table(rope, head_dim, positions).to(device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return float32[tokens, 2, 1, rotated / 2], cosines and sines for int64[tokens]."""
        return self._table[positions].unsqueeze(2)


def rotary_table(rope: RopeConfig, head_dim: int, positions: int) -> torch.Tensor:
    """Return float32[positions, 2, rotated / 2]: cosines, then sines, in one table so that a step looks up once."""
    # Of a proportional rope all dimensions are in the table, most with a frequency of 0.
    rotated = head_dim if rope.kind == "proportional" else int(head_dim * rope.share)
    frequencies, scale = rope_frequencies(rope, rotated, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim] by what Rotary.at returned; computed in float32, returned in x's dtype.

    Where the table is of fewer dimensions, those beyond stay as they are.
    """
    cos, sin = cos_sin[:, 0], cos_sin[:, 1]
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    found = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return found if rotated == x.shape[-1] else torch.cat((found, x[..., rotated:]), dim=-1)


def rope_frequencies(rope: RopeConfig, rotated: int, positions: int) -> tuple[torch.Tensor, float]:
    """Return float32[rotated / 2], radians per position, and the factor on cosines and sines.

    linear: positions divided by `factor` (kaiokendev 2023). llama3: only long waves are stretched, with a smooth
    passage (Llama 3.1 release). yarn: Peng et al. 2023, arXiv 2309.00071. longrope: a factor for each frequency, of one
    list up to the original context and of another one beyond (Ding et al. 2024, arXiv 2402.13753). The list is chosen
    once, by the `positions` that the context may have, so that keys in the cache fit all later ones; transformers
    chooses by the length of each sequence. proportional: only the first `share` of the waves turn (Gemma 4).
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "proportional":
        frequencies[int(rope.share * rotated // 2) :] = 0.0
        return frequencies / rope.factor, 1.0
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, rotated), _yarn_attention_factor(rope)
    if rope.kind == "longrope":
        factors = rope.long_factors if positions > rope.original_context else rope.short_factors
        return frequencies / torch.tensor(factors), _longrope_attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    turns = rope.original_context * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1.0 - keep)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, rotated: int) -> torch.Tensor:
    low = _dimension_of(rope, rotated, rope.beta_fast)
    high = _dimension_of(rope, rotated, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1.0 - stretched)


def _dimension_of(rope: RopeConfig, rotated: int, turns: float) -> float:
    """Return the (fractional) dimension whose wave makes `turns` turns over the original context."""
    return rotated * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
