"""Fields of a family's config.json that a GGUF file states or omits. Needs no torch."""

from typing import Any

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.gguf_reader import GgufFile

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The one size of Gemma whose scores are scaled by something else than the size of a head; no file says so."""
TURNS_NOT = 1e10
"""A factor on the wavelength of a rotation that makes it none."""


def own_facts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return fields of config.json that a family has in addition to the common ones; `config` are those."""
    facts = FACTS.get(file.architecture)
    return facts(file, config) if facts else {}


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == LAYERS_OF_27B[file.architecture]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.own("attention.sliding_window"),
        "attn_logit_softcapping": file.own("attn_logit_softcapping"),
        "final_logit_softcapping": file.own("final_logit_softcapping"),
    }


def _gemma2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    found = _gemma(file, config)
    return found | {key: cap for key, cap in caps.items() if found[key] is None}


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    bases = {
        "rope_theta": file.own("rope.freq_base", 1e6),
        "rope_local_base_freq": file.own("rope.freq_base_swa", 1e4),
    }
    return _gemma(file, config) | bases


def _gemma4(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes that differ by the kind of layer are lists with one for each layer. Dimensions that do not turn have a huge
    factor.
    """
    layers = config["num_hidden_layers"]
    windows = file.own("attention.sliding_window_pattern")
    if not isinstance(windows, list) or len(windows) != layers:
        raise ConfigError(f"{file.path} does not say which of its {layers} layers have a window")
    own, shared = config["head_dim"], file.own("attention.shared_kv_layers", 0)
    local = file.own("attention.key_length_swa", own)
    kv_heads, inner = (
        one if isinstance(one, list) else [one] * layers
        for one in (config["num_key_value_heads"], file.own("feed_forward_length"))
    )
    full = next((layer for layer in range(layers) if not windows[layer]), 0)
    factors = file.tensors.get("rope_freqs.weight")
    turning = 1.0 if factors is None else float((factors.data < TURNS_NOT).mean())
    per_layer = file.own("embedding_length_per_layer_input", 0)
    return {
        "head_dim": local,
        "global_head_dim": own,
        "num_key_value_heads": next((heads for heads, own in zip(kv_heads, windows, strict=True) if own), kv_heads[0]),
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "layer_types": ["sliding_attention" if own else "full_attention" for own in windows],
        "sliding_window": file.own("attention.sliding_window"),
        "final_logit_softcapping": file.own("final_logit_softcapping"),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": config["vocab_size"],
        "enable_moe_block": bool(file.own("expert_count", 0)),
        "top_k_experts": file.own("expert_used_count"),
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.own("rope.freq_base", 1e6),
                "partial_rotary_factor": turning,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.own("rope.freq_base_swa", 1e4),
                "partial_rotary_factor": file.own("rope.dimension_count_swa", local) / local,
            },
        },
    }


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"sliding_window": file.own("attention.sliding_window") or None}
    lists = {key: file.tensors.get(f"rope_factors_{key}.weight") for key in ("short", "long")}
    if all(found is not None for found in lists.values()):
        facts["original_max_position_embeddings"] = file.own("rope.scaling.original_context_length")
        facts["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": file.own("rope.scaling.attn_factor"),
            **{f"{key}_factor": found.data.tolist() for key, found in lists.items() if found is not None},
        }
    return facts


def _gpt_oss(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"sliding_window": file.own("attention.sliding_window"), "attention_bias": True}
    original = file.own("rope.scaling.original_context_length")
    if file.own("rope.scaling.type") == "yarn" and original:
        facts["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": file.own("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": original,
            "truncate": False,
        }
    return facts


def _granite(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": file.own("embedding_scale", 1.0),
        "residual_multiplier": file.own("residual_scale", 1.0),
        "logits_scaling": file.own("logit_scale", 1.0),
        "attention_multiplier": file.own("attention.scale") or config["head_dim"] ** -0.5,
    }


def _layer_types(file: GgufFile, layers: int, other: str) -> list[str]:
    """What each layer is: those that attend have a product of queries."""
    attend = (f"blk.{layer}.attn_q.weight" in file.tensors for layer in range(layers))
    return ["full_attention" if own else other for own in attend]


def _kv_heads(config: dict[str, Any]) -> dict[str, Any]:
    """One number, where the file has one for each layer, 0 for those that do not attend."""
    kv_heads = config["num_key_value_heads"]
    return {"num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads}


def _lfm2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_kv_heads(config),
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": file.own("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(file, config["num_hidden_layers"], "conv"),
    }


def _qwen35(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    value_heads = file.own("ssm.time_step_rank")
    # Draft heads come after the layers.
    layers = config["num_hidden_layers"] - file.own("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": layers,
        "layer_types": _layer_types(file, layers, "linear_attention"),
        "linear_num_key_heads": file.own("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": file.own("ssm.state_size"),
        "linear_value_head_dim": file.own("ssm.inner_size", 0) // (value_heads or 1),
        "linear_conv_kernel_dim": file.own("ssm.conv_kernel"),
    }


def _qwen35_moe(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    shared = file.own("expert_shared_feed_forward_length", 0)
    return _qwen35(file, config) | {"shared_expert_intermediate_size": shared}


def _granite_hybrid(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    layers, inner = config["num_hidden_layers"], file.own("ssm.inner_size", 0)
    kinds = _layer_types(file, layers, "linear_attention")
    mamba = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    heads = file.own("ssm.time_step_rank")
    return {
        **_granite(file, config),
        **_kv_heads(config),
        "num_experts": None,
        "num_local_experts": file.own("expert_count", 0),
        "intermediate_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "shared_intermediate_size": file.own("expert_shared_feed_forward_length") or file.own("feed_forward_length"),
        "position_embedding_type": "rope" if file.own("rope.scaling.finetuned", True) else "nope",
        "layer_types": kinds,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // (heads or 1),
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": file.own("ssm.group_count"),
        "mamba_d_state": file.own("ssm.state_size"),
        "mamba_d_conv": file.own("ssm.conv_kernel"),
        "mamba_conv_bias": f"blk.{mamba}.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": False,
    }


FACTS = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "qwen3next": _qwen35_moe,
}
