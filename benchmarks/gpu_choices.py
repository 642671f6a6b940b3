"""Choosing tokens on a device, by torch and by our kernels; a part of `benchmarks.gpu`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from tokenyard.base import RowStart, SamplingParams
from tokenyard.executor.sampling.sampler import Sampler
from tokenyard.executor.sampling.top_k_top_p import SamplingBackend

CHOICES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50, seed=1),
    "top_k 50, top_p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
}


def choosing_kernels(device: torch.device) -> dict[str, SamplingBackend | None]:
    """What chooses tokens on a device; None is torch."""
    if device.type == "cpu":
        return {"torch": None}
    from tokenyard.executor.attention.triton.sampling_kernels import TritonSamplingBackend

    return {"torch": None, "triton": TritonSamplingBackend()}


def measure_choices(
    vocabulary: int, batches: tuple[int, ...], steps: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step's choice from random logits, by torch and by Triton, and how many tokens are the same."""
    most, known = max(batches), np.ones(1, dtype=np.int32)
    logits = 3.0 * torch.randn(most, vocabulary, device=device)
    for (name, params), batch in product(CHOICES.items(), batches):
        rows, tokens, figures = np.arange(batch, dtype=np.int32), [], {}
        for kind, sampling_backend in choosing_kernels(device).items():
            sampler = Sampler(most, vocabulary, (), device, sampling_backend)
            sampler.take([RowStart(row, replace(params, seed=row), known, 1) for row in range(batch)])
            tokens.append(sampler.sample(logits[:batch], rows, np.full(batch, 1)).tolist())
            begin_s = time.perf_counter()
            for step in range(steps):
                sampler.sample(logits[:batch], rows, np.full(batch, step))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            figures[f"{kind}_ms"] = (time.perf_counter() - begin_s) / steps * 1e3
        same = sum(ours == theirs for ours, theirs in zip(tokens[0], tokens[-1], strict=True))
        yield {"choice": name, "batch": batch, **figures, "same_tokens": same}
