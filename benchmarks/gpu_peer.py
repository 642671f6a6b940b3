"""Our engine and transformers' continuous batching on the same requests; a part of `benchmarks.gpu`.

Random weights, equal prompts lengths, greedy, every request to its last token. Ours is the offline `LLM`, scheduling
included; theirs is `generate_batch`. Both run once before they are timed, so that kernels are compiled and graphs made.
"""

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tokenyard import LLM, SamplingParams

TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


def compare(
    folder: Path, config: dict, device: str, requests: int, prompt_tokens: int, new_tokens: int
) -> dict[str, float]:
    """New tokens a second of both, and the ratio. config: what the folder's config.json says."""
    draw = np.random.default_rng(0)
    shape = (2, requests, prompt_tokens)
    first, second = draw.integers(3, config["vocab_size"], shape).tolist()
    ours = run_ours(folder, device, first, second, new_tokens)
    theirs = run_transformers(config, device, first, second, new_tokens)
    tokens = requests * new_tokens
    return {"ours_tokens_per_s": tokens / ours, "transformers_tokens_per_s": tokens / theirs, "ratio": theirs / ours}


def run_ours(folder: Path, device: str, first: list, second: list, new_tokens: int) -> float:
    """Seconds of the second prompts."""
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    kind = torch.device(device).type
    options = {"device": kind, "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(folder), **options) as llm:
        llm.generate(first, sampling)
        begin_s = time.perf_counter()
        found = llm.generate(second, sampling)
        seconds = time.perf_counter() - begin_s
    assert all(len(each.completions[0].token_ids) == new_tokens for each in found)
    return seconds


def run_transformers(config: dict, device: str, first: list, second: list, new_tokens: int) -> float:
    """Seconds of the second prompts."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    fields = {name: value for name, value in config.items() if name != "architectures"}
    made = AutoConfig.for_model(TYPES[config["architectures"][0]], **fields)
    # Where it runs: drawing billions of weights on a CPU takes minutes.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    how = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    # Without a number it takes most of the memory and writes zeros there, which a rehearsal on a CPU waits for.
    pages = None if device.startswith("cuda") else 4 * len(first)
    run = partial(
        model.generate_batch,
        generation_config=how,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=pages),
    )
    with torch.no_grad():
        run(first)
        begin_s = time.perf_counter()
        found = run(second)
        seconds = time.perf_counter() - begin_s
    assert sum(len(each.generated_tokens) for each in found.values()) == len(second) * new_tokens
    return seconds
