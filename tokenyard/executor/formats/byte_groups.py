"""Matrices of fp8 and int8 checkpoints as rows of the formats FP8_32, FP8_128, INT8_32 and INT8_128."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.formats.weight_format import FORMATS, WeightFormat

KINDS = {"F8_E4M3": "FP8", "I8": "INT8"}
"""Formats by safetensors' names of types."""
NAN_BITS = 0x7F
"""E4M3's only NaN, without its sign."""


def format_of_bytes(kind: str, inputs: int, group: int) -> WeightFormat | None:
    """Return the format for rows of so many numbers of a byte, None where there is none.

    kind: safetensors' name of their type. group: inputs with one scale; the last group of a row may have fewer.
    """
    for size in (128, 32) if kind in KINDS else ():
        if inputs % size == 0 and (group == inputs or group % size == 0):
            return FORMATS[f"{KINDS[kind]}_{size}"]
    return None


def byte_rows(weight: torch.Tensor, scales: torch.Tensor, form: WeightFormat) -> npt.NDArray[np.uint8]:
    """Return rows of blocks: a float32 scale, then the numbers.

    weight: [outputs, inputs], fp8 (E4M3) or int8. scales: [outputs or 1, blocks or 1]. Raises ValueError for a NaN.
    """
    outputs, inputs = weight.shape
    numbers = weight.contiguous().view(torch.uint8).numpy().reshape(outputs, -1, form.inputs)
    if form.name.startswith("FP8") and bool(((numbers & NAN_BITS) == NAN_BITS).any()):
        raise ValueError("some of its numbers are NaN")
    made = np.empty((outputs, inputs // form.inputs, form.block_bytes), np.uint8)
    spread = scales.float().expand(outputs, made.shape[1])[..., None].contiguous()
    made[:, :, :4] = spread.numpy().view(np.uint8)
    made[:, :, 4:] = numbers
    return made.reshape(outputs, -1)
