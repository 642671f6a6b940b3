"""Reads a Hugging Face `config.json` into a ModelConfig."""

import math

from tokenyard.base import ConfigError
from tokenyard.executor.models.architectures import (
    ARCHITECTURES,
    DEFAULTS,
    FFN_SIZE,
    FIXED,
    HEAD_SIZE,
    STATES_SCALED_CONTEXT,
    RawConfig,
    positive,
    refusal,
)
from tokenyard.executor.models.config import ROPE_TYPES, ModelConfig, RopeConfig

MAX_LAYERS = 10_000
"""Far beyond any model; a damaged file must not keep the loader busy for ever."""


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""The language model of each architecture that also reads images."""
OUTER_FIELDS = ("eos_token_id", "quantization_config", "dtype", "torch_dtype")


def read_model_config(raw: RawConfig, generation: RawConfig | None = None) -> ModelConfig:
    """Describe the model that `raw` (a config.json) declares; `generation` is its generation_config.json, if any.

    Raises ConfigError for an architecture or a feature that is not supported and for missing or odd fields.
    """
    try:
        return _read_fields(raw, generation or {})
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json or generation_config.json has a field of the wrong type: {error}") from error


def _read_fields(raw: RawConfig, generation: RawConfig) -> ModelConfig:
    """See `read_model_config`; raises whatever a field of the wrong type leads to."""
    given = _text_part(raw)
    architecture = _architecture(given)
    defaults = DEFAULTS.get(architecture, {})
    raw = {**defaults, **given, **FIXED.get(architecture, {})}
    if raw.get("rope_parameters") is None:
        raw["rope_parameters"] = defaults.get("rope_parameters")
    heads = positive(raw, "num_attention_heads")
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    hidden = positive(raw, "hidden_size")
    head_dim = positive(raw, HEAD_SIZE[architecture]) if architecture in HEAD_SIZE else 0
    head_dim = head_dim or int(raw.get("head_dim") or hidden // heads)
    layers = positive(raw, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {layers}; it can be at most {MAX_LAYERS}")
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ConfigError(f"config.json: rotary embedding needs an even head_dim, not {head_dim}")
    rope, local_rope = _read_ropes(raw, head_dim, architecture)
    common = ModelConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, FFN_SIZE.get(architecture, "intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_length=_context_length(raw, architecture, rope),
        rope=rope,
        local_rope=local_rope,
        windows=(0,) * layers,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        # The family's default counts only where there is no generation_config.json.
        eos_token_ids=_eos_token_ids(given if generation else raw, generation),
        quantization=raw.get("quantization_config"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
    )
    config = ARCHITECTURES[architecture](common, raw)
    _check_activation(raw, config)
    return config


def _text_part(raw: RawConfig) -> RawConfig:
    """Return the language model's config of a checkpoint that also reads images, which are not supported here."""
    names = raw.get("architectures") or []
    text = next((TEXT_PARTS[name] for name in names if name in TEXT_PARTS), "")
    if not text:
        return raw
    outer = {key: raw[key] for key in OUTER_FIELDS if key in raw}
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return {**outer, **(raw.get("text_config") or {}), **tied, "architectures": [text]}


def _architecture(raw: RawConfig) -> str:
    names = raw.get("architectures") or []
    found: str | None = next((name for name in names if name in ARCHITECTURES), None)
    if found is not None:
        return found
    reason = next((reason for name in names if (reason := refusal(name))), "")
    if reason:
        raise ConfigError(f"config.json: architecture {names[0]} is not supported: {reason}")
    known = ", ".join(ARCHITECTURES)
    raise ConfigError(f"config.json: architecture {names or 'missing'} is not supported; supported are {known}")


def _check_activation(raw: RawConfig, config: ModelConfig) -> None:
    """Refuse an activation other than the family's. Gemma 2's first configs name the exact GELU, but mean tanh's."""
    if config.activation == "gelu_tanh":
        known = ["gelu_pytorch_tanh"]
        given = raw.get("hidden_activation") or known[0]
    else:
        known = ["silu", "swish"]
        given = raw.get("hidden_act", "silu")
    if given not in known:
        raise ConfigError(f"config.json: hidden_act {given!r} is not supported, only {known[0]}")


def _read_ropes(raw: RawConfig, head_dim: int, architecture: str) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of the layers that see everything, and of those with a window where that is another one.

    `rope_parameters` (transformers 5) may hold one for each kind of layer; before, Gemma 3 named the base of the second
    one `rope_local_base_freq`. `rope_scaling` (before transformers 5) counts where both are given, as in transformers.
    """
    scaling, parameters = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    local_theta = raw.get("rope_local_base_freq")
    if architecture == "Gemma4ForCausalLM" and (scaling or set(parameters) != {"full_attention", "sliding_attention"}):
        raise ConfigError(
            "config.json: rope_parameters must have full_attention and sliding_attention in this family, and "
            "there must be no rope_scaling"
        )
    if local_theta is None and not {"full_attention", "sliding_attention"} & set(parameters):
        return _read_rope(raw, scaling or parameters, head_dim), None
    full, local = (parameters.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    local_raw = {**raw, "rope_theta": local_theta}
    return _read_rope(raw, {**full, **scaling}, head_dim), _read_rope(local_raw, local, head_dim)


def _read_rope(raw: RawConfig, fields: RawConfig, head_dim: int) -> RopeConfig:
    """One rotary embedding from its `fields`, and from the config around them for those that they lack."""
    kind = fields.get("rope_type") or fields.get("type") or "default"
    # Early files of Phi-3 used two other names for their factors.
    if "long_factor" in fields and kind in ("su", "yarn"):
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    share = float(fields.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    theta = float(fields.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "proportional":
        factor = float(fields.get("factor") or 1.0)
        if not (0.0 <= share <= 1.0 and 0.0 < factor < math.inf):
            raise ConfigError(f"config.json: rope type 'proportional' of share {share} and factor {factor} is odd")
        return RopeConfig(kind=kind, theta=theta, share=share, factor=factor)
    rotated = int(head_dim * share)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {share} of heads of {head_dim} is no even number of them"
        )
    if kind == "default":
        return RopeConfig(theta=theta, share=share)
    attention_factor = fields.get("attention_factor")
    stated = raw.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    longest = positive(raw, "max_position_embeddings")
    original = int(stated or longest)
    factor = float(fields.get("factor") or (0.0 if kind in ("linear", "llama3") else longest / original))
    if not 0.0 < factor < math.inf:
        raise ConfigError(f"config.json: rope type {kind!r} needs a factor above 0, not {fields.get('factor')!r}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        share=share,
        factor=factor,
        original_context=original,
        low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
        high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(fields.get("mscale") or 0.0),
        mscale_all_dim=float(fields.get("mscale_all_dim") or 0.0),
        truncate=bool(fields.get("truncate", True)),
        short_factors=_factors(fields, "short_factor", kind, rotated),
        long_factors=_factors(fields, "long_factor", kind, rotated),
    )


def _factors(fields: RawConfig, key: str, kind: str, rotated: int) -> tuple[float, ...]:
    """One of longrope's lists, () for other kinds."""
    if kind != "longrope":
        return ()
    found = tuple(float(factor) for factor in fields.get(key) or ())
    if len(found) != rotated // 2 or not all(found):
        raise ConfigError(f"config.json: longrope needs {rotated // 2} factors other than 0 in {key}, not {len(found)}")
    return found


def _context_length(raw: RawConfig, architecture: str, rope: RopeConfig) -> int:
    """Tokens of context: what the config states, or what the scaling reaches where that is more."""
    stated = positive(raw, "max_position_embeddings")
    if rope.kind in ("linear", "yarn") and architecture not in STATES_SCALED_CONTEXT:
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
