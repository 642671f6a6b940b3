"""Experts that stay packed on CUDA devices, by Triton's kernel: mxfp4, integers of four bits, fp8 and int8."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tokenyard.executor.attention.triton.available import interpreted, why_not
from tokenyard.executor.formats.cuda_products import FP8_FROM, capability
from tokenyard.executor.formats.packed import LinearPart, PackedSource, divide
from tokenyard.executor.formats.weight_format import WeightFormat
from tokenyard.executor.weights import Weights

if TYPE_CHECKING:
    from tokenyard.executor.attention.triton.expert_kernels import PackedExperts

FORMATS_OF = {"MXFP4": None, "INT4": None, "INT8": torch.int8, "FP8": torch.float8_e4m3fn}
"""Formats that are multiplied, by the beginning of their names, and what their bytes are; None for four bits."""


class PackedProduct:
    """An ExpertProduct of packed weights. weights, bias: see multiply_groups."""

    def __init__(self, weights: "PackedExperts", bias: torch.Tensor | None) -> None:
        self._weights, self._bias = weights, bias
        self.count, self.device = len(weights.numbers), weights.numbers.device

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertProduct."""
        # Imported here because the package triton is optional and slow to import.
        from tokenyard.executor.attention.triton.expert_kernels import multiply_groups

        return multiply_groups(x, self._weights, self._bias, ends)


def keeps_packed(like: torch.Tensor) -> bool:
    """Whether packed experts stay so on the device and for the dtype of a tensor."""
    return not why_not(like.device, 0) and (like.dtype == torch.bfloat16 or interpreted())


def packed_experts(
    weights: Weights,
    outputs: Sequence[Mapping[str, int]],
    inputs: int,
    biases: Sequence[torch.Tensor],
    device: torch.device,
) -> PackedProduct | None:
    """Return a product of each expert, None where the checkpoint has them in a format that is not multiplied.

    outputs: of each expert, the names of the matrices over the same input, without `.weight`, and rows.
    biases: of each expert, () for none.
    """
    if not isinstance(weights, PackedSource):
        return None
    form: WeightFormat | None = None
    parts: list[LinearPart] = []
    for names in outputs:
        part, *others = divide(weights, names, inputs, multiple=1, gated=True)
        form = form or part.format
        # Each matrix of four bits may have its inputs in an order of its own (GPTQ's desc_act).
        if others or form is None or part.format != form or part.packed[0].order is not None:
            return None
        parts.append(part)
    assert form is not None
    name = form.name.partition("_")[0]
    if name not in FORMATS_OF:
        return None
    return PackedProduct(_placed(parts, form, inputs, device), torch.stack(list(biases)) if biases else None)


def _placed(parts: Sequence[LinearPart], form: WeightFormat, inputs: int, device: torch.device) -> "PackedExperts":
    """Read the experts and send them to the device, one after the other."""
    from tokenyard.executor.attention.triton.expert_kernels import PackedExperts

    kind = FORMATS_OF[form.name.partition("_")[0]]
    size = form.inputs // (2 if kind is None else 1)
    # Before the numbers a block has its scale, and integers of four bits a zero point behind it.
    scale_bytes, has_zeros = 1 if form.name == "MXFP4" else 4, form.name.startswith("INT4")
    shape = len(parts), parts[0].outputs, inputs // form.inputs
    numbers = torch.empty(*shape, size, dtype=torch.uint8, device=device)
    scales = torch.empty(shape, dtype=torch.uint8 if scale_bytes == 1 else torch.float32, device=device)
    zeros = torch.empty(shape, dtype=torch.uint8, device=device) if has_zeros else None
    for expert, part in enumerate(parts):
        blocks = torch.from_numpy(part.read()).view(*shape[1:], form.block_bytes)
        numbers[expert] = blocks[..., -size:]
        scales[expert] = blocks[..., :scale_bytes].contiguous().view(scales.dtype)[..., 0]
        if zeros is not None:
            zeros[expert] = blocks[..., scale_bytes]
    converts = kind is not torch.float8_e4m3fn or interpreted() or capability(device) >= FP8_FROM
    return PackedExperts(numbers, scales, zeros, kind, converts)
