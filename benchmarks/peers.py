"""Decode and prefill of a whole engine on a CPU: ours through the offline `LLM`, and peers in the same command.

Run from the repository root: `python -m benchmarks.peers [--shapes smol qwen] [--threads 2]
[--vllm /tmp/vllm/bin/python] [--llamacpp /tmp/llama/bin/python]`. Random weights of the shape of SmolLM2-135M (or
Qwen2.5-0.5B) in bfloat16, prompts of 512 random tokens, 128 new ones, greedy, nothing cached. The scheduler, the
sampler and the sockets' stand-ins of the offline engine are in the figures, as vLLM's own are in vLLM's; llama.cpp is
driven by its low-level interface, with no scheduler. Peers have their own environments, see peer_vllm.py and
peer_llamacpp.py. Engines run one after the other, and each figure is the best of its rounds, as other work on the
machine only ever adds time.

prefill: prompt tokens a second of runs that answer one token. decode: further tokens a second, of runs of 128 tokens
less those of one. floor: what reading weights and keys once, and multiplying, takes at the rates of benchmarks.limits,
measured in the same command.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.limits import product_rate, read_rate
from benchmarks.peer_loop import Best, best_seconds
from benchmarks.smollm2 import LARGE_SHAPE, QWEN_SHAPE, SHAPE
from tokenyard import LLM, SamplingParams

SHAPES = {"smol": SHAPE, "qwen": QWEN_SHAPE, "smol-1.7b": LARGE_SHAPE}
IMPLS = {
    "native": {"model_impl": "native"},
    "native-attention": {"model_impl": "torch", "attention_backend": "native"},
    "torch": {"model_impl": "torch", "attention_backend": "gather"},
}

PEERS = {"vllm": "peer_vllm.py", "llamacpp": "peer_llamacpp.py"}


def seconds(llm: LLM, prompts: np.ndarray, new_tokens: int) -> float:
    """How long all prompts take together, of which nothing is cached."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    begin_s = time.perf_counter()
    found = llm.generate(prompts.tolist(), sampling)
    taken = time.perf_counter() - begin_s
    assert all(len(each.completions[0].token_ids) == new_tokens and each.cached_tokens < 8 for each in found)
    return taken


def measure(llm: LLM, vocabulary: int, batch: int, options: argparse.Namespace) -> Best:
    """The best times of runs that answer one token, and of whole ones."""
    return best_seconds(partial(seconds, llm), batch, vocabulary, options, np.random.default_rng(batch))


def our_figures(folder: str, name: str, shape: dict, options: argparse.Namespace) -> dict[int, Best]:
    """Times by batch of one of our ways to compute."""
    pool = 5 * max(options.batches) * (options.prompt_tokens + options.new_tokens) // 4
    settings = {"device": "cpu", "dtype": options.dtype, "threads": options.threads, "load_format": "dummy"}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": pool, "max_running_requests": max(options.batches)}
    with LLM(folder, **settings, **IMPLS[name]) as llm:
        return {batch: measure(llm, shape["vocab_size"], batch, options) for batch in options.batches}


def peer_figures(folder: str, script: str, python: Path, shape: dict, options: argparse.Namespace) -> dict[int, Best]:
    """Times by batch of a peer, in a process with its own environment."""
    command = [str(python), str(Path(__file__).with_name(script)), folder]
    command += ["--batches", *map(str, options.batches), "--vocabulary", str(shape["vocab_size"])]
    for name in ("prompt_tokens", "new_tokens", "rounds", "threads"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')]
    return {row.pop("batch"): Best(**row) for row in rows}


def floor_of(shape: dict, batch: int, options: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second of prefill and decode that the machine allows at most, with keys of the middle of the answer."""
    head = shape["hidden_size"] // shape["num_attention_heads"]
    key_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    weights, last = weight_bytes(shape), 2 * shape["vocab_size"] * shape["hidden_size"]
    keys_s = batch * (options.prompt_tokens + options.new_tokens / 2) * key_bytes / options.read_rate
    decode_s = max(weights / options.read_rate, weights * batch / options.product_rate) + keys_s
    prefill_s = (weights - last) * options.prompt_tokens * batch / options.product_rate
    return batch * options.prompt_tokens / prefill_s, batch / decode_s


def show(figures: dict[str, dict[int, Best]], shape: dict, options: argparse.Namespace) -> list[dict]:
    """Print a line per batch and engine; ratios are to the first engine's peers."""
    rows = []
    for batch in options.batches:
        floor = floor_of(shape, batch, options)
        for name, found in figures.items():
            first_s, all_s = found[batch][:2]
            speeds = (batch * options.prompt_tokens / first_s, batch * (options.new_tokens - 1) / (all_s - first_s))
            row = {"batch": batch, "engine": name, "prefill": speeds[0], "decode": speeds[1]}
            rows.append(row | {"prefill_share": speeds[0] / floor[0], "decode_share": speeds[1] / floor[1]})
    for row in rows:
        own = next(each for each in rows if each["batch"] == row["batch"])
        line = f"batch {row['batch']:2d} {row['engine']:16s}"
        for kind in ("prefill", "decode"):
            share, ratio = row[f"{kind}_share"], own[kind] / row[kind]
            line += f" {kind} {row[kind]:7.1f} tok/s ({share:.0%} of the floor, ours is {ratio:.2f}x)"
        print(line, flush=True)
    return rows


def weight_bytes(shape: dict) -> int:
    """Bytes of bfloat16 weights that a step reads."""
    hidden, head = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    kv = shape["num_key_value_heads"] * head
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def main() -> None:
    """Measure all shapes and batches and print a line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["smol"], choices=SHAPES)
    parser.add_argument("--impls", nargs="*", default=["native"], choices=IMPLS)
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, help="a Python interpreter whose environment has this peer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file too")
    options = parser.parse_args()
    options.read_rate = read_rate(options.threads)
    options.product_rate = product_rate(options.threads, options.dtype) or math.inf
    print(f"read {options.read_rate / 1e9:.1f} GB/s, products {options.product_rate / 1e9:.0f} G operations/s")
    results = {}
    for name in options.shapes:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
            figures = {impl: our_figures(folder, impl, shape, options) for impl in options.impls}
            for peer, script in PEERS.items():
                if python := getattr(options, peer):
                    figures[peer] = peer_figures(folder, script, python, shape, options)
        print(f"{name}:")
        results[name] = show(figures, shape, options)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
