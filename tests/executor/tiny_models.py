"""Small random models of every supported kind, made by transformers, which is the judge of what is right."""

import functools
import os

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

VOCAB = 199

DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
"""Where our executor runs in the tests of exactness; transformers always runs on the CPU."""

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ODD = {"hidden_size": 120, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0],
}


def rope(**fields):
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


CASES = {
    "llama": (LlamaConfig, {}),
    "llama-odd": (LlamaConfig, ODD),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": (LlamaConfig, rope(rope_type="linear", factor=2.0)),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama-yarn-mscale": (LlamaConfig, {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "mistral-window": (MistralConfig, {"sliding_window": 8}),
    "mistral-full": (MistralConfig, {"sliding_window": None, **ODD}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 20}),
    "qwen3-layers": (
        Qwen3Config,
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


EXPERT_CASES = {
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 20,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
}
GEMMA = {"head_dim": 20, "sliding_window": 9, "query_pre_attn_scalar": 30}
FAMILY_CASES = {
    "seed-oss": (SeedOssConfig, {"head_dim": 20, "attention_out_bias": True, "mlp_bias": True, "pad_token_id": 0}),
    "granite": (
        GraniteConfig,
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
            **{"logits_scaling": 2.0, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
    "phi3-partial-window": (
        Phi3Config,
        {
            **{"hidden_size": 64, "pad_token_id": 0, "sliding_window": 9},
            **rope(rope_type="default", partial_rotary_factor=0.75),
        },
    ),
    "phi3-long": (
        Phi3Config,
        {"pad_token_id": 0, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}},
    ),
    "phi3-short": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256},
        },
    ),
    "gemma2": (
        Gemma2Config,
        {
            **GEMMA,
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "initializer_range": 0.1},
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma2-plain": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "hidden_size": 64,
            "intermediate_size": 32,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}
"""Families with layers that no other family has."""

GEMMA4 = {
    **{"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 24, "sliding_window": 9, "pad_token_id": 0},
    **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB, "initializer_range": 0.1},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
DEEPSEEK = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
    **{"v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
}
TORCH_CASES = {
    "deepseek-v2": (
        DeepseekV2Config,
        {
            **{**DEEPSEEK, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
            **{"attention_bias": True, "mlp_bias": True},
        },
    ),
    "deepseek-v2-lite": (DeepseekV2Config, {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": (
        DeepseekV3Config,
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3-halves": (
        DeepseekV3Config,
        {**DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "gemma4": (Gemma4TextConfig, {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    "gemma4-moe": (
        Gemma4TextConfig,
        {
            **GEMMA4,
            **{"hidden_size_per_layer_input": 0, "layer_types": None, "num_hidden_layers": 7},
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
            **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
        },
    ),
}
"""Families that whole native steps do not compute."""

QWEN3_5 = {
    "max_position_embeddings": 1024,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 5,
    "full_attention_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}
QWEN3_5_MOE = {
    **QWEN3_5,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
GRANITE = {
    **{"max_position_embeddings": 1024, "num_hidden_layers": 4, "mamba_n_heads": 6, "mamba_d_state": 12},
    **{"shared_intermediate_size": 40, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    **{"attention_multiplier": 0.2, "logits_scaling": 2.0},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
STATE_CASES = {
    "qwen3.5": (Qwen3_5TextConfig, QWEN3_5),
    "qwen3.5-odd": (
        Qwen3_5TextConfig,
        {
            **QWEN3_5,
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
            **{"num_hidden_layers": 4, "tie_word_embeddings": True, "attention_bias": True},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {**QWEN3_5_MOE, "norm_topk_prob": False}),
    "qwen3-next": (
        Qwen3NextConfig,
        {
            **QWEN3_5_MOE,
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_hidden_layers": 4},
            **{"full_attention_interval": 2, "norm_topk_prob": False, "mlp_only_layers": [1]},
        },
    ),
    "lfm2": (
        Lfm2Config,
        {
            **{"max_position_embeddings": 1024, "num_hidden_layers": 5, "pad_token_id": 0, "block_multiple_of": 16},
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "lfm2-bias": (
        Lfm2Config,
        {
            **{"max_position_embeddings": 1024, "num_hidden_layers": 4, "pad_token_id": 0, "conv_bias": True},
            **{"conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]},
            "tie_word_embeddings": False,
        },
    ),
    "granite-hybrid": (GraniteMoeHybridConfig, {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"}),
    "granite-hybrid-moe": (
        GraniteMoeHybridConfig,
        {
            **GRANITE,
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "mamba_n_groups": 3},
            **{"mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": (0.5, 1.5)},
        },
    ),
}
"""Families whose layers have a recurrent state."""

GGUF_CASES = {
    "gpt-oss-7": (GptOssConfig, {**FAMILY_CASES["gpt-oss"][1], "swiglu_limit": 7.0}),
    "qwen3-next-normed": (
        Qwen3NextConfig,
        {**STATE_CASES["qwen3-next"][1], "norm_topk_prob": True, "mlp_only_layers": []},
    ),
    "granite-hybrid-moe-7": (
        GraniteMoeHybridConfig,
        {**STATE_CASES["granite-hybrid-moe"][1], "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf"))},
    ),
}
"""What a GGUF file can say; it has no word for limits, some biases and how experts' chances are scaled."""

GROUP_CASES = {
    "llama-12-of-3": (LlamaConfig, {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}),
    "qwen2-6-of-2": (
        Qwen2Config,
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 84},
    ),
    "gpt-oss-12-of-3": (
        GptOssConfig,
        {**FAMILY_CASES["gpt-oss"][1], "num_attention_heads": 12, "num_key_value_heads": 3},
    ),
}
"""Groups of query heads that ranks cut through."""


@functools.cache
def judge(case):
    """Return a float32 transformers model with random weights; biases and norms are random too."""
    config_type, fields = (CASES | EXPERT_CASES | FAMILY_CASES | TORCH_CASES | STATE_CASES | GGUF_CASES | GROUP_CASES)[
        case
    ]
    torch.manual_seed(len(case))
    # Fused attention knows no soft caps.
    config = config_type(**{**SMALL, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if (
                name.endswith(("bias", "sinks", "expert_scale", "router.scale", "layer_scalar", "correction_bias"))
                or "norm" in name
            ):
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def saver(tmp_path_factory):
    """Return a function from a case to the folder of its model, which is saved once."""

    @functools.cache
    def folder(case):
        made = tmp_path_factory.mktemp(case)
        judge(case).save_pretrained(made)
        return str(made)

    return folder


def greedy(case, prompt, tokens, guess=()):
    """Greedy continuation by transformers, without cache, so that nothing but the model itself decides.

    guess: what it is if we are right. One pass over prompt and guess then confirms all of it; if it does not, the model
    is asked for one token at a time.
    """
    ids = list(prompt)
    if len(guess) == tokens > 1:
        likeliest = logits(case, [*ids, *guess[:-1]])[len(ids) - 1 :].argmax(dim=-1).tolist()
        if likeliest == list(guess):
            return likeliest
    for _ in range(tokens):
        ids.append(int(logits(case, ids)[-1].argmax()))
    return ids[len(prompt) :]


@functools.cache
def _logits(case, ids):
    with torch.inference_mode():
        return judge(case)(torch.tensor([ids])).logits[0]


def logits(case, ids):
    """float32[len(ids), vocabulary]."""
    return _logits(case, tuple(ids))


def prompt_of(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
