"""What a CUDA device's memory must hold besides weights, KV pool and recurrent states, counted before the pool is
sized. vLLM measures a profiling step instead; this count serves divided models too, whose ranks cannot run one alone.
`test_triton_memory.py` holds it to what steps allocate.
"""

from dataclasses import dataclass

import torch

from tokenyard.executor.models.config import ModelConfig

SPLIT_SCRATCH = 64
"""Most queries times splits of a row for which attention has scratch; see attention/triton/backend.py."""
BUCKET_SCRATCH = 20
"""Splits of a token in a captured step of rows of all kinds: those of a decode, and those of one of few queries."""
SAMPLING_BYTES = 10
"""Of a logit: in the dtype of the weights, in float32, and a copy of rows whose parameters change their logits."""
GRAPH_BYTES = 2 << 20
"""Of a captured step, for the parameters of its kernels."""
FLASHINFER_BYTES = 160 << 20
"""Of flashinfer: a workspace, and 8 MiB of each of its wrappers, for one size of window."""
LIBRARY_BYTES = 128 << 20
"""Workspaces of libraries and loaded kernels that come after the weights."""
NCCL_BYTES = 512 << 20
"""Buffers of the communicators of a divided model, which connect after the weights are loaded."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes by what takes them.

    steps: activations of the largest step.
    graphs: captured steps.
    page_table: page tables.
    libraries: workspaces of cuBLAS, NCCL and flashinfer.
    """

    steps: int
    graphs: int
    page_table: int
    libraries: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.steps + self.graphs + self.page_table + self.libraries


def step_bytes(config: ModelConfig, tokens: int, rows: int, itemsize: int) -> int:
    """Return the bytes that a step of `tokens` tokens allocates at most, with logits for `rows` of them.

    itemsize: of a number in the model's dtype.
    """
    scratch = _scratch_bytes(config, min(rows, tokens) * SPLIT_SCRATCH)
    return _layer_bytes(config, tokens, itemsize) + scratch + rows * config.vocab_size * SAMPLING_BYTES


def bucket_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return what a captured step of rows of all kinds allocates, which ends with hidden states."""
    return _layer_bytes(config, tokens, itemsize) + _scratch_bytes(config, tokens * BUCKET_SCRATCH)


def _scratch_bytes(config: ModelConfig, splits: int) -> int:
    return splits * config.num_heads * (config.head_dim + 1) * 4


def _layer_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    attention = (heads * (2 if config.output_gate else 1) + 2 * kv_heads + 2 * heads) * head_dim
    mlp = 3 * config.intermediate_size
    if config.experts is not None:
        # Rows of each token's experts, sorted: inputs, products and results.
        mlp += config.experts.active * (3 * config.experts.intermediate_size + 3 * config.hidden_size)
    per_token = (4 * config.hidden_size + max(attention, mlp)) * itemsize
    # Angles in float32, and columns of int64.
    per_token += 4 * head_dim * len(set(config.ropes)) + 16 * 8
    return tokens * per_token


def varlen_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the bytes of what torch's varlen attention is given of prompts, their keys and values, and of the sums of
    each head, which it returns besides.
    """
    return tokens * (2 * config.num_kv_heads * config.head_dim * itemsize + config.num_heads * 4)


def device_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_step_tokens: int,
    max_pool_rows: int,
    context_length: int,
    page_size: int,
    captured: tuple[int, ...] = (),
    buckets: tuple[int, ...] = (),
    divided: bool = False,
    draft_tokens: int = 0,
    flashinfer: bool = False,
    varlen: bool = False,
) -> DeviceMemory:
    """Count what is not static. captured: the batch sizes whose decode steps are captured; buckets: the tokens of other
    captured steps. draft_tokens: of a row, each of which has logits as it is verified, and is a token of the step.
    flashinfer: whether that package attends. varlen: whether torch attends to prompts.
    """
    largest, widest = max(captured, default=0), max((*captured, *buckets), default=0)
    # Graphs share one pool, so they take what the largest does, and its logits and hidden states stay.
    decodes = step_bytes(config, largest, largest, dtype.itemsize)
    graphs = (len(captured) + len(buckets)) * GRAPH_BYTES
    graphs += max(decodes, bucket_bytes(config, max(buckets, default=0), dtype.itemsize))
    graphs += largest * 4 * config.vocab_size + widest * config.hidden_size * dtype.itemsize
    tables = 2 if any(config.windows) else 1
    libraries = LIBRARY_BYTES + (NCCL_BYTES if divided else 0)
    if flashinfer:
        libraries += FLASHINFER_BYTES * len(set(config.windows))
        # It has the pages of a captured step's rows as a list, for each size of window.
        tables += len(set(config.windows)) if captured else 0
    drafts = draft_tokens * max_pool_rows
    return DeviceMemory(
        step_bytes(config, max_step_tokens + max_pool_rows + drafts, max_pool_rows, dtype.itemsize)
        + (varlen_bytes(config, max_step_tokens, dtype.itemsize) if varlen else 0)
        + drafts * config.vocab_size * SAMPLING_BYTES,
        graphs,
        tables * max_pool_rows * -(-context_length // page_size) * 4,
        libraries,
    )
