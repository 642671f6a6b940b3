"""Decode and prefill of a whole engine on a CPU: the native kernels beside torch's layers, through the offline `LLM`.

Run from the repository root: `python -m benchmarks.peers [--shape qwen] [--threads 2]`. Random weights of the shape of
SmolLM2-135M (or Qwen2.5-0.5B) in bfloat16, prompts of 512 random tokens, 128 new ones, greedy, nothing cached. The
scheduler, the sampler and the sockets' stand-ins of the offline engine are in the figures. All engines live in one
process and take turns; each figure is the best of the rounds, as other work on the machine only ever adds time.

prefill: prompt tokens a second of runs that answer one token. decode: further tokens a second, of runs of 128 tokens
less those of one. Share: of the floor that reading the weights once per step sets at --read-gb-per-s (decode, batch 1).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.smollm2 import QWEN_SHAPE, SHAPE
from tokenyard import LLM, SamplingParams

SHAPES = {"smol": SHAPE, "qwen": QWEN_SHAPE}
IMPLS = {
    "native": {"model_impl": "native"},
    "native-attention": {"model_impl": "torch", "attention_backend": "native"},
    "torch": {"model_impl": "torch", "attention_backend": "gather"},
}


def seconds(llm: LLM, prompts: np.ndarray, new_tokens: int) -> float:
    """How long all prompts take together, of which nothing is cached."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    begin_s = time.perf_counter()
    found = llm.generate(prompts.tolist(), sampling)
    taken = time.perf_counter() - begin_s
    assert all(len(each.completions[0].token_ids) == new_tokens and not each.cached_tokens for each in found)
    return taken


def measure(engines: dict[str, LLM], vocabulary: int, batch: int, options: argparse.Namespace) -> dict[str, dict]:
    """Prefill and decode in tokens a second, by engine."""
    rng = np.random.default_rng(batch)
    best = {name: [np.inf, np.inf] for name in engines}
    for _ in range(options.rounds):
        for name, llm in engines.items():
            for place, tokens in enumerate((1, options.new_tokens)):
                prompts = rng.integers(3, vocabulary, (batch, options.prompt_tokens), np.int32)
                best[name][place] = min(best[name][place], seconds(llm, prompts, tokens))
    return {
        name: {
            "prefill": batch * options.prompt_tokens / first_s,
            "decode": batch * (options.new_tokens - 1) / (all_s - first_s),
        }
        for name, (first_s, all_s) in best.items()
    }


def weight_bytes(shape: dict) -> int:
    """Bytes of bfloat16 weights that a step reads."""
    hidden, head = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    kv = shape["num_key_value_heads"] * head
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def main() -> None:
    """Measure all batches and print a line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smol", choices=SHAPES)
    parser.add_argument("--impls", nargs="+", default=["native", "torch"], choices=IMPLS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--read-gb-per-s", type=float, help="read bandwidth here, for the share of the floor")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file too")
    options = parser.parse_args()
    shape, results = SHAPES[options.shape], {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        pool = max(options.batches) * (options.prompt_tokens + options.new_tokens)
        common = {"device": "cpu", "dtype": options.dtype, "threads": options.threads, "load_format": "dummy"}
        common |= {"skip_tokenizer_init": True, "max_total_tokens": pool, "max_running_requests": max(options.batches)}
        engines = {name: LLM(folder, **common, **IMPLS[name]) for name in options.impls}
        for batch in options.batches:
            results[batch] = measure(engines, shape["vocab_size"], batch, options)
            for name, row in results[batch].items():
                line = f"batch {batch} {name}: prefill {row['prefill']:.0f} tok/s, decode {row['decode']:.1f} tok/s"
                if batch == 1 and options.read_gb_per_s:
                    floor = options.read_gb_per_s * 1e9 / weight_bytes(shape)
                    line += f" ({row['decode'] / floor:.0%} of the floor)"
                print(line, flush=True)
        for llm in engines.values():
            llm.close()
    if options.output:
        options.output.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
