"""Products of packed weights on CUDA devices, by torch's own kernels: fp8 and integers of four bits.

Weights of fp8 are multiplied as fp8: each row of inputs, or each block of 128 of its numbers, is rounded to fp8 with a
scale of its own (vLLM's dynamic quantization). Weights of four bits are multiplied in bfloat16 ("tinygemm"), and their
scales and zero points are rounded to it. What neither takes is unpacked as it loads.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from tokenyard.executor.attention.triton.available import installed, interpreted
from tokenyard.executor.formats.int4_groups import HALF
from tokenyard.executor.formats.packed import LinearPart, PackedSource, divide
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.weights import Weights

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_ALIGNMENT, FP8_ROWS = 16, 16
"""Inputs and outputs are multiples of the first; rows of inputs are padded to a multiple of the second."""
BLOCK = 128
"""Rows and columns of a weight with one scale, and numbers of a row of inputs with one (DeepSeek-V3)."""
FP8_FROM, BLOCKS_ON, INT4_FROM = (8, 9), (9, 0), (8, 0)
"""Compute capabilities: the first with fp8 in tensor cores, the one with a kernel of torch for blocks, and the first
with integers of four bits."""
BLOCKS_CUDA = (12, 9)
"""The first CUDA whose cuBLAS multiplies by blocks."""
INT4_OUTPUTS = 8
INT4_TILES = (8, 4, 2)
"""Tiles of 16 inputs that lie together in memory, of which rows must be whole."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix of fp8. weight: [outputs, inputs]; scales: float32[outputs], or of each block [outputs / 128, inputs /
    128].
    """

    weight: torch.Tensor
    scales: torch.Tensor


@runtime_checkable
class ScaledSource(Weights, Protocol):
    """Weights some of which may be fp8 with scales."""

    @property
    def like(self) -> torch.Tensor:
        """An empty tensor on the model's device and of its dtype."""

    def scaled(self, name: str, shape: tuple[int, int]) -> ScaledRows | None:
        """Return a matrix of fp8 on the device, None where it is of another kind. Raises ConfigError if missing."""


def cuda_product(
    weights: Weights, outputs: Mapping[str, int], inputs: int, bias: torch.Tensor | None
) -> Product | None:
    """Return a product of several matrices over the same input that stay packed, None where they must be unpacked.

    outputs: the matrices' names, without `.weight`, and rows.
    """
    if not isinstance(weights, ScaledSource):
        return None
    device, dtype = weights.like.device, weights.like.dtype
    able = capability(device)
    if dtype != torch.bfloat16:
        return None
    if able >= INT4_FROM and isinstance(weights, PackedSource):
        part, *others = divide(weights, outputs, inputs, multiple=INT4_OUTPUTS)
        if not others and part.format is not None and fits_int4(part, inputs):
            return Int4Linear(part, inputs, device, bias)
    if able < FP8_FROM or inputs % FP8_ALIGNMENT or any(rows % FP8_ALIGNMENT for rows in outputs.values()):
        return None
    found = [weights.scaled(f"{name}.weight", (rows, inputs)) for name, rows in outputs.items()]
    parts = [part for part in found if part is not None]
    blocks = {part.scales.dim() == 2 for part in parts}
    if len(parts) < len(found) or len(blocks) > 1:
        return None
    whole = ScaledRows(torch.cat([part.weight for part in parts]), torch.cat([part.scales for part in parts]))
    if not blocks.pop():
        return Fp8RowsLinear(whole, bias)
    aligned = inputs % BLOCK == 0 and all(rows % BLOCK == 0 for rows in outputs.values())
    return Fp8BlocksLinear(whole, bias) if aligned and able == BLOCKS_ON and cuda_version() >= BLOCKS_CUDA else None


def multiplies_packed(weights: Weights) -> bool:
    """Whether some of these weights may stay packed on the device that they are for."""
    return isinstance(weights, ScaledSource) and capability(weights.like.device) >= INT4_FROM


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device, (0, 0) for one that is not CUDA's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def cuda_version() -> tuple[int, ...]:
    """The version of CUDA that torch was built for, () for none."""
    return tuple(map(int, (torch.version.cuda or "").split("."))) if torch.version.cuda else ()


class Fp8RowsLinear:
    """`x @ weight.T + bias` of fp8 with a scale for each row of either.

    A scale of the whole weight is the same for all of its rows.
    """

    def __init__(self, weight: ScaledRows, bias: torch.Tensor | None) -> None:
        self._weight, self._scales, self._bias = weight.weight, weight.scales[None], bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: bfloat16[rows, inputs] -> bfloat16[rows, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self._weight))
        numbers, scales = quantizer()(x, x.shape[1])
        kind = F.ScalingType.RowWise
        found: torch.Tensor = F.scaled_mm(
            *(numbers, self._weight.T, scales, kind, self._scales, kind), bias=self._bias, output_dtype=x.dtype
        )
        return found[: len(x)]


class Fp8BlocksLinear:
    """`x @ weight.T + bias` of fp8 with a scale for each 128 x 128 numbers of the weight and each 128 of a row of x."""

    def __init__(self, weight: ScaledRows, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.weight, bias
        outputs, inputs = weight.scales.shape
        # cuBLAS wants columns of four.
        padded = weight.scales.new_ones(outputs, -(-inputs // 4) * 4)
        padded[:, :inputs] = weight.scales
        self._scales = padded.T

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: bfloat16[rows, inputs] -> bfloat16[rows, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self._weight))
        numbers, scales = quantizer()(x, BLOCK)
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        found: torch.Tensor = F.scaled_mm(
            *(numbers, self._weight.T, scales, kinds[0], self._scales, kinds[1]), output_dtype=x.dtype
        )
        found = found[: len(x)]
        return found if self._bias is None else found.add_(self._bias)


Quantizer = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""See quantize_rows."""


@functools.cache
def quantizer() -> Quantizer:
    """Return Triton's kernel where it can run, else torch's."""
    if installed() and (interpreted() or torch.version.cuda):
        from tokenyard.executor.attention.triton.fp8_kernels import quantize_rows as by_triton

        return by_triton
    return quantize_rows


def quantize_rows(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [rows, inputs] to fp8 with a scale for each `block` numbers of a row.

    Returns fp8[padded rows, inputs] and float32[padded rows, inputs / block], whose columns lie one after the other.
    """
    x = F.pad(x.float(), (0, 0, 0, -len(x) % FP8_ROWS)).view(-1, x.shape[1] // block, block)
    scales = x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / FP8_MAX
    numbers = (x / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return numbers.flatten(1), scales.squeeze(-1).T.contiguous().T


def fits_int4(part: LinearPart, inputs: int) -> bool:
    """Whether torch multiplies by a packed part."""
    form = part.format
    whole = part.outputs % INT4_OUTPUTS == 0 and inputs % (16 * INT4_TILES[-1]) == 0
    return form is not None and form.name.startswith("INT4") and whole


class Int4Linear:
    """`x @ weight.T + bias` with a weight of four bits, in groups with a scale and a zero point (AWQ, GPTQ)."""

    def __init__(self, part: LinearPart, inputs: int, device: torch.device, bias: torch.Tensor | None) -> None:
        form = part.format
        assert form is not None
        self._outputs, self._group, self._bias = part.outputs, form.inputs, bias
        order = part.packed[0].order
        self._order = None if order is None else torch.from_numpy(order).long().to(device)
        blocks = torch.from_numpy(part.read()).view(part.outputs, inputs // form.inputs, form.block_bytes)
        scales, zeros = blocks[..., :4].contiguous().view(torch.float32)[..., 0], blocks[..., 4].float()
        halves = blocks[..., 5:].reshape(*blocks.shape[:2], -1, HALF)
        values = torch.cat((halves & 15, halves >> 4), dim=-1).reshape(part.outputs, inputs)
        # A number is (value - 8) * scale + offset.
        pairs = torch.stack((scales, (8 - zeros) * scales), dim=-1).transpose(0, 1).contiguous()
        self._pairs = pairs.to(device, torch.bfloat16)
        tiles = next(tiles for tiles in INT4_TILES if inputs % (16 * tiles) == 0)
        if device.type == "cpu":
            self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), tiles)
        else:
            bytes_of_two = (values[:, ::2] << 4 | values[:, 1::2]).to(device)
            self._weight = torch.ops.aten._convert_weight_to_int4pack(bytes_of_two, tiles)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: bfloat16[rows, inputs] -> bfloat16[rows, outputs]."""
        if not len(x):
            return x.new_empty(0, self._outputs)
        x = x.contiguous() if self._order is None else x[:, self._order]
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else _int4_product
        found: torch.Tensor = multiply(x, self._weight, self._group, self._pairs)
        return found if self._bias is None else found.add_(self._bias)


def _int4_product(x: torch.Tensor, weight: torch.Tensor, group: int, pairs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, weight, group, pairs)
    return found
