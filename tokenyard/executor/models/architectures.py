"""How each architecture differs from the common fields of config.json, and why others are refused."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.executor.models.config import (
    DeltaNetConfig,
    LatentConfig,
    Mamba2Config,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    ShortConvConfig,
)

RawConfig = Mapping[str, Any]

ALPHA = 1.702
"""The factor in the sigmoid of gpt-oss's gate."""


def positive(raw: RawConfig, key: str) -> int:
    """Return a field that must be a positive whole number. Raises ConfigError."""
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive whole number")
    return value


def _llama(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    attention_bias = bool(raw.get("attention_bias", False))
    return replace(
        config, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )


def _seed_oss(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        config,
        qkv_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _granite(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        _llama(config, raw),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(raw.get("logits_scaling", 1.0)),
    )


def _mistral(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    # null is how a checkpoint says "no window".
    return replace(config, windows=_layer_windows(raw, int(raw["sliding_window"] or 0), full_layers=0))


def _qwen2(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(config, qkv_bias=True, windows=_qwen_windows(raw))


def _qwen3(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    attention_bias = bool(raw.get("attention_bias", False))
    return replace(
        config, qkv_bias=attention_bias, output_bias=attention_bias, qk_norm=True, windows=_qwen_windows(raw)
    )


def _qwen3_moe(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    # Unlike Qwen3, every layer has the window, if any.
    windows = _layer_windows({**raw, "layer_types": None}, _qwen_window(raw), full_layers=0)
    return replace(_qwen3(config, raw), experts=_qwen_experts(raw), windows=windows)


def _qwen_experts(raw: RawConfig) -> MoeConfig:
    count = raw.get("num_experts") or positive(raw, "num_local_experts")
    step = int(raw.get("decoder_sparse_step", 1))
    dense = set(raw.get("mlp_only_layers") or [])
    layers = (layer for layer in range(positive(raw, "num_hidden_layers")) if layer not in dense)
    active = positive(raw, "num_experts_per_tok")
    if not isinstance(count, int) or not 1 <= active <= count or step < 1:
        raise ConfigError(f"config.json: {active} of {count} experts every {step} layers make no sense")
    return MoeConfig(
        count=count,
        active=active,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        normed=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0),
    )


def _qwen3_5(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen3-Next and Qwen3.5: most layers have a gated delta net, the others attention with an output gate."""
    if not raw.get("attn_output_gate", True):
        raise ConfigError("config.json: attn_output_gate false is not supported; this family has the gate")
    layers = _layers(raw)
    every = int(raw.get("full_attention_interval") or 4)
    kinds = raw.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in layers
    ]
    key_heads, value_heads = positive(raw, "linear_num_key_heads"), positive(raw, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ConfigError(f"config.json: {value_heads} value heads cannot share {key_heads} key heads evenly")
    net = DeltaNetConfig(
        layers=_kinds(raw, kinds, "linear_attention"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=positive(raw, "linear_key_head_dim"),
        value_dim=positive(raw, "linear_value_head_dim"),
        kernel=positive(raw, "linear_conv_kernel_dim"),
    )
    bias = bool(raw.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        recurrent=net if net.layers else None,
    )


def _kinds(raw: RawConfig, given: list[str], recurrent: str) -> frozenset[int]:
    """Return the layers of kind `recurrent` among `given`, which must have attention too."""
    if len(given) != len(_layers(raw)) or set(given) - {"full_attention", recurrent}:
        raise ConfigError(
            f"config.json: layer_types must name full_attention or {recurrent} for {len(_layers(raw))} layers"
        )
    if "full_attention" not in given:
        raise ConfigError("config.json: layer_types names no full_attention; a model needs one such layer at least")
    return frozenset(layer for layer, kind in enumerate(given) if kind == recurrent)


def _lfm2(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    attending, bias = raw.get("full_attn_idxs"), bool(raw.get("conv_bias"))
    kinds = raw.get("layer_types") or [
        "full_attention" if attending is None or layer in attending else "conv" for layer in _layers(raw)
    ]
    layers = _kinds(raw, kinds, "conv")
    if positive(raw, "conv_L_cache") == 1:
        raise ConfigError("config.json: conv_L_cache 1 is not supported; a convolution sees at least two tokens")
    conv = ShortConvConfig(layers, config.hidden_size, positive(raw, "conv_L_cache"), bias)
    inter = positive(raw, "block_ff_dim" if raw.get("block_ff_dim") else "intermediate_size")
    if raw.get("block_auto_adjust_ff_dim", True):
        inter, multiple = int(2 * inter / 3), int(raw.get("block_multiple_of", 256))
        multiplier = raw.get("block_ffn_dim_multiplier", 1.0)
        if multiplier is not None:
            inter = -(-int(multiplier * inter) // multiple) * multiple
    return replace(
        config,
        intermediate_size=inter,
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        tied_embeddings=bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True))),
        qk_norm=True,
        recurrent=conv if layers else None,
    )


def _granite_hybrid(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Granite 4: Mamba-2 in most layers, a shared expert without a gate, and scales at several places."""
    older = {"mamba": "linear_attention", "attention": "full_attention"}
    given = raw.get("layer_types") or raw.get("layers_block_type") or ["linear_attention"] * config.num_layers
    layers = _kinds(raw, [older.get(kind, kind) for kind in given], "linear_attention")
    position = raw.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise ConfigError(f"config.json: position_embedding_type {position!r} is not supported, only rope or none")
    heads, inner = positive(raw, "mamba_n_heads"), positive(raw, "mamba_expand") * config.hidden_size
    groups, head_dim = positive(raw, "mamba_n_groups"), raw.get("mamba_d_head", "auto")
    if inner % heads or heads % groups or head_dim not in ("auto", inner // heads):
        raise ConfigError(
            f"config.json: {heads} heads of {head_dim} in {groups} groups do not make {inner}, the inner size"
        )
    mamba = Mamba2Config(
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_size=positive(raw, "mamba_d_state"),
        kernel=positive(raw, "mamba_d_conv"),
        bias=bool(raw.get("mamba_proj_bias", False)),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        step_limits=_step_limits(raw.get("time_step_limit")),
    )
    shared, count, active = positive(raw, "shared_intermediate_size"), int(raw.get("num_local_experts") or 0), 0
    if count:
        active = positive(raw, "num_experts_per_tok")
        _check_active(active, count)
    experts = MoeConfig(
        count=count,
        active=active,
        intermediate_size=positive(raw, "intermediate_size"),
        normed=True,
        layers=frozenset(_layers(raw)),
        shared_size=shared,
        shared_gated=False,
    )
    return replace(
        _granite(config, raw),
        mlp_bias=False,
        intermediate_size=shared,
        # A rope of which no wave turns leaves heads as they are.
        rope=config.rope if position == "rope" else RopeConfig(kind="proportional", share=0.0),
        recurrent=mamba if layers else None,
        experts=experts if count else None,
    )


def _step_limits(given: Any) -> tuple[float, float]:
    """Return the bounds of a step; transformers writes the infinite one as an object."""
    low, high = (
        float(bound.get("__float__", "") if isinstance(bound, dict) else bound) for bound in given or (0.0, math.inf)
    )
    return low, high


def _qwen3_next(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    if config.architecture == "Qwen3NextForCausalLM" and raw.get("num_experts") == 0:
        return _qwen3_5(config, raw)
    size = "shared_expert_intermediate_size"
    shared = 0 if raw.get(size) == 0 else positive(raw, size)
    return replace(_qwen3_5(config, raw), experts=replace(_qwen_experts(raw), shared_size=shared))


def _phi3(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    window = raw.get("sliding_window") or 0
    return replace(config, windows=_layer_windows({**raw, "layer_types": None}, int(window), full_layers=0))


def _gemma(config: ModelConfig, raw: RawConfig, every: int) -> ModelConfig:
    """What Gemma 2 and 3 share; each `every`th layer sees everything, the others have the window."""
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported; this is a model for embeddings")
    bias = bool(raw.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=_alternate_windows(raw, int(raw["sliding_window"] or 0), every),
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=positive(raw, "hidden_size") ** 0.5,
    )


def _gemma2(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(_gemma(config, raw, every=2), attention_softcap=float(raw.get("attn_logit_softcapping") or 0.0))


def _gemma3(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(_gemma(config, raw, every=int(raw.get("sliding_window_pattern") or 6)), qk_norm=True)


def _gemma4(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Text of Gemma 4. The last layers read keys and values of the last layer of their kind before them."""
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise ConfigError(
            f"config.json: use_bidirectional_attention {raw['use_bidirectional_attention']!r} is not supported"
        )
    layers, window = _layers(raw), positive(raw, "sliding_window")
    # transformers takes the last layer as one without a window, whatever its kind.
    windows = (*_alternate_windows(raw, window, 6)[:-1], 0)
    shared = int(raw.get("num_kv_shared_layers") or 0)
    first = len(layers) - shared
    owners = {windows[layer]: layer for layer in layers[:first]}
    if not 0 <= shared < len(layers) or set(windows) - set(owners):
        raise ConfigError(
            f"config.json: num_kv_shared_layers {shared} leaves layers of some kind without keys and values to read"
        )
    head_dim, kv_heads = _gemma4_global_heads(raw, windows)
    if config.num_heads % (kv_heads or config.num_kv_heads):
        raise ConfigError(
            f"config.json: {config.num_heads} attention heads cannot share {kv_heads} key-value heads evenly"
        )
    per_layer = int(raw.get("hidden_size_per_layer_input") or 0)
    if per_layer and positive(raw, "vocab_size_per_layer_input") < config.vocab_size:
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input {raw['vocab_size_per_layer_input']} is less than vocab_size "
            f"{config.vocab_size}; some tokens would have no embedding"
        )
    bias = bool(raw.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=windows,
        global_head_dim=head_dim if head_dim != config.head_dim else 0,
        global_kv_heads=kv_heads if kv_heads != config.num_kv_heads else 0,
        kv_sources=tuple(layer if layer < first else owners[windows[layer]] for layer in layers),
        k_eq_v=bool(raw.get("attention_k_eq_v")),
        v_norm=True,
        qk_norm=True,
        attention_scale=1.0,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=positive(raw, "hidden_size") ** 0.5,
        wide_shared_mlp=bool(raw.get("use_double_wide_mlp")),
        layer_scalars=True,
        per_layer_size=per_layer,
        per_layer_vocab=positive(raw, "vocab_size_per_layer_input") if per_layer else 0,
        experts=_gemma4_experts(raw) if raw.get("enable_moe_block") else None,
    )


def _gemma4_global_heads(raw: RawConfig, windows: tuple[int, ...]) -> tuple[int, int]:
    """Dimensions of heads, and KV heads (0 for those of other layers), of the layers without a window."""
    found = {"head_dim": raw.get("global_head_dim") or 512}
    if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads"):
        found["num_key_value_heads"] = raw["num_global_key_value_heads"]
    given = raw.get("per_layer_config")
    if given is not None:
        full = [given.get(str(layer)) or {} for layer, window in enumerate(windows) if not window]
        found = full[0]
        others = set(given) - {str(layer) for layer, window in enumerate(windows) if not window}
        if others or any(one != found for one in full) or set(found) - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(
                "config.json: per_layer_config is not supported, unless it gives all layers with full_attention the "
                "same head_dim and num_key_value_heads"
            )
    head_dim = positive({"head_dim": raw["head_dim"], **found}, "head_dim")
    if head_dim % 2:
        raise ConfigError(f"config.json: rotary embedding needs an even head_dim, not {head_dim}")
    return head_dim, positive(found, "num_key_value_heads") if "num_key_value_heads" in found else 0


def _gemma4_experts(raw: RawConfig) -> MoeConfig:
    count, active = positive(raw, "num_experts"), positive(raw, "top_k_experts")
    _check_active(active, count)
    return MoeConfig(
        count=count,
        active=active,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        normed=True,
        layers=frozenset(_layers(raw)),
        beside_mlp=True,
    )


def _deepseek(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek V2 and V3: latent attention, and experts next to shared ones in all but the first layers."""
    third = config.architecture == "DeepseekV3ForCausalLM"
    methods = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    known = {
        "topk_method": methods,
        "scoring_func": ("sigmoid" if third else "softmax",),
        "moe_layer_freq": (1,),
    }
    for field, values in known.items():
        if raw.get(field, values[0]) not in (*values, None):
            raise ConfigError(
                f"config.json: {field} {raw[field]!r} is not supported, only {' and '.join(map(str, values))}"
            )
    latent = LatentConfig(
        kv_rank=positive(raw, "kv_lora_rank"),
        q_rank=positive(raw, "q_lora_rank") if raw.get("q_lora_rank") is not None else 0,
        plain_dim=positive(raw, "qk_nope_head_dim"),
        value_dim=positive(raw, "v_head_dim"),
        interleaved=not third or bool(raw.get("rope_interleave", True)),
    )
    rope, bias = config.rope, bool(raw.get("attention_bias", False))
    scale = (latent.plain_dim + config.head_dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1.0:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=not third and bool(raw.get("mlp_bias", False)),
        attention_scale=scale,
        latent=latent,
        experts=_deepseek_experts(raw, third),
    )


def _deepseek_experts(raw: RawConfig, third: bool) -> MoeConfig | None:
    names = ("n_routed_experts", "num_local_experts" if third else "num_experts")
    count, active = (
        positive(raw, next((name for name in names if name in raw), names[0])),
        positive(raw, "num_experts_per_tok"),
    )
    grouped = third or raw.get("topk_method") == "group_limited_greedy"
    groups, top = (int(raw.get(key) or 1) if grouped else 1 for key in ("n_group", "topk_group"))
    size, least = count // groups, 2 if third else 1
    if count % groups or not 1 <= top <= groups or active > top * size or (groups > 1 and size < least):
        raise ConfigError(f"config.json: {active} of {count} experts, in {top} of {groups} groups, make no sense")
    layers = frozenset(_layers(raw)) - set(range(int(raw.get("first_k_dense_replace") or 0)))
    inter = positive(raw, "moe_intermediate_size")
    found = MoeConfig(
        count=count,
        active=active,
        intermediate_size=inter,
        # transformers does not read the field in V2.
        normed=third and bool(raw.get("norm_topk_prob", True)),
        layers=layers,
        shared_size=inter * positive(raw, "n_shared_experts"),
        shared_gated=False,
        sigmoid=third,
        groups=groups,
        top_groups=top,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
    )
    return found if layers else None


def _check_active(active: int, count: int) -> None:
    if active > count:
        raise ConfigError(f"config.json: a token cannot go to {active} of {count} experts")


def _gpt_oss(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = bool(raw.get("attention_bias", True))
    count, active = positive(raw, "num_local_experts"), positive(raw, "num_experts_per_tok")
    _check_active(active, count)
    if float(raw.get("swiglu_alpha", ALPHA)) != ALPHA:
        raise ConfigError(f"config.json: swiglu_alpha {raw['swiglu_alpha']} is not supported, only {ALPHA}")
    experts = MoeConfig(
        count=count,
        active=active,
        intermediate_size=positive(raw, "intermediate_size"),
        normed=True,
        layers=frozenset(range(positive(raw, "num_hidden_layers"))),
        bias=True,
    )
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=_alternate_windows(raw, int(raw["sliding_window"] or 0), 2),
        experts=experts,
        sinks=True,
        activation="clamped_swiglu",
        gate_limit=float(raw.get("swiglu_limit", 7.0)),
    )


def _qwen_window(raw: RawConfig) -> int:
    return int(raw["sliding_window"] or 0) if raw.get("use_sliding_window", False) else 0


def _qwen_windows(raw: RawConfig) -> tuple[int, ...]:
    return _layer_windows(raw, _qwen_window(raw), full_layers=int(raw.get("max_window_layers", 28)))


def _alternate_windows(raw: RawConfig, window: int, every: int) -> tuple[int, ...]:
    """Window of each layer: by `layer_types` where given, else each `every`th layer sees everything."""
    kinds = ("full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in _layers(raw))
    return _layer_windows({**raw, "layer_types": raw.get("layer_types") or list(kinds)}, window, full_layers=0)


def _layers(raw: RawConfig) -> range:
    return range(positive(raw, "num_hidden_layers"))


def _layer_windows(raw: RawConfig, window: int, full_layers: int) -> tuple[int, ...]:
    """Window of each layer: by `layer_types` where given, else the first `full_layers` layers see everything."""
    layers, types = _layers(raw), raw.get("layer_types")
    if types is None:
        return tuple(window if layer >= full_layers else 0 for layer in layers)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != len(layers):
        raise ConfigError(
            f"config.json: layer_types must name full_attention or sliding_attention for {len(layers)} layers"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


ARCHITECTURES: dict[str, Callable[[ModelConfig, RawConfig], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_next,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma4ForCausalLM": _gemma4,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "GraniteForCausalLM": _granite,
    "SeedOssForCausalLM": _seed_oss,
    "Lfm2ForCausalLM": _lfm2,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
}

_GEMMA: RawConfig = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
}
_DELTA_NET: RawConfig = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_LATENT_SIZES: RawConfig = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_SHARED_EXPERT: RawConfig = {"num_key_value_heads": 2, "shared_expert_intermediate_size": 512}
DEFAULTS: dict[str, RawConfig] = {
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
    "Qwen3NextForCausalLM": {**_DELTA_NET, **_SHARED_EXPERT, "norm_topk_prob": True},
    "Qwen3_5ForCausalLM": {**_DELTA_NET, "num_key_value_heads": 4},
    "Qwen3_5MoeForCausalLM": {**_DELTA_NET, **_SHARED_EXPERT},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32_000},
    "Gemma2ForCausalLM": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # The files of the larger models omit the fields that these models have in common.
    "Gemma3ForCausalLM": {
        **_GEMMA,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "Gemma4ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "eos_token_id": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "DeepseekV2ForCausalLM": {
        **_LATENT_SIZES,
        "n_shared_experts": 2,
        "eos_token_id": 2,
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT_SIZES,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 1,
    },
    "GraniteForCausalLM": {"eos_token_id": 2},
    "SeedOssForCausalLM": {"num_key_value_heads": 8, "head_dim": 128, "eos_token_id": 2},
    "Lfm2ForCausalLM": {
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "rope_theta": 1e6,
        "eos_token_id": 2,
    },
    "GraniteMoeHybridForCausalLM": {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "eos_token_id": 2,
    },
    "GptOssForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
}
"""What transformers takes where a config.json has no such key; a null is a value, except of rope_parameters.

The sizes that make up a model have no defaults here: a file without them is refused.
"""

FIXED: dict[str, RawConfig] = {
    # Every layer has experts, whose weights sum to one.
    "Qwen3_5MoeForCausalLM": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None},
    # Latents have no heads.
    "DeepseekV2ForCausalLM": {"num_key_value_heads": None},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": None},
    "Gemma4ForCausalLM": {"rope_theta": None, "rope_local_base_freq": None},
}
"""Fields of other families that transformers does not read in these: their values, whatever a config.json says."""

HEAD_SIZE = dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "qk_rope_head_dim")
"""The field for the rotated size of a head in families that have no head_dim."""

FFN_SIZE = {"Qwen3_5MoeForCausalLM": "moe_intermediate_size"}
"""The field for the size of an MLP in families that have experts in all layers, and so no intermediate_size."""

STATES_SCALED_CONTEXT = frozenset({"Gemma3ForCausalLM"})
"""Families whose max_position_embeddings holds the context after scaling, whatever the kind of rope."""

_NO_POOL = "in the place of keys and values, which the KV pool cannot hold"
_LATENT = f"its attention keeps one latent vector a token (MLA) {_NO_POOL}"
_STATES = f"its layers keep states {_NO_POOL}"
_UNEQUAL = "its layers have keys and values of unequal shapes or share them, and the KV pool has one shape"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("DeepseekV32", "KimiK25", "Glm4MoeLite", "MiniCPM3"), _LATENT),
    **dict.fromkeys(("Mamba", "Mamba2", "FalconH1", "Jamba", "Bamba", "NemotronH"), _STATES),
    "Gemma3n": _UNEQUAL,
    "Gemma": "Gemma 1 is not built; Gemma 2 and 3 are",
}
"""Why a family is not supported, by the beginning of its architectures' names."""


def refusal(name: str) -> str:
    """Return why an architecture is not supported, "" where nothing is known about it."""
    for ending in ("ForCausalLM", "ForConditionalGeneration"):
        if name.removesuffix(ending) in REFUSED:
            return REFUSED[name.removesuffix(ending)]
    return ""
