"""Matrices of AWQ, GPTQ and compressed-tensors checkpoints as rows of the format INT4_32 or INT4_128."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.formats.weight_format import FORMATS, WeightFormat

HALF = 16
"""Numbers whose lower four bits of a byte are followed by as many in the upper ones."""


def format_of_groups(group: int) -> WeightFormat | None:
    """Return the format for groups of so many numbers with one scale, None where there is none."""
    if group % 128 == 0:
        return FORMATS["INT4_128"]
    return FORMATS["INT4_32"] if group % 32 == 0 else None


def input_order(groups: torch.Tensor, size: int) -> tuple[npt.NDArray[np.int32] | None, bool]:
    """Return in which order inputs lie in runs of one group (GPTQ's desc_act), and whether all runs have `size` inputs.

    groups: the group of each input. The order is None where inputs lie so already.
    """
    numbers = groups.numpy()
    order = np.argsort(numbers, kind="stable").astype(np.int32)
    whole = bool(np.array_equal(numbers[order], np.arange(len(numbers)) // size))
    return (None if np.array_equal(order, np.arange(len(order))) else order), whole


def int4_rows(
    values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, form: WeightFormat
) -> npt.NDArray[np.uint8]:
    """Return rows of blocks: a float32 scale, a zero point, then numbers of four bits.

    values: [outputs, inputs], from 0 to 15. zeros, scales: [outputs, groups]; a number is (value - zero) * scale.
    """
    outputs, inputs = values.shape
    blocks = inputs // form.inputs
    repeats = blocks // scales.shape[1]
    halves = values.to(torch.uint8).numpy().reshape(outputs, blocks, -1, 2, HALF)
    numbers = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).reshape(outputs, blocks, -1)
    scale = scales.float().repeat_interleave(repeats, 1).contiguous().numpy()
    zero = zeros.to(torch.uint8).repeat_interleave(repeats, 1).numpy()
    parts = (scale[..., None].view(np.uint8), zero[..., None], numbers)
    return np.concatenate(parts, axis=2).reshape(outputs, -1)
