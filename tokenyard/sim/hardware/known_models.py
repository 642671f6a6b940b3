"""The published sizes of well-known models, under the names of `config.json`, so that they need no download."""

import difflib
from typing import Any

from tokenyard.base import ConfigError

FP8 = {"quant_method": "fp8"}


def _llama(
    hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


def _experts(experts: int, top_k: int, width: int) -> dict[str, int]:
    return {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}


def _latent(query: int, nope: int, value: int) -> dict[str, int]:
    return {
        "kv_lora_rank": 512,
        "q_lora_rank": query,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "n_shared_experts": 1,
    }


def _delta_net(value_heads: int) -> dict[str, Any]:
    return {
        "full_attention_interval": 4,
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "attn_output_gate": True,
    }


_ALTERNATING = {
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "quantization_config": {"quant_method": "mxfp4", "ignore": "attn"},
}
_DEEPSEEK_V3 = _llama(7168, 61, 128, 128, 18432, 129280, 163840, first_k_dense_replace=3, quantization_config=FP8)
_DEEPSEEK_V3 |= _experts(256, 8, 2048) | _latent(1536, 128, 128)
_KIMI_K2 = _llama(7168, 61, 64, 64, 18432, 163840, 262144, first_k_dense_replace=1) | _experts(384, 8, 2048)
_KIMI_K2 |= _latent(1536, 128, 128) | {"quantization_config": {"quant_method": "awq", "ignore": "attn shared_experts"}}
_GLM_5 = _llama(6144, 78, 64, 64, 12288, 154880, 202752, first_k_dense_replace=3) | _experts(256, 8, 2048)
_GLM_5 |= _latent(2048, 192, 256) | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32}

_QWEN35_397B = _llama(4096, 60, 32, 2, 1024, 248320, 262144, head_dim=256)
_QWEN35_397B |= _experts(512, 10, 1024) | _delta_net(64) | {"shared_expert_intermediate_size": 1024}
_QWEN35_27B = _llama(5120, 64, 24, 4, 17408, 248320, 262144, head_dim=256) | _delta_net(48)
_QWEN35_08B = _llama(1024, 24, 8, 2, 3584, 248320, 262144, head_dim=256, tie_word_embeddings=True) | _delta_net(16)

KNOWN: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256, 131072),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128),
    "qwen3-14b": _llama(5120, 40, 40, 8, 17408, 151936, 40960, head_dim=128),
    "qwen3-32b": _llama(5120, 64, 64, 8, 25600, 151936, 40960, head_dim=128),
    "qwen3-30b-a3b": _llama(2048, 48, 32, 4, 6144, 151936, 40960, head_dim=128) | _experts(128, 8, 768),
    "qwen3-235b-a22b": _llama(4096, 94, 64, 4, 12288, 151936, 40960, head_dim=128) | _experts(128, 8, 1536),
    "qwen3.5-397b-a17b": _QWEN35_397B,
    "qwen3.5-27b": _QWEN35_27B,
    "qwen3.5-0.8b": _QWEN35_08B,
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, 32768) | _experts(8, 2, 14336),
    "mixtral-8x22b": _llama(6144, 56, 48, 8, 16384, 32768, 65536) | _experts(8, 2, 16384),
    "gpt-oss-120b": _llama(2880, 36, 64, 8, 2880, 201088, 131072, head_dim=64) | _experts(128, 4, 2880) | _ALTERNATING,
    "gpt-oss-20b": _llama(2880, 24, 64, 8, 2880, 201088, 131072, head_dim=64) | _experts(32, 4, 2880) | _ALTERNATING,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2.5": _KIMI_K2,
    "glm-5": _GLM_5,
    "minimax-m2.5": _llama(3072, 62, 48, 8, 1536, 200064, 196608, head_dim=128, quantization_config=FP8)
    | _experts(256, 8, 1536),
}

_SAME = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "minimax-m2": "minimax-m2.5",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "kimi-k2": "kimi-k2.5",
}
_WORDS = ("-instruct", "-instruct-2507", "-thinking-2507", "-v0.1", "-0324", "-0528")
_PRECISIONS = {"-fp8": FP8, "-nvfp4": {"quant_method": "nvfp4"}, "-awq": {"quant_method": "awq"}}


def known_models() -> list[str]:
    """The names that need no file, sorted."""
    return sorted({*KNOWN, *_SAME})


def find_known(name: str) -> tuple[str, dict[str, Any]]:
    """The short name and the sizes of a known model, by its name on the hub or its last part.

    A name that ends in `-FP8`, `-NVFP4` or `-AWQ` has weights of that type. Raises ConfigError, which lists the names,
    for an unknown one.
    """
    word, types = name.lower().rstrip("/").rpartition("/")[2].removeprefix("meta-"), {}
    for ending, quantized in _PRECISIONS.items():
        if word.endswith(ending):
            word, types = word.removesuffix(ending), {"quantization_config": quantized}
    for ending in _WORDS:
        word = word.removesuffix(ending)
    found = KNOWN.get(_SAME.get(word, word))
    if found is None:
        near = difflib.get_close_matches(word, known_models(), n=3)
        raise ConfigError(
            f"the sizes of model {name!r} are not known; "
            + (f"did you mean {' or '.join(near)}? Else " if near else "")
            + f"give its config.json, or one of {', '.join(known_models())}"
        )
    return name.rpartition("/")[2], found | types
