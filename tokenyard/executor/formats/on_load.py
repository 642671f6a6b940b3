"""Matrices that are quantized as they load: `--quantization q4` and `q8`."""

from functools import partial

import numpy as np
import torch

from tokenyard.executor.formats.packed import PackedBytes, PackedRows, PackedSource
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.weights import Weights

BLOCK = 32
EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")
"""What q4 keeps in 8 bits: each of their errors moves a logit."""


class QuantizedOnLoad:
    """See PackedSource. Matrices of `source` that are not packed become Q8_0, or Q4_0 except EIGHT_BITS.

    bits: 4 or 8. Norms, biases, routers of experts and matrices with rows that are no whole blocks stay as they are.
    """

    def __init__(self, source: Weights, bits: int) -> None:
        self._source, self._bits = source, bits

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See Weights."""
        return self._source.get(name, shape)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        found = self._source.packed(name, shape) if isinstance(self._source, PackedSource) else None
        if found is not None or shape[1] % BLOCK:
            return found
        four = self._bits == 4 and name not in EIGHT_BITS
        form, quantize = (FORMATS["Q4_0"], q4_0) if four else (FORMATS["Q8_0"], q8_0)

        def read() -> PackedBytes:
            weight = self._source.get(name, shape)
            made = np.empty((shape[0], form.row_bytes(shape[1])), np.uint8)
            # A slice at a time, as float32 takes many times the memory.
            step = max(1, (1 << 22) // shape[1])
            for first in range(0, shape[0], step):
                made[first : first + step] = quantize(weight[first : first + step].float())
            return made

        return PackedRows(form, shape, partial(read))


def q8_0(weight: torch.Tensor) -> PackedBytes:
    """Rows as GGUF's Q8_0: the largest of 32 numbers becomes 127. weight: float32[rows, inputs]."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = _divided(blocks, scales).round_().clamp_(-127, 127).to(torch.int8)
    return _joined(scales, codes.numpy().view(np.uint8))


def q4_0(weight: torch.Tensor) -> PackedBytes:
    """Rows as GGUF's Q4_0: numbers from -8 to 7, and the scale whose squared error is least for these numbers."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    top = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    codes = _divided(blocks, top / -8).round_().clamp_(-8, 7)
    scales = ((blocks * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True).clamp_(min=1)).half()
    numbers = (codes + 8).to(torch.uint8).numpy()
    half = BLOCK // 2
    return _joined(scales, numbers[..., :half] | numbers[..., half:] << 4)


def _divided(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks by their scales, 0 where the scale is."""
    whole = scales.float()
    return torch.where(whole != 0, blocks / whole, 0.0)


def _joined(scales: torch.Tensor, numbers: PackedBytes) -> PackedBytes:
    """Blocks of a float16 scale and bytes, as rows."""
    return np.concatenate((scales.numpy().view(np.uint8), numbers), axis=2).reshape(len(numbers), -1)
