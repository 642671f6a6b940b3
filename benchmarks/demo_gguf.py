"""Writes the demo model as a GGUF file, for llama.cpp: `python demo_gguf.py FOLDER FILE`.

Runs in an environment with gguf and numpy alone (see benchmarks/router_foreign.py), so it reads safetensors by itself.
Weights are stored in float32. llama.cpp pairs the halves of each head in another order, for which the rows of the query
and key projections are turned.
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(file):
    """The tensors of a safetensors file by name, as float32."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        if about["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[about["dtype"]]).astype(np.float32)
        yield name.removesuffix(".weight"), values.reshape(about["shape"])


def turned(weights, heads):
    """Rows of a projection with the halves of each head interleaved."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def vocabulary(writer, folder, size):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in model["vocab"].items()} | {n: t["content"] for n, t in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_add_bos_token(True)
    kinds = [gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in range(size)]
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


def main():
    folder, file = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocabulary(writer, folder, config["vocab_size"])
    ends = config["eos_token_id"]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[-1] if isinstance(ends, list) else ends)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if isinstance(settings.get("chat_template"), str):
        writer.add_chat_template(settings["chat_template"])
    for name, weights in tensors(folder / "model.safetensors"):
        if name in TOP:
            writer.add_tensor(f"{TOP[name]}.weight", weights)
            continue
        _, _, layer, part = name.split(".", 3)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            weights = turned(weights, heads if part.endswith("q_proj") else kv_heads)
        writer.add_tensor(f"blk.{layer}.{LAYER[part]}.weight", np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
