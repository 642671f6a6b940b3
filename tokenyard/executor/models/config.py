"""Reads a Hugging Face `config.json` into one small description that every decoder here is built from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenyard.base import ConfigError

RawConfig = Mapping[str, Any]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model; `factor` and what follows are for the scaled kinds only.

    kind: one of ROPE_TYPES. original_context: tokens of context the model was trained on before scaling.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of an MLP: each token takes the `active` best of `count` by the router.

    intermediate_size: of one expert. normed: whether the weights of the chosen experts sum to one. layers: those that
    have experts; the others have an MLP.
    """

    count: int
    active: int
    intermediate_size: int
    normed: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary embedding, grouped-query attention and a SiLU-gated MLP.

    windows has one entry per layer: how many tokens back (its own included) a token sees, 0 for all. experts: None for
    a model without. eos_token_ids, dtype and quantization are what the checkpoint declares; dtype is "" where it
    declares none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: RopeConfig
    windows: tuple[int, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    quantization: Mapping[str, Any] | None = None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV pool keeps for one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an architecture adds to the common fields."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None


def _llama(raw: RawConfig) -> _Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return _Traits(qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(raw: RawConfig) -> _Traits:
    # transformers takes 4096 where the key is absent; null is how a checkpoint says "no window".
    window = raw.get("sliding_window", 4096) or 0
    return _Traits(windows=_layer_windows(raw, int(window), full_layers=0))


def _qwen2(raw: RawConfig) -> _Traits:
    return _Traits(qkv_bias=True, windows=_qwen_windows(raw))


def _qwen3(raw: RawConfig) -> _Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return _Traits(qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True, windows=_qwen_windows(raw))


def _qwen3_moe(raw: RawConfig) -> _Traits:
    count = raw.get("num_experts") or _positive(raw, "num_local_experts")
    step = int(raw.get("decoder_sparse_step", 1))
    dense = set(raw.get("mlp_only_layers") or [])
    layers = (layer for layer in range(_positive(raw, "num_hidden_layers")) if layer not in dense)
    active = _positive(raw, "num_experts_per_tok")
    if not isinstance(count, int) or not 1 <= active <= count or step < 1:
        raise ConfigError(f"config.json: {active} of {count} experts every {step} layers make no sense")
    experts = ExpertsConfig(
        count=count,
        active=active,
        intermediate_size=_positive(raw, "moe_intermediate_size"),
        normed=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0),
    )
    # Unlike Qwen3, every layer has the window, if any.
    window = (raw.get("sliding_window") or 0) if raw.get("use_sliding_window", False) else 0
    windows = _layer_windows({**raw, "layer_types": None}, int(window), full_layers=0)
    return replace(_qwen3(raw), experts=experts, windows=windows)


def _qwen_windows(raw: RawConfig) -> tuple[int, ...]:
    window = (raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window", False) else 0
    return _layer_windows(raw, int(window), full_layers=int(raw.get("max_window_layers", 28)))


MOST_LAYERS = 10_000
"""Far beyond any model; a damaged file must not keep the loader busy for ever."""

ARCHITECTURES: dict[str, Callable[[RawConfig], _Traits]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def read_model_config(raw: RawConfig, generation: RawConfig | None = None) -> ModelConfig:
    """Describe the model that `raw` (a config.json) declares; `generation` is its generation_config.json, if any.

    Raises ConfigError for an architecture or a feature that is not supported and for missing or odd fields.
    """
    try:
        return _read_fields(raw, generation or {})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.json or generation_config.json has a field of the wrong type: {error}") from error


def _read_fields(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """See `read_model_config`; raises whatever a field of the wrong type leads to."""
    architecture = _architecture(raw)
    traits = ARCHITECTURES[architecture](raw)
    heads = _positive(raw, "num_attention_heads")
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    hidden = _positive(raw, "hidden_size")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    layers = _positive(raw, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {layers}; it can be at most {MOST_LAYERS}")
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ConfigError(f"config.json: rotary embedding needs an even head_dim, not {head_dim}")
    rope = _read_rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_length=_context_length(raw, rope),
        rope=rope,
        windows=traits.windows or (0,) * layers,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        experts=traits.experts,
        eos_token_ids=_eos_token_ids(raw, generation),
        quantization=raw.get("quantization_config"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
    )


def _architecture(raw: RawConfig) -> str:
    names = raw.get("architectures") or []
    found: str | None = next((name for name in names if name in ARCHITECTURES), None)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: architecture {names or 'missing'} is not supported; supported are {known}")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only silu")
    return found


def _positive(raw: RawConfig, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive whole number")
    return value


def _layer_windows(raw: RawConfig, window: int, full_layers: int) -> tuple[int, ...]:
    """Window of each layer: by `layer_types` where given, else the first `full_layers` layers see everything."""
    layers = _positive(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else 0 for layer in range(layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise ConfigError(f"config.json: layer_types must name full_attention or sliding_attention for {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _read_rope(raw: RawConfig) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    fields: dict[str, Any] = dict(raw.get("rope_scaling") or {})
    fields.update(raw.get("rope_parameters") or {})
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if float(fields.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported")
    theta = float(fields.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    attention_factor = fields.get("attention_factor")
    original = int(fields.get("original_max_position_embeddings") or _positive(raw, "max_position_embeddings"))
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(fields.get("factor") or raw["max_position_embeddings"] / original),
        original_context=original,
        low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
        high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(fields.get("mscale") or 0.0),
        mscale_all_dim=float(fields.get("mscale_all_dim") or 0.0),
        truncate=bool(fields.get("truncate", True)),
    )


def _context_length(raw: RawConfig, rope: RopeConfig) -> int:
    """Tokens of context: what the config states, or what the scaling reaches where that is more."""
    stated = _positive(raw, "max_position_embeddings")
    if rope.kind in ("linear", "yarn"):
        return max(stated, int(rope.original_context * rope.factor))
    return stated


def _eos_token_ids(raw: RawConfig, generation: RawConfig) -> tuple[int, ...]:
    """Return the ids that end an answer, those of generation_config.json first."""
    ids: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        for token in [value] if isinstance(value, int) else value or []:
            if token not in ids:
                ids.append(int(token))
    return tuple(ids)
