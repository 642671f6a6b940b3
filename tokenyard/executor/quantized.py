"""Quantized checkpoints: matrices stay packed where a back end multiplies them, others are dequantized.

Dequantizing costs the memory of an unquantized model and is exact: no rounding is added to what the file says. Read are
fp8 (one scale a tensor, a row or a block; DeepSeek-V3, arXiv 2412.19437), GPTQ (Frantar et al. 2022, arXiv 2210.17323),
AWQ (Lin et al. 2023, arXiv 2306.00978), and compressed-tensors with fp8, int8 and packed integers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.formats.byte_groups import byte_rows, format_of_bytes
from tokenyard.executor.formats.cuda_products import ScaledRows
from tokenyard.executor.formats.int4_groups import format_of_groups, input_order, int4_rows
from tokenyard.executor.formats.packed import PackedBytes, PackedRows
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.weights import SafetensorsWeights

Parts = dict[str, torch.Tensor]
"""Tensors of one product by what follows its name, such as qweight and scales."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight consecutive outputs each nibble of a word holds, the lowest bits first."""

WORD_BITS = 32
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class QuantizedWeights:
    """A checkpoint whose matrices are quantized as its config says; tensors without such parts are handed out as usual.

    See ScaledSource, and PackedSource: matrices of four bits (AWQ, GPTQ, compressed-tensors) and of fp8 or int8 without
    zero points (fp8, compressed-tensors) stay packed where their groups are whole blocks.

    quantization: the `quantization_config` of config.json.
    unpacked: takes what is dequantized.

    Raises ConfigError for a kind that is not supported.
    """

    def __init__(
        self, source: SafetensorsWeights, quantization: Mapping[str, Any], unpacked: UnpackedMatrices | None = None
    ) -> None:
        self._source = source
        self._kind = str(quantization.get("quant_method"))
        self._unpacked = unpacked or UnpackedMatrices()
        self._decode, self._names = _decoder(quantization)
        self._int4 = _int4_reader(quantization)
        self._block = _block_size(quantization)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        if not name.endswith(".weight"):
            return None
        return self._packed_bytes(name, shape) if self._int4 is None else self._packed_int4(name, shape)

    def _packed_bytes(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        prefix = name.removesuffix("weight")
        stored = self._source.stored_kind(name)
        small = self._source.parts(prefix, [part for part in self._names if part != "weight"])
        scales = small.get("weight_scale_inv", small.get("weight_scale"))
        if stored is None or stored[1] != shape or scales is None or len(small) > 1:
            return None
        outputs, inputs = shape
        by_block = "weight_scale_inv" in small and scales.numel() > 1
        group = self._block[1] if by_block else inputs
        form = format_of_bytes(stored[0], inputs, group)
        if form is None:
            return None
        wanted, found = form, scales

        def read() -> PackedBytes:
            own = self._source.parts(prefix, self._names)
            try:
                if by_block:
                    rows = found.repeat_interleave(self._block[0], 0)[:outputs]
                    spread = rows.repeat_interleave(group // wanted.inputs, 1)[:, : inputs // wanted.inputs]
                else:
                    spread = _per_row(found).reshape(-1, 1)
                return byte_rows(own["weight"], spread, wanted)
            except (RuntimeError, IndexError, ValueError) as error:
                raise ConfigError(_misfit(name, shape, own, error)) from error

        return PackedRows(form, shape, read)

    def _packed_int4(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        prefix, dot, _ = name.rpartition(".")
        assert self._int4 is not None
        small = self._source.parts(prefix + dot, [part for part in self._names if part in SMALL_PARTS])
        scales = small.get("scales", small.get("weight_scale"))
        if scales is None or scales.ndim != 2:
            return None
        groups = scales.shape[1 if "weight_scale" in small else 0]
        form = format_of_groups(shape[1] // groups) if groups and shape[1] % groups == 0 else None
        indices = small.get("g_idx", small.get("weight_g_idx"))
        order = None
        if form is not None and indices is not None and len(indices):
            order, whole = input_order(indices, shape[1] // groups)
            form = form if whole else None
        if form is None:
            return None
        read_int4, wanted = self._int4, form

        def read() -> PackedBytes:
            parts = self._source.parts(prefix + dot, self._names)
            try:
                values, zeros, found = read_int4(parts, shape)
                values = values if order is None else values[:, torch.from_numpy(order).long()]
                return int4_rows(values, zeros, found, wanted)
            except (KeyError, RuntimeError, IndexError, ValueError) as error:
                raise ConfigError(_misfit(name, shape, parts, error)) from error

        return PackedRows(form, shape, read, order)

    @property
    def like(self) -> torch.Tensor:
        """See ScaledSource."""
        return self._source.convert(torch.empty(0))

    def scaled(self, name: str, shape: tuple[int, int]) -> ScaledRows | None:
        """See ScaledSource."""
        parts = self._source.parts(name.removesuffix("weight"), self._names)
        weight, scale = parts.get("weight"), parts.get("weight_scale", parts.get("weight_scale_inv"))
        if weight is None or scale is None or weight.dtype != torch.float8_e4m3fn or tuple(weight.shape) != shape:
            return None
        device = self.like.device
        if scale.numel() == 1:
            scales = scale.float().flatten().expand(shape[0])
        elif tuple(scale.shape) in ((shape[0],), (shape[0], 1)):
            # By shape: blocks of 128 are as many as rows where a row has 16384 inputs.
            scales = scale.float().flatten()
        elif self._block == (128, 128) and tuple(scale.shape) == tuple(-(-size // 128) for size in shape):
            scales = scale.float()
        else:
            return None
        return ScaledRows(weight.to(device), scales.to(device))

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights. Raises ConfigError, naming it, for parts that do not fit together."""
        prefix, dot, last = name.rpartition(".")
        parts = self._source.parts(prefix + dot, self._names) if last == "weight" and len(shape) == 2 else {}
        if not parts.keys() - {"weight"}:
            return self._source.get(name, shape)
        try:
            whole = self._decode(parts, shape)
        except (KeyError, RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(_misfit(name, shape, parts, error)) from error
        if tuple(whole.shape) != shape:
            raise ConfigError(
                f"tensor {name!r} has shape {tuple(whole.shape)} when unpacked; config.json means {shape}"
            )
        made = self._source.convert(whole)
        self._unpacked.add(self._kind, name, sum(tensor.nbytes for tensor in parts.values()), made.nbytes)
        return made


def _misfit(name: str, shape: tuple[int, ...], parts: Parts, error: Exception) -> str:
    """What is wrong with the parts of a tensor."""
    found = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
    return f"tensor {name!r} of shape {shape} cannot be made of {found}: {error}"


Int4Reader = Callable[[Parts, tuple[int, int]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""From the parts of a matrix to its numbers from 0 to 15, [outputs, inputs], and zero points and scales, [outputs,
groups]."""

SMALL_PARTS = ("scales", "g_idx", "weight_scale", "weight_g_idx")
"""Parts that say in which groups a matrix is."""


def _int4_reader(quantization: Mapping[str, Any]) -> Int4Reader | None:
    """How matrices of four bits are read without dequantizing them; None for kinds of others."""
    method = quantization.get("quant_method")
    if method == "awq":
        return lambda parts, shape: (
            _in_order(_unpacked(parts["qweight"], 4)).T,
            _in_order(_unpacked(parts["qzeros"], 4)).T,
            parts["scales"].T,
        )
    if method == "gptq" and quantization.get("bits", quantization.get("w_bit")) == 4:
        less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        return lambda parts, shape: (
            _unpacked(parts["qweight"].T, 4),
            _unpacked(parts["qzeros"], 4)[:, : shape[0]].T + less,
            parts["scales"].T,
        )
    if method == "compressed-tensors" and quantization.get("format") == "pack-quantized":
        return _compressed_int4 if _compressed_bits(quantization) == 4 else None
    return None


def _compressed_int4(parts: Parts, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See Int4Reader; without zero points the middle of the range means 0."""
    scales = parts["weight_scale"]
    zeros = torch.full(scales.shape, 8)
    if "weight_zero_point" in parts:
        zeros = _unpacked(parts["weight_zero_point"].T, 4).T[: shape[0]]
    return _unpacked(parts["weight_packed"], 4)[:, : shape[1]], zeros, scales


Decode = Callable[[Parts, tuple[int, ...]], torch.Tensor]


def _decoder(quantization: Mapping[str, Any]) -> tuple[Decode, tuple[str, ...]]:
    """How a matrix is made of its parts (float32[outputs, inputs]), and the names of those parts."""
    method = quantization.get("quant_method")
    if method == "fp8":
        return lambda parts, shape: _fp8(parts, _block_size(quantization)), (
            "weight",
            "weight_scale_inv",
            "weight_scale",
        )
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit"))
        if bits not in ((2, 4, 8) if method == "gptq" else (4,)):
            raise ConfigError(f"config.json: {method} with {bits} bits is not supported")
        packed = ("qweight", "qzeros", "scales", "g_idx")
        if method == "awq":
            return _awq, packed
        # The first format of GPTQ stores zero points less one; gptq_v2 stores them as they are.
        less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        return lambda parts, shape: _gptq(parts, bits, less), packed
    if method == "compressed-tensors":
        bits = _compressed_bits(quantization)
        names = ("weight", "weight_scale", "weight_packed", "weight_zero_point", "weight_g_idx")
        return lambda parts, shape: _compressed(parts, shape, bits), names
    known = "fp8, gptq, awq, compressed-tensors and, of gpt-oss, mxfp4"
    raise ConfigError(f"config.json: quantization {method!r} is not supported; supported are {known}")


def _compressed_bits(quantization: Mapping[str, Any]) -> int:
    """Bits of the weights, which all groups of layers must agree on."""
    form = quantization.get("format")
    if form not in ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized"):
        raise ConfigError(f"config.json: compressed-tensors of format {form!r} are not supported")
    groups = quantization.get("config_groups") or {}
    bits = {int(group["weights"]["num_bits"]) for group in groups.values() if group.get("weights")}
    if len(bits) != 1 or not bits <= {4, 8}:
        raise ConfigError(f"config.json: weights of {sorted(bits) or 'unknown'} bits are not supported, only 4 or 8")
    return bits.pop()


def _block_size(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block with one scale."""
    given = quantization.get("weight_block_size") or (128, 128)
    match given:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json: weight_block_size is {given!r}; it must be two positive numbers")


def _fp8(parts: Parts, block: tuple[int, int]) -> torch.Tensor:
    weight = parts["weight"].float()
    if "weight_scale_inv" not in parts:
        return weight * _per_row(parts["weight_scale"])
    scale = parts["weight_scale_inv"].float()
    if scale.numel() == 1:
        return weight * scale.flatten()
    rows, columns = block
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]


def _per_row(scale: torch.Tensor) -> torch.Tensor:
    """Reshape a scale of the tensor or of each output to broadcast with [outputs, inputs]."""
    return scale.float().flatten() if scale.numel() == 1 else scale.float().reshape(-1, 1)


def _gptq(parts: Parts, bits: int, less: int) -> torch.Tensor:
    """qweight: [inputs / k, outputs], k inputs a word. qzeros: [groups, outputs / k]. scales: [groups, outputs]."""
    values = _unpacked(parts["qweight"].T, bits).T
    zeros = _unpacked(parts["qzeros"], bits)[:, : values.shape[1]] + less
    groups = _group_of(parts, len(values), len(parts["scales"]))
    return ((values - zeros[groups]) * parts["scales"].float()[groups]).T


def _awq(parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """qweight: [inputs, outputs / 8], in AWQ_ORDER. qzeros: [groups, outputs / 8]. scales: [groups, outputs]."""
    values, zeros = (_in_order(_unpacked(parts[name], 4)) for name in ("qweight", "qzeros"))
    groups = _group_of({}, len(values), len(parts["scales"]))
    return ((values - zeros[groups]) * parts["scales"].float()[groups]).T


def _compressed(parts: Parts, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    """weight_packed: [outputs, inputs / k]. weight_scale: [outputs, groups]. weight_zero_point: [outputs / k, groups].

    Packed numbers are signed ones plus half of their range, so that no zero point means a zero in the middle.
    """
    scale, middle = parts["weight_scale"].float(), 1 << bits - 1
    if "weight_packed" not in parts:
        values = parts["weight"].float()
        if "weight_zero_point" in parts:
            values = values - _per_row(parts["weight_zero_point"])
        return values * _per_row(scale)
    outputs, inputs = shape
    values = _unpacked(parts["weight_packed"], bits)[:, :inputs] - middle
    groups = _group_of({"g_idx": parts["weight_g_idx"]} if "weight_g_idx" in parts else {}, inputs, scale.shape[1])
    if "weight_zero_point" in parts:
        zeros = _unpacked(parts["weight_zero_point"].T, bits).T[:outputs] - middle
        values = values - zeros[:, groups]
    return values * scale[:, groups]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack numbers of four bits (sign, two of exponent, one of mantissa) with a power of two for each 32 of them.

    blocks: uint8[..., groups, 16], the lower four bits first. scales: uint8[..., groups], exponents plus 127. Returns
    float32[..., groups * 32] (OCP Microscaling Formats 1.0).
    """
    values = torch.tensor(FOUR_BITS, device=blocks.device)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers in the last dimension's words, the lowest bits first: int32[..., words * 32 / bits], from 0 up."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words.to(torch.int32)[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """AWQ's columns, eight by eight, as the model has them."""
    places = torch.tensor(AWQ_ORDER, device=values.device).argsort()
    return values.reshape(len(values), -1, 8)[..., places].flatten(-2)


def _group_of(parts: Parts, inputs: int, groups: int) -> torch.Tensor:
    """Which group of scales each input belongs to: by `g_idx` where there is one, else in runs of one length."""
    if "g_idx" in parts and len(parts["g_idx"]):
        return parts["g_idx"].long()
    if inputs % groups:
        raise ValueError(f"{inputs} inputs do not divide into {groups} groups")
    return torch.arange(inputs) // (inputs // groups)
