"""Experts in a fixed number of launches, for CUDA devices: no loop over experts, and nothing on the host.

A loop has to know how many tokens each expert has, so the host waits for the router in every layer. Here tokens are
sorted on the device, and one product of groups serves all experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from tokenyard.executor.layers.mlp import Gating
from tokenyard.executor.models.config import ModelConfig

ARCHITECTURES = (9, 10)
"""Major compute capabilities with a kernel of torch for groups of rows. On others torch loops over groups too, and
waits."""
ALIGNMENT = 8
"""Numbers of bfloat16 in 16 bytes, of which rows must be whole."""


def why_not(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return why experts are multiplied one after the other, "" if they are one product of groups."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in ARCHITECTURES:
        return "torch has a product of groups for devices 9.x and 10.x only"
    if dtype != torch.bfloat16:
        return f"torch's product of groups takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.experts is not None and (config.hidden_size % ALIGNMENT or config.experts.intermediate_size % ALIGNMENT):
        return f"torch's product of groups takes sizes that are multiples of {ALIGNMENT}"
    return ""


class ExpertProduct(Protocol):
    """A product of each expert."""

    @property
    def count(self) -> int:
        """Experts."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, inputs], sorted by expert: [rows, outputs].

        experts: int64[rows]; ends: int32[experts], where the rows of each end.
        """


@dataclass(frozen=True, slots=True)
class StackedProduct:
    """See ExpertProduct. weight: [experts, outputs, inputs]; bias: [experts, outputs] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Experts."""
        return len(self.weight)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weight.device

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertProduct."""
        found: torch.Tensor = F.grouped_mm(x, self.weight.mT, offs=ends)
        return found if self.bias is None else found.add_(self.bias[experts])


def stacked(count: int, parts: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> StackedProduct:
    """Return the product of `count` experts, of which `parts` has weight and bias one after the other."""
    weight = bias = None
    for expert, (own, own_bias) in enumerate(parts):
        if weight is None:
            weight = own.new_empty(count, *own.shape)
            bias = None if own_bias is None else own_bias.new_empty(count, *own_bias.shape)
        weight[expert] = own
        if bias is not None and own_bias is not None:
            bias[expert] = own_bias
    assert weight is not None
    return StackedProduct(weight, bias)


class GroupedExperts:
    """See Experts. What a token's experts find is summed in the order of their scores, so the sum has the same bits in
    every batch.
    """

    def __init__(self, gate_up: ExpertProduct, down: ExpertProduct, gated: Gating) -> None:
        self._gate_up, self._down, self._gated = gate_up, down, gated
        self._numbers = torch.arange(down.count, device=down.device)

    def __call__(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See Experts."""
        if not len(x):
            return x
        active = chosen.shape[1]
        experts, order = chosen.flatten().sort(stable=True)
        # Not bincount, for which the host waits.
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        gate, up = self._gate_up(x[order // active], experts, ends).chunk(2, dim=-1)
        found = self._down(self._gated(gate, up), experts, ends)
        # Back in the order of tokens instead of added up there, as additions on a device come in any order.
        by_token = torch.empty_like(found).index_copy_(0, order, found).view(len(x), active, -1)
        return (by_token * scores[:, :, None]).sum(dim=1)
