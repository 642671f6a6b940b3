"""Matrix multiplication by a fixed weight."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, inputs] -> [rows, outputs]: a `Linear`, or one with something around it."""


class Linear:
    """`x @ weight.T + bias`. On a CPU the weight is kept in oneDNN's own layout where that serves the dtype.

    weight: [outputs, inputs]; bias: [outputs] or None. With oneDNN's layout the product is up to twice as fast as
    `F.linear`, which hands float32 to MKL and converts the layout of bfloat16 on each call.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._outputs = weight.shape[0]
        self._bias = bias
        self._packed = can_prepack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [rows, inputs] -> [rows, outputs], in the dtype of `x`."""
        if self._packed and len(x):
            found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return found
        if self._packed:
            return x.new_empty(0, self._outputs)
        return F.linear(x, self._weight, self._bias)


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can multiply by this weight in its own layout."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
