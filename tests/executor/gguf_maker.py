"""Writes a Hugging Face folder of a Llama or Qwen kind as a GGUF file, to be read back."""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tokenyard.executor.gguf_file.weights import IN_LAYER, OWN_IN_LAYER, WHOLE, WITHOUT_KIND

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")


def gguf_names(name, architecture="llama"):
    """GGUF's name of a Hugging Face tensor, and the expert if it is one's."""
    for own, stored in WITHOUT_KIND.items():
        if name.endswith(f".{own}"):
            return f"blk.{name.split('.')[2]}.{stored}", None
    base, _, kind = name.rpartition(".")
    if base in WHOLE:
        return f"{WHOLE[base]}.{kind}", None
    _, _, layer, rest = base.split(".", 3)
    if ".mlp.experts." in base:
        _, _, expert, part = rest.split(".")
        return f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{kind}", int(expert)
    return f"blk.{layer}.{(IN_LAYER | OWN_IN_LAYER.get(architecture, {}))[rest]}.{kind}", None


def tiled(tensor, heads, key_heads, dim=0):
    """The value heads of a gated delta net as llama.cpp has them: the first of each key head, then the second ones."""
    each, size = heads // key_heads, tensor.shape[dim] // heads
    order = [(place % key_heads * each + place // key_heads) * size + i for place in range(heads) for i in range(size)]
    return tensor.index_select(dim, torch.tensor(order))


def two_products(tensors, config):
    """The first product of Qwen3-Next, whose rows are ordered by key head, as those of Qwen3.5."""
    key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            parts = tensor.view(key_heads, -1, tensor.shape[1]).split([key_dim, key_dim, values, values], dim=1)
            *qkv, z = (part.flatten(0, 1) for part in parts)
            found |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
        else:
            found[name.replace("in_proj_ba", "in_proj_b")] = tensor
    return found


def granite_hybrid(name, tensor, config):
    """The tensors that llama.cpp's converter makes of one of Granite 4."""
    base, _, part = name.partition("shared_mlp.")
    if part:
        own = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
        names = ["down"] if part.startswith("output") else ["gate", "up"]
        halves = tensor.chunk(len(names))
        return [(f"{base}{own}.{one}_proj.weight", half) for one, half in zip(names, halves, strict=True)]
    base, _, part = name.partition("block_sparse_moe.")
    if part.startswith("router"):
        return [(f"{base}mlp.gate.weight", tensor)]
    if part:
        names = ["down"] if part.startswith("output") else ["gate", "up"]
        halves = tensor.chunk(len(names), dim=1)
        return [
            (f"{base}mlp.experts.{expert}.{one}_proj.weight", half[expert])
            for one, half in zip(names, halves, strict=True)
            for expert in range(len(half))
        ]
    if name.endswith(("A_log", ".D")):
        return [(name, (-tensor.exp() if name.endswith("A_log") else tensor)[:, None])]
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.view(config["mamba_n_groups"], -1)
    return [(name, tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor)]


def delta_net(name, tensor, config, tiles):
    """A tensor of Qwen3.5 as llama.cpp's converter hands it on; without `tiles` one of Qwen3-Next."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]
    if name.endswith("norm.weight"):
        return tensor + (0.0 if "linear_attn" in name else 1.0)
    if "shared_expert_gate" in name:
        return tensor[0]
    if not tiles:
        return -tensor.exp() if name.endswith("A_log") else tensor.squeeze(1) if "conv1d" in name else tensor
    if "conv1d" in name or "in_proj_qkv" in name:
        tensor = tensor.squeeze(1) if "conv1d" in name else tensor
        return torch.cat((tensor[:keys], tiled(tensor[keys:], heads, key_heads)))
    if "linear_attn.out_proj" in name:
        return tiled(tensor, heads, key_heads, 1)
    if "linear_attn" in name:
        tensor = tiled(tensor, heads, key_heads)
    return -tensor.exp() if name.endswith("A_log") else tensor


def of_full_layers(config):
    """The sizes of Gemma 4's layers without a window."""
    return next(iter(config["per_layer_config"].values()))


def own_keys(architecture, config):
    """The metadata of single families."""
    if architecture == "granite":
        return {
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
            "attention.scale": config["attention_multiplier"],
        }
    if architecture == "gemma4":
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
        own, wide = len(windows) - shared, config["use_double_wide_mlp"]
        others, local = of_full_layers(config), config["num_key_value_heads"]
        sizes, full = {"": others["head_dim"], "_swa": config["head_dim"]}, others.get("num_key_value_heads")
        return {
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "attention.sliding_window_pattern": windows,
            **{f"attention.{part}_length{kind}": size for kind, size in sizes.items() for part in ("key", "value")},
            **{f"rope.dimension_count{kind}": size for kind, size in sizes.items()},
            "feed_forward_length": [inner * (1 + (layer >= own)) for layer in range(len(windows))] if wide else inner,
            "attention.head_count_kv": local if full is None else [local if window else full for window in windows],
            "expert_used_count": config.get("top_k_experts"),
        }
    if architecture == "lfm2":
        kinds = config["layer_types"]
        kv_heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
        return {"shortconv.l_cache": config["conv_L_cache"], "attention.head_count_kv": kv_heads}
    if architecture == "granitehybrid":
        kinds = config["layer_types"]
        return {
            **own_keys("granite", config),
            "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
            "feed_forward_length": config["shared_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
            "ssm.conv_kernel": config["mamba_d_conv"],
        }
    if architecture in DELTA_NETS:
        heads = config["linear_num_value_heads"]
        return {
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.inner_size": heads * config["linear_value_head_dim"],
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        }
    return {}


def as_converted(architecture, tensors, config):
    """The tensors of a family as llama.cpp's converter hands them on: Gemma's norms plus one, stacks of experts cut."""
    if architecture == "qwen3next":
        tensors = two_products(tensors, config)
    if architecture in DELTA_NETS:
        tiles = architecture != "qwen3next"
        return {name: delta_net(name, tensor, config, tiles) for name, tensor in tensors.items()}
    if architecture == "granitehybrid":
        return dict(pair for name, tensor in tensors.items() for pair in granite_hybrid(name, tensor, config))
    if architecture == "lfm2":
        return {name: tensor.squeeze(1) if ".conv.conv." in name else tensor for name, tensor in tensors.items()}
    found = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name and architecture == "gpt-oss":
            base, part = name.rsplit(".", 1)
            kind = "bias" if part.endswith("_bias") else "weight"
            for expert, one in enumerate(tensor):
                one = one if kind == "bias" else one.T
                if part.startswith("down"):
                    found[f"{base}.{expert}.down_proj.{kind}"] = one
                else:
                    found[f"{base}.{expert}.gate_proj.{kind}"] = one[::2]
                    found[f"{base}.{expert}.up_proj.{kind}"] = one[1::2]
        elif name.endswith("norm.weight") and architecture in ("gemma2", "gemma3"):
            found[name] = tensor + 1.0
        else:
            found[name if architecture == "gemma4" else name.replace(".router.", ".gate.")] = tensor
    return found


def rope_facts(config):
    """The metadata of rotary embeddings, and the tensors that complete it."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    if "full_attention" in rope:
        own = rope["full_attention"]
        local = {"rope.freq_base_swa": rope["sliding_attention"]["rope_theta"]}
    else:
        own, local = rope, {}
    facts = {"rope.freq_base": own["rope_theta"], **local}
    kind = own.get("rope_type")
    if kind in ("linear", "yarn"):
        facts |= {"rope.scaling.type": kind, "rope.scaling.factor": own["factor"]}
    if "original_max_position_embeddings" in own:
        facts["rope.scaling.original_context_length"] = own["original_max_position_embeddings"]
    if own.get("partial_rotary_factor", 1.0) != 1.0:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        facts["rope.dimension_count"] = int(head * own["partial_rotary_factor"])
    factors = {
        f"rope_factors_{length}.weight": np.array(own[f"{length}_factor"], dtype=np.float32)
        for length in ("short", "long")
        if kind == "longrope"
    }
    if kind == "proportional":
        pairs = of_full_layers(config)["head_dim"] // 2
        turning = int(pairs * own["partial_rotary_factor"])
        factors["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)
    return facts, factors


def interleaved(tensor, heads):
    """Rows of queries or keys as llama.cpp has them: the two halves of each head by turns."""
    rows = []
    size = len(tensor) // heads
    for head in range(heads):
        for i in range(size // 2):
            rows += [tensor[head * size + i], tensor[head * size + size // 2 + i]]
    return np.stack(rows)


def deinterleaved(tensor, heads):
    """The rows that `interleaved` was given."""
    size = len(tensor) // heads
    order = [head * size + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(size // 2)]
    return tensor[order]


def halves(numbers):
    """Numbers as float16 in bytes, and what they then are."""
    rounded = numbers.astype(np.float16)
    return rounded[..., None].view(np.uint8), rounded.astype(np.float32)


def divided(numbers, steps):
    """Numbers in steps of some size, 0 where that is 0."""
    return np.divide(numbers, steps, out=np.zeros_like(numbers), where=steps > 0)


def q4_k(values, bits=4):
    """Blocks of Q4_K, each 32 numbers from their least to their largest; of Q5_K with a fifth bit."""
    spans, top_code = values.reshape(-1, 8, 32), 2**bits - 1
    least = -np.minimum(spans.min(-1), 0)
    wanted = (spans.max(-1) + least) / top_code
    top_bytes, top = halves(wanted.max(-1, keepdims=True) / 63)
    least_bytes, least_step = halves(least.max(-1, keepdims=True) / 63)
    scale = divided(wanted, top + 0 * least).round().clip(0, 63)
    small = divided(least, least_step + 0 * least).round().clip(0, 63)
    steps = (top * scale)[..., None] + 0 * spans
    codes = divided(spans + (least_step * small)[..., None], steps).round().clip(0, top_code).astype(np.uint8)
    scale, small = scale.astype(np.uint8), small.astype(np.uint8)
    packed = (
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        small[:, :4] | small[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | (small[:, 4:] & 15) << 4,
    )
    fifth = [sum((codes[:, span] >> 4) << span for span in range(8))] if bits == 5 else []
    numbers = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(len(spans), -1)
    return np.concatenate((top_bytes[:, 0], least_bytes[:, 0], *packed, *fifth, numbers), axis=1)


def iq4_xs(values):
    """Blocks of IQ4_XS: of 16 values the nearest, each 32 numbers by the largest."""
    table = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
    spans = values.reshape(-1, 8, 32)
    wanted = np.abs(spans).max(-1) / 113
    step_bytes, step = halves(wanted.max(-1, keepdims=True) / 31)
    scale = divided(wanted, step + 0 * wanted).round().clip(0, 31)
    near = divided(spans, (step * scale)[..., None] + 0 * spans)
    codes = np.abs(near[..., None] - table).argmin(-1).astype(np.uint8)
    stored = scale.astype(np.uint8) + 32
    high = sum((stored[:, span].astype(np.uint16) >> 4) << 2 * span for span in range(8))[:, None].view(np.uint8)
    low = stored[:, ::2] & 15 | (stored[:, 1::2] & 15) << 4
    numbers = (codes[..., :16] | codes[..., 16:] << 4).reshape(len(spans), -1)
    return np.concatenate((step_bytes[:, 0], high, low, numbers), axis=1)


def q6_k(values):
    """Blocks of Q6_K, each 16 numbers by the largest."""
    spans = values.reshape(-1, 16, 16)
    wanted = np.abs(spans).max(-1) / 31
    step_bytes, step = halves(wanted.max(-1, keepdims=True) / 127)
    scale = divided(wanted, step + 0 * wanted).round().clip(0, 127)
    codes = divided(spans, (step * scale)[..., None] + 0 * spans).round().clip(-32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = sum(codes[:, :, part] >> 4 << 2 * part for part in range(4))
    parts = (low, high, scale.astype(np.uint8), step_bytes[:, 0])
    return np.concatenate([part.reshape(len(spans), -1) for part in parts], axis=1)


OWN_WRITERS = {"Q4_K": q4_k, "Q5_K": functools.partial(q4_k, bits=5), "Q6_K": q6_k, "IQ4_XS": iq4_xs}


def quantized_rows(values, kind):
    """Rows as a kind of GGUF stores them. What cannot be written is drawn: any bits mean some numbers.

    Only the scales, which are float16 or an exponent, must not make infinities or nothing at all.
    """
    if kind.name in OWN_WRITERS:
        return OWN_WRITERS[kind.name](values).reshape(*values.shape[:-1], -1)
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = values.size // values.shape[-1]
        rng = np.random.default_rng(values.size)
        blocks = rng.integers(0, 256, (rows * values.shape[-1] // block, size), dtype=np.uint8)
        small = np.array([0.001], dtype=np.float16).view(np.uint8)
        for place in SCALES_AT[kind.name]:
            blocks[:, place : place + 2] = small
        if kind.name == "IQ1_M":  # the scale's four parts are the upper four bits of four words
            words = blocks[:, 48:56].view(np.uint16)
            words &= 0x0FFF
            for at, part in enumerate(f"{int(small.view(np.uint16)[0]):04x}"[::-1]):
                words[:, at] |= int(part, 16) << 12
        return blocks.reshape(*values.shape[:-1], -1)


SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ4_NL": (0,),
}
"""Where the float16 scales of a block lie in the kinds that are drawn."""


def write_gguf(folder, target, kind="F32", architecture="llama", pre="gpt-2", spm=None, **changes):
    """Write `folder` as one GGUF file; returns the matrices as they read back, by Hugging Face name.

    kind: of all matrices, or a function from GGUF's name of one to its kind.
    spm: tokens, scores, types and further keys of a SentencePiece tokenizer, written instead of the default one.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture)
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "vocab_size": config["vocab_size"],
    }
    facts, factors = rope_facts(config)
    epsilon = config["norm_eps" if architecture == "lfm2" else "rms_norm_eps"]
    own |= {"attention.layer_norm_rms_epsilon": float(epsilon), **facts, **own_keys(architecture, config)}
    add = {
        list: writer.add_array,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in (own | changes).items():
        if type(value) in add:
            add[type(value)](f"{architecture}.{key}", value)
    if spm is None:
        add_tokenizer(writer, Path(folder), pre)
    else:
        add_spm(writer, *spm)
    for name, values in factors.items():
        writer.add_tensor(name, values)
    tensors = as_converted(architecture, load_file(Path(folder) / "model.safetensors"), config)
    whole = add_tensors(writer, config, tensors, kind, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


def add_tensors(writer, config, tensors, kind, architecture):
    whole, experts = {}, {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        own, expert = gguf_names(name, architecture)
        of_own = kind(own) if callable(kind) else kind
        fits = values.ndim == 2 and "_inp" not in own
        quantized = gguf.GGMLQuantizationType[of_own if fits else "F32"]
        if architecture in ("granite", "granitehybrid", "llama") and (".attn_q." in own or ".attn_k." in own):
            heads = config["num_attention_heads" if ".attn_q." in own else "num_key_value_heads"]
            stored = quantized_rows(interleaved(values, heads), quantized)
            whole[name] = deinterleaved(gguf.dequantize(stored, quantized), heads)
        else:
            stored = quantized_rows(values, quantized)
            whole[name] = gguf.dequantize(stored, quantized)
        if expert is None:
            writer.add_tensor(own, stored, raw_dtype=quantized)
        else:
            experts.setdefault((own, quantized), {})[expert] = stored
    for (own, quantized), parts in experts.items():
        stacked = np.stack([parts[expert] for expert in sorted(parts)])
        writer.add_tensor(own, stacked, raw_dtype=quantized)
    return whole


def add_spm(writer, tokens, scores, kinds, prefix=True, merges=None, bos=1, eos=2):
    writer.add_tokenizer_model("llama" if merges is None else "gemma4")
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(prefix)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)


def add_tokenizer(writer, folder, pre):
    if not (folder / "tokenizer.json").exists():
        return
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])
    special = {added["id"] for added in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number in special else 1 for _, number in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    config = json.loads((folder / "config.json").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"][0])
    writer.add_eot_token_id(config["eos_token_id"][1])
    writer.add_add_bos_token(True)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)
