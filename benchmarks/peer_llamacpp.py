"""llama.cpp in the loop of benchmarks.peers; run by it, with an interpreter that has llama-cpp-python and gguf.

    python -m venv /tmp/llama && CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/llama/bin/pip install llama-cpp-python gguf numpy

Writes a GGUF file of random weights of the shape in config.json, unless the folder has a model.gguf, then decodes
greedily by the low-level interface, one sequence per prompt. Prints a JSON line per batch, see peer_loop.report.
"""

import functools
import json
import time
from pathlib import Path

import numpy as np
from peer_loop import read_options, report


def write_model(folder, path):
    """Random bfloat16 weights of the shape in config.json, as llama.cpp wants them."""
    import gguf

    shape = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    kv, inter, qwen = (
        shape["num_key_value_heads"] * (hidden // heads),
        shape["intermediate_size"],
        "Qwen2" in str(shape),
    )
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.BF16
    writer = gguf.GGUFWriter(str(path), "qwen2" if qwen else "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inter)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(32)
    writer.add_tokenizer_model("none")

    def matrix(name, *size):
        numbers = rng.standard_normal(size, dtype=np.float32) * 0.02
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    def vector(name, size, value=1.0):
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd.weight", shape["vocab_size"], hidden)
    vector("output_norm.weight", hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", hidden)
        vector(prefix + "ffn_norm.weight", hidden)
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            matrix(f"{prefix}attn_{name}.weight", size, hidden)
            if qwen:
                vector(f"{prefix}attn_{name}.bias", size, 0.01)
        matrix(prefix + "attn_output.weight", hidden, hidden)
        for name in ("gate", "up"):
            matrix(f"{prefix}ffn_{name}.weight", inter, hidden)
        matrix(prefix + "ffn_down.weight", hidden, inter)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    """A context with a sequence per prompt."""

    def __init__(self, api, model, batch, options):
        self.api, self.vocabulary = api, options.vocabulary
        params = api.llama_context_default_params()
        params.n_ctx = batch * (options.prompt_tokens + options.new_tokens + 32)
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, batch
        params.n_threads = params.n_threads_batch = options.threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = False
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1
        self.context = api.llama_init_from_model(model, params)
        self.tokens = api.llama_batch_init(2048, 0, 1)

    def clear(self):
        """Forget all sequences."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def step(self, entries):
        """Compute (token, position, sequence, wanted) entries; returns the likeliest token after each wanted one."""
        batch, wanted = self.tokens, []
        for place, (token, position, sequence, wants) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = int(token), position, 1
            batch.seq_id[place][0], batch.logits[place] = sequence, int(wants)
            if wants:
                wanted.append(place)
        batch.n_tokens = len(entries)
        assert self.api.llama_decode(self.context, batch) == 0
        read = self.api.llama_get_logits_ith
        return [np.ctypeslib.as_array(read(self.context, place), (self.vocabulary,)).argmax() for place in wanted]

    def close(self):
        """Free everything."""
        self.api.llama_batch_free(self.tokens)
        self.api.llama_free(self.context)


def seconds(peer, prompts, new_tokens):
    """How long all prompts take together, one prefill after the other, then all decodes together."""
    peer.clear()
    begin_s, length = time.perf_counter(), len(prompts[0])
    tokens = [
        peer.step([(token, at, sequence, at == length - 1) for at, token in enumerate(prompt)])[0]
        for sequence, prompt in enumerate(prompts)
    ]
    for number in range(new_tokens - 1):
        tokens = peer.step([(token, length + number, sequence, True) for sequence, token in enumerate(tokens)])
    return time.perf_counter() - begin_s


def main():
    """Measure all batches."""
    options = read_options()
    import llama_cpp as api

    path = Path(options.folder) / "model.gguf"
    if not path.exists():
        write_model(options.folder, path)
    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    rng = np.random.default_rng(0)
    for batch in options.batches:
        peer = Peer(api, model, batch, options)
        report(functools.partial(seconds, peer), batch, options, rng)
        peer.close()


if __name__ == "__main__":
    main()
