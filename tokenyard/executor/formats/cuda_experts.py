"""Experts that stay packed on CUDA devices: mxfp4, by Triton's kernel."""

from collections.abc import Mapping, Sequence

import torch

from tokenyard.executor.attention.triton.available import interpreted, why_not
from tokenyard.executor.formats.packed import PackedSource, divide
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.weights import Weights

MXFP4 = FORMATS["MXFP4"]


class Mxfp4Product:
    """An ExpertProduct of packed weights. numbers, scales, bias: see multiply_groups."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._numbers, self._scales, self._bias = numbers, scales, bias
        self.count, self.device = len(numbers), numbers.device

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertProduct."""
        # Imported here because the package triton is optional and slow to import.
        from tokenyard.executor.attention.triton.expert_kernels import multiply_groups

        return multiply_groups(x, self._numbers, self._scales, self._bias, ends)


def multiplies_mxfp4(like: torch.Tensor) -> bool:
    """Whether experts of mxfp4 stay packed on the device and for the dtype of a tensor."""
    return not why_not(like.device, 0) and (like.dtype == torch.bfloat16 or interpreted())


def packed_experts(
    weights: Weights,
    outputs: Sequence[Mapping[str, int]],
    inputs: int,
    biases: Sequence[torch.Tensor],
    device: torch.device,
) -> Mxfp4Product | None:
    """Return a product of each expert, None where the checkpoint has them in another format than mxfp4.

    outputs: of each expert, the names of the matrices over the same input, without `.weight`, and rows.
    biases: of each expert, () for none.
    """
    if not isinstance(weights, PackedSource):
        return None
    numbers: torch.Tensor | None = None
    for expert, names in enumerate(outputs):
        part, *others = divide(weights, names, inputs, multiple=1, gated=True)
        if others or part.format != MXFP4:
            return None
        blocks = torch.from_numpy(part.read()).view(part.outputs, inputs // MXFP4.inputs, MXFP4.block_bytes)
        if numbers is None:
            numbers = torch.empty(len(outputs), *blocks.shape[:2], MXFP4.inputs // 2, dtype=torch.uint8, device=device)
            scales = torch.empty(numbers.shape[:3], dtype=torch.uint8, device=device)
        scales[expert], numbers[expert] = blocks[..., 0], blocks[..., 1:]
    assert numbers is not None
    return Mxfp4Product(numbers, scales, torch.stack(list(biases)) if biases else None)
