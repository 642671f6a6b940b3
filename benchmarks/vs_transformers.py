"""The executor against transformers' own `generate` on the same random checkpoint, on a CPU or a CUDA device.

Run from the repository root: `python -m benchmarks.vs_transformers [--dtype bfloat16] [--threads 2]`. Both sides get
the same prompts, decode greedily and produce the same number of tokens; figures are of the model alone, with no server
and no scheduler on our side. The model has the shape of SmolLM2-135M. Each figure is the best of a few runs, in turn.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.smollm2 import SHAPE
from benchmarks.step_plans import EqualRows
from tokenyard.executor.load_options import DTYPES
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.runner import ModelExecutor


def run_ours(executor: ModelExecutor, prompts: np.ndarray, new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill and of decode for all prompts, int32[batch, tokens]."""
    rows = EqualRows(executor.info, len(prompts), prompts.shape[1] + new_tokens)
    begin_s = time.perf_counter()
    for row, prompt in enumerate(prompts):
        executor.collect(executor.launch(rows.prefill(row, prompt)))
    prefilled_s = time.perf_counter()
    for _ in range(new_tokens - 1):
        executor.collect(executor.launch(rows.decode()))
    return prefilled_s - begin_s, time.perf_counter() - prefilled_s


def run_transformers(model: torch.nn.Module, prompts: np.ndarray, new_tokens: int) -> tuple[float, float]:
    """The same by `generate`; its decode time is a run of all tokens less a run of one."""
    ids = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds = []
    for tokens in (1, new_tokens):
        begin_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options).cpu()
        seconds.append(time.perf_counter() - begin_s)
    return seconds[0], seconds[1] - seconds[0]


def compare(executor: ModelExecutor, model: torch.nn.Module, batch: int, options: argparse.Namespace) -> dict:
    """Tokens a second of both sides, prefill and decode."""
    prompts = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (batch, options.prompt_tokens), np.int32)
    best = {"ours": [np.inf, np.inf], "transformers": [np.inf, np.inf]}
    for _ in range(options.repeats):
        for name, found in (
            ("ours", run_ours(executor, prompts, options.new_tokens)),
            ("transformers", run_transformers(model, prompts, options.new_tokens)),
        ):
            best[name] = [min(pair) for pair in zip(best[name], found, strict=True)]
    return {
        name: {
            "prefill_tokens_per_s": prompts.size / prefill_s,
            "decode_tokens_per_s": batch * (options.new_tokens - 1) / decode_s,
        }
        for name, (prefill_s, decode_s) in best.items()
    }


def main() -> None:
    """Run all batches and print a line for each side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them alone")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file too")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval().to(options.device, DTYPES[options.dtype])
        model.save_pretrained(folder)
        executor = load_executor(
            folder,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            max_pool_rows=max(options.batches),
            max_total_tokens=max(options.batches) * (options.prompt_tokens + options.new_tokens),
        )
        for batch in options.batches:
            results[batch] = compare(executor, model, batch, options)
            for name, row in results[batch].items():
                print(
                    f"batch {batch} {name}: prefill {row['prefill_tokens_per_s']:.0f} tok/s,"
                    f" decode {row['decode_tokens_per_s']:.1f} tok/s",
                    flush=True,
                )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
