"""Writes a Hugging Face folder of a Llama or Qwen kind as a GGUF file, to be read back."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from tokenyard.executor.gguf_file.weights import IN_LAYER, WHOLE


def gguf_names(name):
    """GGUF's name of a Hugging Face tensor, and the expert if it is one's."""
    base, _, kind = name.rpartition(".")
    if base in WHOLE:
        return f"{WHOLE[base]}.{kind}", None
    _, _, layer, rest = base.split(".", 3)
    if ".experts." in rest:
        _, _, expert, part = rest.split(".")
        return f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{kind}", int(expert)
    return f"blk.{layer}.{IN_LAYER[rest]}.{kind}", None


def interleaved(tensor, heads):
    """Rows of queries or keys as llama.cpp has them: the two halves of each head by turns."""
    rows = []
    size = len(tensor) // heads
    for head in range(heads):
        for i in range(size // 2):
            rows += [tensor[head * size + i], tensor[head * size + size // 2 + i]]
    return np.stack(rows)


def write_gguf(folder, target, kind="F32", architecture="llama", pre="gpt-2", **changes):
    """Write `folder` as one GGUF file; returns the matrices as they read back, by Hugging Face name."""
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
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "vocab_size": config["vocab_size"],
    }
    for key, value in (own | changes).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, Path(folder), pre)
    whole = add_tensors(writer, config, load_file(Path(folder) / "model.safetensors"), kind, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


def add_tensors(writer, config, tensors, kind, architecture):
    whole, experts = {}, {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        own, expert = gguf_names(name)
        fits = values.ndim == 2 and kind not in ("F32",) and "_inp" not in own
        quantized = gguf.GGMLQuantizationType[kind] if fits else gguf.GGMLQuantizationType.F32
        whole[name] = gguf.dequantize(gguf.quantize(values, quantized), quantized)
        if architecture == "llama" and (".attn_q." in own or ".attn_k." in own):
            heads = config["num_attention_heads" if ".attn_q." in own else "num_key_value_heads"]
            values = interleaved(values, heads)
        if expert is None:
            writer.add_tensor(own, gguf.quantize(values, quantized), raw_dtype=quantized)
        else:
            experts.setdefault((own, quantized), {})[expert] = gguf.quantize(values, quantized)
    for (own, quantized), parts in experts.items():
        stacked = np.stack([parts[expert] for expert in sorted(parts)])
        writer.add_tensor(own, stacked, raw_dtype=quantized)
    return whole


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
