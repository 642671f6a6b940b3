"""How long a GGUF file of 0.6 billion weights takes from its name to an executor that can run it.

Writes a file of Qwen3-0.6B's shape with drawn bits (any bits of a kind mean some numbers) and loads it; the file is
written whole, so it is in the page cache when it is read. Kinds: Q8_0, Q4_K, Q6_K and others of the gguf package.

Run: python benchmarks/gguf_load.py [--kind Q4_K] [--layers 28] [--folder /tmp]   (about 1 GB of disk for Q8_0)
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import load_library

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 151_936
SCALES_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 scales of a block lie: drawn bits would make infinities of them."""


def blocks(rng, kind, rows, inputs):
    """Drawn rows of a kind, [rows, bytes]."""
    size, data = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = rng.integers(0, 256, (rows * inputs // size, data), dtype=np.uint8)
    for place in SCALES_AT[kind]:
        found[:, place : place + 2] = np.array([0.001], dtype=np.float16).view(np.uint8)
    return found.reshape(rows, -1)


def write(path, kind, layers):
    """Write the file; returns how many weights it holds."""
    rng, count = np.random.default_rng(0), 0
    writer = gguf.GGUFWriter(path, "qwen3")
    numbers = {
        **{"block_count": layers, "context_length": 40_960, "embedding_length": HIDDEN, "feed_forward_length": INTER},
        **{"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM},
        "vocab_size": VOCABULARY,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"token_embd": (VOCABULARY, HIDDEN)}
    norms = {"output_norm": HIDDEN}
    for layer in range(layers):
        own = f"blk.{layer}."
        matrices |= {f"{own}attn_q": (q_size, HIDDEN), f"{own}attn_k": (kv_size, HIDDEN)}
        matrices |= {f"{own}attn_v": (kv_size, HIDDEN), f"{own}attn_output": (HIDDEN, q_size)}
        matrices |= {f"{own}ffn_gate": (INTER, HIDDEN), f"{own}ffn_up": (INTER, HIDDEN)}
        matrices |= {f"{own}ffn_down": (HIDDEN, INTER)}
        norms |= {f"{own}attn_norm": HIDDEN, f"{own}ffn_norm": HIDDEN}
        norms |= {f"{own}attn_q_norm": HEAD_DIM, f"{own}attn_k_norm": HEAD_DIM}
    for name, (rows, inputs) in matrices.items():
        count += rows * inputs
        data = blocks(rng, kind, rows, inputs)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="Q8_0", choices=SCALES_AT)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", default=None, help="where the file is written and then deleted")
    options = parser.parse_args()
    load_library()  # built where the cache of this user is, not where that of the file will be
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        path = Path(scratch) / "dummy.gguf"
        begin = time.perf_counter()
        count = write(path, options.kind, options.layers)
        size = path.stat().st_size
        print(f"{options.kind}: {count / 1e9:.2f} billion weights, {size / 1e9:.2f} GB", end="")
        print(f", written in {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
        executor = load_executor(str(path), device="cpu", dtype=options.dtype, max_total_tokens=1024)
        taken = time.perf_counter() - begin
        print(f"loaded in {taken:.1f} s ({count / taken / 1e6:.0f} million weights a second)")
        print(f"{executor.info.dtype}, {executor.info.kernels}")


if __name__ == "__main__":
    main()
