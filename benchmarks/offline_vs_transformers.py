"""The offline engine against transformers' `generate`: the same requests on the same random checkpoint, in one run.

Run from the repository root: `python -m benchmarks.offline_vs_transformers`. The shape of SmolLM2-135M in bfloat16, 32
requests of 512 prompt tokens and 128 new ones by default, all different. Ours is the whole engine, scheduler and prefix
cache included; transformers gets all requests as one batch without padding. Both decode greedily to the last token.
Each side has its own process, as idle threads of the one would slow the other down; they run in turn. Prints
medians and their ratio.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.smollm2 import SHAPE
from tokenyard import LLM, SamplingParams
from tokenyard.executor.load_options import DTYPES

_model: torch.nn.Module


def run_engine(llm: LLM, prompts: np.ndarray, new_tokens: int) -> float:
    """Seconds until the last request has ended; nothing is left in the prefix cache from the run before."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    begin_s = time.perf_counter()
    found = llm.generate([prompt.tolist() for prompt in prompts], sampling)
    seconds = time.perf_counter() - begin_s
    assert all(len(each.completions[0].token_ids) == new_tokens and not each.cached_tokens for each in found)
    return seconds


def make_model(folder: str, dtype: str, threads: int) -> None:
    """Make the checkpoint and keep the model, in the process of transformers."""
    global _model
    torch.set_num_threads(threads)
    _model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval().to(DTYPES[dtype])
    _model.save_pretrained(folder)


def run_transformers(prompts: np.ndarray, new_tokens: int) -> float:
    """Seconds of `generate` for all requests as one batch."""
    ids = torch.from_numpy(prompts.astype(np.int64))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    begin_s = time.perf_counter()
    with torch.inference_mode():
        found = _model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
    assert found.shape[1] == prompts.shape[1] + new_tokens
    return time.perf_counter() - begin_s


def main() -> None:
    """Run both sides in turn and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(make_model, folder, options.dtype, options.threads).result()
        settings = {"device": "cpu", "dtype": options.dtype, "threads": options.threads, "skip_tokenizer_init": True}
        ours, theirs = [], []
        with LLM(folder, **settings) as llm:
            for _ in range(options.repeats):
                shape = options.requests, options.prompt_tokens
                prompts = rng.integers(3, SHAPE["vocab_size"], shape, np.int32)
                ours.append(run_engine(llm, prompts, options.new_tokens))
                theirs.append(other.submit(run_transformers, prompts, options.new_tokens).result())
                print(f"engine {ours[-1]:.1f} s, transformers {theirs[-1]:.1f} s", flush=True)
    mine, yours = statistics.median(ours), statistics.median(theirs)
    tokens = options.requests * options.new_tokens
    rates = f"engine {tokens / mine:.0f}, transformers {tokens / yours:.0f} new tokens a second"
    print(f"medians: {rates}; the engine is {yours / mine:.2f} times as fast (target 2)")


if __name__ == "__main__":
    main()
