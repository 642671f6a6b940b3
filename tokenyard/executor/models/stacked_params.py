"""Checkpoints that store several of the decoder's matrices in one tensor: each is cut out under its own name.

The reverse of vLLM's `stacked_params_mapping`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.formats.packed import PackedBytes, PackedRows, PackedSource
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.models.config import DeltaNetConfig, ModelConfig
from tokenyard.executor.quantized import QuantizedWeights, mxfp4
from tokenyard.executor.weights import SafetensorsWeights, Weights

_LAYER_PART = re.compile(r"(model\.layers\.\d+\.)(self_attn\.[qkv]_proj|mlp\.(?:gate|up)_proj)(\.weight|\.bias)")
_DELTA_INPUT = re.compile(r"(model\.layers\.\d+\.linear_attn\.in_proj_)(qkv|z|b|a)\.weight")
_GRANITE_MLP = re.compile(
    r"(model\.layers\.\d+\.)mlp\.(?:experts\.(\d+)\.|shared_expert\.)?(gate|up|down)_proj\.weight"
)
MXFP4 = FORMATS["MXFP4"]
QUERY_GATE = "q_gate"
"""The name of the gates of what a head of queries attends to, which a checkpoint has in q_proj."""
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def checkpoint_weights(
    config: ModelConfig, files: SafetensorsWeights, unpacked: UnpackedMatrices | None = None
) -> Weights:
    """Return the tensors of a checkpoint by the names that the decoder has for them.

    unpacked: takes what is dequantized.

    Raises ConfigError for a quantization that is not supported.
    """
    quantization = config.quantization
    if config.architecture == "GptOssForCausalLM":
        if quantization and quantization.get("quant_method") != "mxfp4":
            method = quantization.get("quant_method")
            raise ConfigError(f"config.json: quantization {method!r} of gpt-oss is not supported, only mxfp4 or none")
        return StackedExperts(config, files, bool(quantization), unpacked)
    if config.experts is not None and not config.experts.beside_mlp and _has_stacked_experts(config, files):
        if quantization:
            raise ConfigError("config.json: quantization of experts that are stored as one tensor is not supported")
        return cut_out(config, FusedExperts(config, files))
    whole = QuantizedWeights(files, quantization, unpacked) if quantization else files
    return cut_out(config, whole)


def _has_stacked_experts(config: ModelConfig, files: SafetensorsWeights) -> bool:
    assert config.experts is not None
    return any(f"model.layers.{layer}.mlp.experts.gate_up_proj" in files for layer in config.experts.layers)


def cut_out(config: ModelConfig, whole: Weights) -> Weights:
    """Return the decoder's tensors of those that a family names otherwise, or stores as one."""
    names = RENAMED.get(config.architecture)
    if names is not None:
        whole = RenamedWeights(names, whole)
    if config.architecture == "GraniteMoeHybridForCausalLM":
        return GraniteMlps(config, whole)
    if config.architecture == "Qwen3NextForCausalLM":
        return InterleavedDeltaNet(config, whole)
    return StackedProjections(config, whole) if config.architecture == "Phi3ForCausalLM" else whole


class StackedProjections:
    """See Weights. q, k and v are rows of `qkv_proj`, gate and up of `gate_up_proj`, one after the other (Phi-3)."""

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        self._source = source
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inter = config.intermediate_size
        attention, mlp = ("self_attn.qkv_proj", q_size + 2 * kv_size), ("mlp.gate_up_proj", 2 * inter)
        self._rows = {
            "self_attn.q_proj": (*attention, 0),
            "self_attn.k_proj": (*attention, q_size),
            "self_attn.v_proj": (*attention, q_size + kv_size),
            "mlp.gate_proj": (*mlp, 0),
            "mlp.up_proj": (*mlp, inter),
        }
        # The parts of a tensor are requested one after the other.
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        match = _LAYER_PART.fullmatch(name)
        if match is None:
            return self._source.get(name, shape)
        layer, part, kind = match.groups()
        stored, rows, first = self._rows[part]
        if self._last[0] != f"{layer}{stored}{kind}":
            self._last = f"{layer}{stored}{kind}", self._source.get(f"{layer}{stored}{kind}", (rows, *shape[1:]))
        return self._last[1][first : first + shape[0]]

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        if not isinstance(self._source, PackedSource):
            return None
        match = _LAYER_PART.fullmatch(name)
        if match is None:
            return self._source.packed(name, shape)
        layer, part, kind = match.groups()
        stored, rows, first = self._rows[part]
        whole = self._source.packed(f"{layer}{stored}{kind}", (rows, shape[1]))
        if whole is None:
            return None
        return PackedRows(whole.format, shape, lambda: whole.read()[first : first + shape[0]], whole.order)


RENAMED = {
    "Lfm2ForCausalLM": {
        "model.norm.": "model.embedding_norm.",
        ".input_layernorm.": ".operator_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.up_proj.": ".feed_forward.w3.",
        ".mlp.down_proj.": ".feed_forward.w2.",
        ".self_attn.o_proj.": ".self_attn.out_proj.",
        ".q_norm.": ".q_layernorm.",
        ".k_norm.": ".k_layernorm.",
    },
    "DeepseekV2ForCausalLM": {".mlp.shared_expert.": ".mlp.shared_experts."},
    "DeepseekV3ForCausalLM": {".mlp.shared_expert.": ".mlp.shared_experts."},
    "GraniteMoeHybridForCausalLM": {".mlp.gate.": ".block_sparse_moe.router.layer."},
}
"""Parts of the decoder's names of tensors, and what a family's checkpoints have in their place."""


class RenamedWeights:
    """See Weights. Parts of names are others in the checkpoint."""

    def __init__(self, names: Mapping[str, str], source: Weights) -> None:
        self._names, self._source = names, source

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        return self._source.get(self._stored(name), shape)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        return self._source.packed(self._stored(name), shape) if isinstance(self._source, PackedSource) else None

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a tensor."""
        part = next((part for part in self._names if part in name), "")
        return name.replace(part, self._names[part]) if part else name


class GraniteMlps:
    """See Weights. Gate and up of an MLP are one tensor, and so are those of all experts of a layer (Granite 4)."""

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        self._source, self._count = source, config.experts.count if config.experts is not None else 0
        # The parts of a layer are requested expert by expert: each tensor is read once, and shared by its parts.
        self._layer, self._stacks = "", dict[str, torch.Tensor]()

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        match = _GRANITE_MLP.fullmatch(name)
        if match is None:
            return self._source.get(name, shape)
        layer, expert, part = match.groups()
        down, rows = part == "down", shape[0]
        stored = (
            f"{layer}{'block_sparse_moe' if expert else 'shared_mlp'}.{'output' if down else 'input'}_linear.weight"
        )
        if layer != self._layer:
            self._layer, self._stacks = layer, {}
        if stored not in self._stacks:
            wanted = (rows if down else 2 * rows, shape[1])
            self._stacks[stored] = self._source.get(stored, (self._count, *wanted) if expert else wanted)
        found = self._stacks[stored][int(expert)] if expert else self._stacks[stored]
        return found[rows:] if part == "up" else found[:rows]


class InterleavedDeltaNet:
    """See Weights. The inputs of a gated delta net are two tensors whose rows are ordered by key head (Qwen3-Next)."""

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        net = config.recurrent
        assert isinstance(net, DeltaNetConfig | None)
        self._source, self._net = source, net
        if net is not None:
            each = net.value_heads // net.key_heads
            values = each * net.value_dim
            self._sizes = {"qkvz": [net.key_dim, net.key_dim, values, values], "ba": [each, each]}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        match = _DELTA_INPUT.fullmatch(name)
        if match is None or self._net is None:
            return self._source.get(name, shape)
        layer, part = match.groups()
        stored = "qkvz" if part in ("qkv", "z") else "ba"
        sizes, heads = self._sizes[stored], self._net.key_heads
        whole = self._source.get(f"{layer}{stored}.weight", (heads * sum(sizes), shape[1]))
        parts = torch.split(whole.view(heads, sum(sizes), shape[1]), sizes, dim=1)
        wanted = {"qkv": parts[:3], "z": parts[3:], "b": parts[:1], "a": parts[1:]}[part]
        return torch.cat([each.flatten(0, 1) for each in wanted])


class QueriesAndGates:
    """See Weights. q_proj is the queries alone, and their output gates are a matrix of their own, QUERY_GATE."""

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        self._source, self._heads, self._head_dim = source, config.num_heads, config.head_dim

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        stored, gates = self._stored(name)
        if not stored:
            return self._source.get(name, shape)
        found = self._source.get(stored, (2 * shape[0], *shape[1:]))
        return found.view(self._heads, 2, self._head_dim, *shape[1:])[:, int(gates)].reshape(shape)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        if not isinstance(self._source, PackedSource):
            return None
        stored, gates = self._stored(name)
        if not stored:
            return self._source.packed(name, shape)
        whole = self._source.packed(stored, (2 * shape[0], shape[1]))
        if whole is None:
            return None
        heads = self._heads, 2, self._head_dim

        def read() -> PackedBytes:
            return whole.read().reshape(*heads, -1)[:, int(gates)].reshape(shape[0], -1)

        return replace(whole, shape=shape, read=read)

    def _stored(self, name: str) -> tuple[str, bool]:
        """The checkpoint's tensor with the rows of `name`, "" for the one of that name, and whether they are gates."""
        gates = f".{QUERY_GATE}." in name
        return name.replace(QUERY_GATE, "q_proj") if gates or ".q_proj." in name else "", gates


class FusedExperts:
    """See Weights. The experts of a layer lie in two tensors, gate and up of each one after the other (Qwen3.5)."""

    def __init__(self, config: ModelConfig, source: SafetensorsWeights) -> None:
        assert config.experts is not None
        self._source, self._experts = source, config.experts

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._source.get(name, shape)
        layer, expert, part, _ = match.groups()
        gated = part != "down"
        stored, rows = (f"{layer}gate_up_proj", 2 * shape[0]) if gated else (f"{layer}down_proj", shape[0])
        first = int(expert)
        found = self._source.get(stored, (self._experts.count, rows, shape[1]), (0, first, first + 1))[0]
        return found[shape[0] :] if part == "up" else found[: shape[0]]


class StackedExperts:
    """See Weights. The experts of a layer lie in one tensor, gate and up of each interleaved (gpt-oss).

    packed: whether they are mxfp4, four bits a number and a scale for 32 of them.
    unpacked: takes what is dequantized.
    """

    def __init__(
        self, config: ModelConfig, source: SafetensorsWeights, packed: bool, unpacked: UnpackedMatrices | None = None
    ) -> None:
        self._source, self._packed, self._dequantized = source, packed, unpacked or UnpackedMatrices()
        experts = config.experts
        self._count, self._inter = (experts.count, experts.intermediate_size) if experts else (0, 0)
        # The parts of a layer are requested expert by expert.
        self._layer, self._stacks = "", dict[str, tuple[torch.Tensor, ...]]()

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor `name`; see Weights. Raises ConfigError, naming it, for parts that do not fit together."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._source.get(name.replace(".mlp.gate.", ".mlp.router."), shape)
        layer, expert, part, kind = match.groups()
        self._of_layer(layer)
        gated = part != "down"
        stored = f"{layer}{'gate_up' if gated else 'down'}_proj"
        rows = 2 * self._inter if gated else shape[0]
        if kind == "bias":
            found = self._whole(f"{stored}_bias", rows)[int(expert)]
        elif self._packed:
            found = self._unpacked(stored, int(expert), rows, shape[1])
        else:
            found = self._whole(stored, shape[1], rows)[int(expert)].T
        made = self._source.convert(found[part == "up" :: 2] if gated else found)
        if self._packed and kind == "weight":
            self._dequantized.add("mxfp4", name, shape[0] * MXFP4.row_bytes(shape[1]), made.nbytes)
        return made

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        match = _EXPERT.fullmatch(name)
        if match is None or not self._packed or shape[1] % MXFP4.inputs:
            return None
        layer, expert, part, _ = match.groups()
        gated = part != "down"
        stored = f"{layer}{'gate_up' if gated else 'down'}_proj"

        def read() -> PackedBytes:
            self._of_layer(layer)
            blocks, scales = self._blocks(stored, 2 * self._inter if gated else shape[0], shape[1])
            rows = slice(int(part == "up"), None, 2) if gated else slice(None)
            return mxfp4_rows(blocks[int(expert)][rows].numpy(), scales[int(expert)][rows].numpy())

        return PackedRows(MXFP4, shape, read)

    def _of_layer(self, layer: str) -> None:
        """Begin with a layer's tensors."""
        if layer != self._layer:
            self._layer, self._stacks = layer, {}

    def _whole(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor [experts, *shape], read once."""
        if name not in self._stacks:
            self._stacks[name] = (self._source.get(name, (self._count, *shape)),)
        return self._stacks[name][0]

    def _unpacked(self, stored: str, expert: int, rows: int, inputs: int) -> torch.Tensor:
        """Return one expert's float32[rows, inputs]."""
        blocks, scales = self._blocks(stored, rows, inputs)
        return mxfp4(blocks[expert], scales[expert])

    def _blocks(self, stored: str, rows: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return the numbers and the scales of all experts, read once. Raises ConfigError for other shapes."""
        if stored not in self._stacks:
            parts = self._source.parts(stored, ("_blocks", "_scales"))
            if len(parts) != 2:
                raise ConfigError(f"the checkpoint lacks {stored}_blocks or {stored}_scales, which mxfp4 needs")
            self._stacks[stored] = parts["_blocks"], parts["_scales"]
        blocks, scales = self._stacks[stored]
        wanted = (self._count, rows, inputs // 32)
        if inputs % 32 or tuple(blocks.shape) != (*wanted, 16) or tuple(scales.shape) != wanted:
            raise ConfigError(
                f"{stored}: mxfp4 blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not make"
                f" {self._count} experts of {rows} x {inputs}"
            )
        return blocks, scales


def mxfp4_rows(blocks: PackedBytes, scales: PackedBytes) -> PackedBytes:
    """Return rows of the format MXFP4. blocks: uint8[rows, groups, 16], two numbers after another in a byte."""
    numbers = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:2], 2, 16)
    halves = numbers[:, :, 0] | numbers[:, :, 1] << 4
    return np.concatenate((scales[..., None], halves), axis=2).reshape(len(blocks), -1)
