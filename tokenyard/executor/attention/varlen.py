"""Prompts without a prefix by torch's Flash Attention for rows of any length (`torch.nn.attention.varlen`, 2.13).

It is given their keys and values side by side, which are gathered from the pool that they were written to. Its block
table would read the pool itself, but takes pages of 256 tokens, of which ours have 1 by default.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.attention.backend import AttentionSpec
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.models.config import ModelConfig

OPTIONS = ("scale", "window_size", "enable_gqa", "num_splits")
"""What is passed by name; versions before 2.13 know other names."""
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM, HEAD_MULTIPLE = 256, 8


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Rows that lie together in a batch, each of which begins with its first token.

    first, end: their tokens in the batch.
    offsets: int32[rows + 1] on the device, where each row begins, from 0, and where the last one ends.
    longest: tokens of the longest row.
    """

    first: int
    end: int
    offsets: torch.Tensor
    longest: int


def why_not(device: torch.device, dtype: torch.dtype, config: ModelConfig) -> str:
    """Return why prompts of a model cannot be attended to by torch, "" if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in DTYPES:
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if config.latent is not None:
        return "it is not used for latent attention"
    if config.sinks or config.attention_softcap:
        return "it knows no attention sinks and no cap of scores, which this model has"
    sizes = [size for _, size in map(config.kv_shape, config.kv_layers)]
    if any(size % HEAD_MULTIPLE or size > MAX_HEAD_DIM for size in sizes):
        return f"it takes heads of a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD_DIM} dimensions"
    if missing := [name for name in OPTIONS if name not in _parameters()]:
        return f"torch {torch.__version__} has no varlen_attn_out with {', '.join(missing)} (2.13 has)"
    return ""


def _parameters() -> tuple[str, ...]:
    try:
        module: Any = importlib.import_module("torch.nn.attention.varlen")
        return tuple(inspect.signature(module.varlen_attn_out).parameters)
    except (ImportError, AttributeError):
        return ()


def prompt_runs(
    firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], fresh: npt.NDArray[np.bool_], device: torch.device
) -> list[PromptRun]:
    """Return the runs of `fresh` rows of a batch, which have `counts` tokens from `firsts` on."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], fresh, [False])).astype(np.int8)))
    runs = []
    for low, high in edges.reshape(-1, 2).tolist():
        offsets = np.concatenate(([0], np.cumsum(counts[low:high])))
        first = int(firsts[low])
        on_device = to_device(offsets.astype(np.int32), device)
        runs.append(PromptRun(first, first + int(offsets[-1]), on_device, int(counts[low:high].max())))
    return runs


def attend_prompts(
    run: PromptRun,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> None:
    """Write into out [T, heads, head_dim] what the queries of a run find in a layer.

    q: [T, heads, head_dim]; keys, values: [slot, kv heads, head_dim]; slots: int64[T], of the keys of all tokens.
    """
    module: Any = importlib.import_module("torch.nn.attention.varlen")
    tokens, window = slice(run.first, run.end), spec.windows[layer]
    own = slots[tokens]
    module.varlen_attn_out(
        *(out[tokens], q[tokens], keys[own], values[own]),
        *(run.offsets, run.offsets, run.longest, run.longest),
        scale=spec.scale,
        # The tokens before a query's own that it sees, and those behind it; -1 for all.
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
        # The bits of a row do not depend on the others.
        num_splits=1,
    )
