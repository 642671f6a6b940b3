"""Gated short convolutions, as LFM2 has them (Liquid AI 2025, arXiv 2511.23404)."""

import torch

from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.layers.recurrent import recur


class ShortConv:
    """`output(c * conv(b * x))`, where b, c and x are one product of the input.

    index: the layer's number among those with a state. conv: [kernel, channels]; bias: [channels] or None.
    """

    def __init__(
        self, index: int, inputs: Product, conv: torch.Tensor, bias: torch.Tensor | None, output: Product
    ) -> None:
        self._index, self.inputs, self.output = index, inputs, output
        self._conv, self._bias = conv.float(), None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden], in the dtype of `x`."""
        before, after, mixed = self.inputs(x).chunk(3, dim=-1)
        found = recur(batch, self._index, before * mixed, self._conv, self._bias, _advance, _run)
        return self.output(after * found.to(x.dtype))


def _advance(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> torch.Tensor:
    return convolved


def _run(convolved: torch.Tensor, tokens: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return convolved, state
