"""The sizes of a model that its step time and its KV depend on, read from a Hugging Face `config.json`."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.sim.hardware.known_models import find_known

NOT_MODELLED = (
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "interleave_moe_layer_step",
    "compress_ratios",
    "block_configs",
    "layer_group_size",
    "num_kv_shared_layers",
)
"""Keys of configurations whose layers differ in ways that are not read: Nemotron-H, MiMo-V2, Llama 4, DeepSeek V4, the
small ones of Gemma 4.
"""

BITS = {"fp8": 8, "mxfp4": 4, "nvfp4": 4, "int4": 4, "int8": 8, "awq": 4, "gptq": 4, "bf16": 16, "fp16": 16}
DEFAULT_BITS = 16


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer, in numbers of one token.

    kind: "full", "window", "latent" (MLA) or "state" (a recurrence).
    params: weights of its projections.
    heads, kv_heads: of queries, of keys and values.
    qk_dim, v_dim: sizes of a head for scores and for values, as decode computes them.
    prefill_dim: sum of both as prefill computes them.
    kv_values: numbers that a token adds to the cache, all heads.
    window: tokens that are read at most; 0 for all.
    state_values: numbers of a recurrent state in float32, all heads.
    conv_values: numbers of its convolution's last inputs, in the type of the KV.
    """

    kind: str
    params: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    prefill_dim: int
    kv_values: int
    window: int = 0
    state_values: int = 0
    conv_values: int = 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward part of a layer.

    params: weights that every token uses (dense, shared experts, router).
    experts, top_k: number of experts, and of those that a token uses; 0 for none.
    expert_params: weights of one expert.
    """

    params: int
    experts: int = 0
    top_k: int = 0
    expert_params: int = 0


LAYER_TYPES = {
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2"), "state"),
}
"""Kinds of attention by their names in `layer_types`, beside those that keep all tokens."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model: its layers with their counts, its embeddings, and the bits of its weights.

    layers: (attention, feed-forward part, number of such layers).
    weight_bits, expert_bits: of a weight of dense parts and of experts; attention has `attention_bits`.
    math_bits: of the inputs of a product with dense weights; `expert_math_bits` of one with experts.
    kv_bits: of a number in the KV cache.
    """

    name: str
    hidden: int
    vocab: int
    context_length: int
    layers: tuple[tuple[Attention, FeedForward, int], ...]
    tied: bool = False
    weight_bits: float = 16
    attention_bits: float = 16
    expert_bits: float = 16
    math_bits: int = 16
    attention_math_bits: int = 16
    expert_math_bits: int = 16
    kv_bits: int = 16

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(count for _, _, count in self.layers)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(part.experts for _, part, _ in self.layers)

    @property
    def family(self) -> str:
        """The kind of model whose measured errors apply: dense, moe, mla-moe, hybrid or window-moe."""
        kinds = {attention.kind for attention, _, _ in self.layers}
        if "state" in kinds:
            return "hybrid"
        if "latent" in kinds:
            return "mla-moe" if self.is_moe else "mla"
        if "window" in kinds:
            return "window-moe" if self.is_moe else "window"
        return "moe" if self.is_moe else "dense"

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        total = self.hidden * self.vocab * 2.0 * (1 if self.tied else 2)
        for attention, part, count in self.layers:
            total += count * attention.params * self.attention_bits / 8
            total += count * (part.params * self.weight_bits + part.experts * part.expert_params * self.expert_bits) / 8
        return total

    @property
    def total_params(self) -> int:
        """Number of weights."""
        total = self.hidden * self.vocab * (1 if self.tied else 2)
        return total + sum(
            count * (attention.params + part.params + part.experts * part.expert_params)
            for attention, part, count in self.layers
        )

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes of KV that a token adds on one of `tp` devices, in layers that keep all of it. Latents and heads that
        do not divide are on every device.
        """
        total = 0.0
        for attention, _, count in self.layers:
            if attention.kind in ("full", "latent"):
                total += count * attention.kv_values * self.kv_bits / 8 / kv_share(attention, tp)
        return max(round(total), 1)

    def fixed_kv_bytes(self, rows: int, tp: int = 1) -> float:
        """Bytes on one of `tp` devices of what `rows` requests keep whatever their length: windows, states."""
        total = 0.0
        for attention, _, count in self.layers:
            if attention.kind == "window":
                total += count * attention.window * attention.kv_values * self.kv_bits / 8 / kv_share(attention, tp)
        return total * rows + rows * self.state_slot_bytes(tp)

    def state_slot_bytes(self, tp: int = 1) -> int:
        """Bytes on one of `tp` devices of one recurrent state over all layers; 0 for a model without."""
        total = 0.0
        for attention, _, count in self.layers:
            each = attention.state_values * 4.0 + attention.conv_values * 2.0
            total += count * each / min(tp, attention.heads)
        return round(total)

    def with_types(self, precision: str) -> "ModelShape":
        """The model with all its weights in `precision` (fp8, nvfp4, mxfp4, int4, bf16), computed in that type."""
        if precision not in BITS:
            raise ConfigError(f"there is no weight type {precision!r}; choose one of {', '.join(BITS)}")
        return replace(self, **_types(precision, attention=True))


def kv_share(attention: Attention, tp: int) -> int:
    """Over how many of `tp` devices the KV of a layer is divided."""
    return 1 if attention.kind == "latent" else min(tp, attention.kv_heads)


def find_model(name: str) -> ModelShape:
    """The model of a `config.json`, a folder with one, or a known name.

    Raises ConfigError if there is none, or if the file lacks what is needed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as a model's config.json: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is not a model's config.json: it is not an object")
        if "quantization_config" not in config:
            config |= _modelopt(path.with_name("hf_quant_config.json"))
        return read_shape(config, path.parent.name or str(path), str(path))
    short, config = find_known(name)
    return read_shape(config, short, short)


def _modelopt(path: Path) -> dict[str, Any]:
    """The types of the weights where NVIDIA's checkpoints have them, in a file next to `config.json`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = document.get("quantization") if isinstance(document, dict) else None
    if not isinstance(found, dict):
        return {}
    return {"quantization_config": {**found, "quant_method": "modelopt", "ignore": found.get("exclude_modules", "")}}


def read_shape(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """The shape in a parsed `config.json`.

    Raises ConfigError, naming `source`, where a size is missing or impossible, and for families with parts that are not
    modelled.
    """
    text = config.get("text_config")
    whole = {**config, **text} if isinstance(text, Mapping) else dict(config)
    unknown = [key for key in NOT_MODELLED if whole.get(key)]
    if unknown:
        raise ConfigError(
            f"{source}: models with {unknown[0]} are not modelled; calibrate a server of it (tokenyard calibrate) and "
            "give --profile"
        )
    try:
        return _shape(_Config(whole, source), name)
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{source}: the model's sizes do not make sense ({error})") from None


class _Config:
    """Sizes by their name in the file."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is given, a whole number of at least 0."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.source}: {name} is {value!r}; it must be a whole number")
            return value
        if default is None:
            raise ConfigError(f"{self.source} has no {names[0]}; it is not the config.json of a language model")
        return default


def _shape(config: _Config, name: str) -> ModelShape:
    hidden, depth = config.size("hidden_size"), config.size("num_hidden_layers")
    if not hidden or not depth:
        raise ConfigError(f"{config.source}: hidden_size and num_hidden_layers must be above 0")
    layers = Counter((_attention(config, kind, hidden), _feed_forward(config, i, hidden)) for i, kind in _kinds(config))
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=config.size("vocab_size"),
        context_length=config.size("max_position_embeddings", default=131_072),
        layers=tuple((attention, part, count) for (attention, part), count in layers.items()),
        tied=bool(config.values.get("tie_word_embeddings", False)),
        **_weight_types(config.values),
    )


def _kinds(config: _Config) -> list[tuple[int, str]]:
    """The kind of attention of each layer."""
    values, depth = config.values, config.size("num_hidden_layers")
    window, whole = config.size("sliding_window", default=0), "latent" if values.get("kv_lora_rank") else "full"
    given = values.get("layer_types") or values.get("layers_block_type")
    if isinstance(given, list) and len(given) >= depth:
        names = {**LAYER_TYPES, "full_attention": whole, "attention": whole, "deepseek_sparse_attention": whole}
        strange = [str(kind) for kind in given[:depth] if str(kind) not in names]
        if strange:
            raise ConfigError(
                f"{config.source}: layers of type {strange[0][:40]!r} are not modelled; calibrate a server of it "
                "(tokenyard calibrate) and give --profile"
            )
        return [(i, names[str(given[i])]) for i in range(depth)]
    every = config.size("full_attention_interval", default=0)
    if every:
        return [(i, whole if (i + 1) % every == 0 else "state") for i in range(depth)]
    if whole == "latent":
        return [(i, whole) for i in range(depth)]
    pattern = config.size("sliding_window_pattern", default=0)
    if window and pattern:
        return [(i, "full" if (i + 1) % pattern == 0 else "window") for i in range(depth)]
    return [(i, "window" if window and values.get("use_sliding_window", True) else "full") for i in range(depth)]


def _attention(config: _Config, kind: str, hidden: int) -> Attention:
    heads = config.size("num_attention_heads")
    if not heads:
        raise ConfigError(f"{config.source}: num_attention_heads must be above 0")
    if kind == "latent":
        return _latent(config, hidden, heads)
    if kind == "state":
        return _recurrence(config, hidden, heads)
    kv_heads = config.size("num_key_value_heads", default=heads) or heads
    dim = config.size("head_dim", default=0) or hidden // heads
    projections = 2
    if kind == "full":  # in Gemma 4 they have heads of their own, and values may be the keys
        dim = config.size("global_head_dim", default=0) or dim
        if config.values.get("attention_k_eq_v"):
            kv_heads, projections = config.size("num_global_key_value_heads", default=0) or kv_heads, 1
    gate = 2 if config.values.get("attn_output_gate") else 1
    params = hidden * dim * (heads * (1 + gate) + projections * kv_heads)
    window = config.size("sliding_window", default=0) if kind == "window" else 0
    return Attention(kind, params, heads, kv_heads, dim, dim, 2 * dim, 2 * kv_heads * dim, window)


def _latent(config: _Config, hidden: int, heads: int) -> Attention:
    """Multi-head latent attention; with an index (DSA) a decode reads at most `index_topk` tokens of the latents."""
    rank, rope = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    nope, value = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    query = config.size("q_lora_rank", default=0)
    params = hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    params += (hidden * query + query * heads * (nope + rope)) if query else hidden * heads * (nope + rope)
    top, index = config.size("index_topk", default=0), config.size("index_head_dim", default=0)
    if top:
        params += (query or hidden) * index * config.size("index_n_heads", default=0) + hidden * index
    return Attention(
        "latent", params, heads, heads, rank + rope, rank, nope + rope + value, rank + rope + index // 2, top
    )


def _recurrence(config: _Config, hidden: int, heads: int) -> Attention:
    """A gated delta net or Mamba-2: a state of key size times value size per value head."""
    values = config.size("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", default=heads)
    keys = config.size("linear_num_key_heads", "n_groups", "mamba_n_groups", default=values)
    key_dim = config.size("linear_key_head_dim", "ssm_state_size", "mamba_d_state", default=128)
    value_dim = config.size("linear_value_head_dim", "mamba_head_dim", "mamba_d_head", default=128)
    params = hidden * (2 * keys * key_dim + 2 * values * value_dim + 2 * values) + values * value_dim * hidden
    state = values * key_dim * value_dim
    kernel = config.size("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", default=4)
    conv = max(kernel - 1, 0) * (2 * keys * key_dim + values * value_dim)
    return Attention("state", params, values, values, key_dim, value_dim, key_dim + value_dim, 0, 0, state, conv)


def _feed_forward(config: _Config, layer: int, hidden: int) -> FeedForward:
    values = config.values
    experts = config.size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    first, step = config.size("first_k_dense_replace", default=0), config.size("decoder_sparse_step", default=1) or 1
    dense_only = values.get("mlp_only_layers") or ()
    if not experts or layer < first or layer in dense_only or (layer + 1) % step:
        return FeedForward(3 * hidden * config.size("intermediate_size", "ffn_dim"))
    width = config.size("moe_intermediate_size", "intermediate_size")
    shared = config.size("shared_expert_intermediate_size", default=0)
    shared = shared or config.size("n_shared_experts", default=0) * width
    if values.get("enable_moe_block"):  # Gemma 4 adds experts to the dense part
        shared += config.size("intermediate_size")
    top_k = config.size("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts")
    return FeedForward(hidden * experts + 3 * hidden * shared, experts, min(top_k, experts), 3 * hidden * width)


def _weight_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """The bits of the weights, from `quantization_config`."""
    quantized = values.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return {}
    method = str(quantized.get("quant_method", "")).lower()
    ignored = str(quantized.get("ignore", "")) + str(quantized.get("modules_to_not_convert", ""))
    bits = quantized.get("bits", quantized.get("w_bit"))
    if method in ("compressed-tensors", "modelopt", "quark"):
        bits = _group_bits(quantized)
        precision = {4: "nvfp4" if "fp4" in json.dumps(quantized).lower() else "int4", 8: "fp8"}.get(bits, "bf16")
    elif method in ("gptq", "awq", "auto-round"):
        precision = "int4" if bits in (None, 4) else "int8"
    else:
        precision = method if method in BITS else "bf16"
    found = _types(precision, attention="attn" not in ignored)
    if method == "mxfp4" or "shared_experts" in ignored:
        # Only the experts are packed.
        found |= {"weight_bits": 16, "math_bits": 16}
    return found


def _group_bits(quantized: Mapping[str, Any]) -> int:
    groups = quantized.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    text = json.dumps(quantized).lower()
    return 4 if "fp4" in text else 8 if "fp8" in text else DEFAULT_BITS


def _types(precision: str, *, attention: bool) -> dict[str, Any]:
    """The fields of a model whose weights are of one type. Four-bit types have a scale for 16 or 32 weights."""
    bits = BITS[precision]
    stored = bits + 0.5 if bits == 4 else bits
    # Integer weights are unpacked and multiplied in 16 bits.
    math = DEFAULT_BITS if precision in ("int4", "int8", "awq", "gptq", "mxfp4") else bits
    found: dict[str, Any] = {"weight_bits": stored, "expert_bits": stored, "math_bits": math, "expert_math_bits": math}
    if attention:
        found |= {"attention_bits": stored, "attention_math_bits": math}
    return found
