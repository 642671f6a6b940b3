"""Layers with a recurrent state in native steps: their weights, and the states of a step's rows."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenyard.executor.models.config import DeltaNetConfig, Mamba2Config, ModelConfig
from tokenyard.executor.native.library import NativeRecurrent, NativeStates
from tokenyard.executor.native.runtime import address
from tokenyard.executor.state_pool import RecurrentConfig, StateBatch, StatePool
from tokenyard.executor.weights import Weights

DELTA_NET, MAMBA2, SHORT_CONV = range(3)
CONV, CONV_BIAS, DECAY, STEP_BIAS, SKIP, MIXER_NORM = range(8, 14)
"""The library's numbers of kinds of layers, and of their vectors."""


def describe_recurrent(own: RecurrentConfig) -> NativeRecurrent:
    """Return the library's description of a model's layers with a recurrent state."""
    if isinstance(own, DeltaNetConfig):
        return NativeRecurrent(
            kind=DELTA_NET,
            groups=own.key_heads,
            heads=own.value_heads,
            key_dim=own.key_dim,
            value_dim=own.value_dim,
            kernel=own.kernel,
            channels=own.channels,
        )
    if isinstance(own, Mamba2Config):
        return NativeRecurrent(
            kind=MAMBA2,
            groups=own.groups,
            heads=own.heads,
            key_dim=own.state_size,
            value_dim=own.head_dim,
            kernel=own.kernel,
            channels=own.channels,
            step_min=own.step_limits[0],
            step_max=own.step_limits[1],
        )
    return NativeRecurrent(kind=SHORT_CONV, kernel=own.kernel, channels=own.channels)


def product_size(own: RecurrentConfig) -> int:
    """Return how many numbers a layer's first product gives for a token."""
    if isinstance(own, DeltaNetConfig):
        return own.channels + own.value_heads * (own.value_dim + 2)
    if isinstance(own, Mamba2Config):
        return own.channels + own.heads * (own.head_dim + 1)
    return 3 * own.channels


def recurrent_products(
    config: ModelConfig, own: RecurrentConfig, layer: int
) -> tuple[dict[str, int], tuple[dict[str, int], int], bool]:
    """Return a layer's products: the outputs of the first one, outputs and inputs of the second, and whether they have
    biases.
    """
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    if isinstance(own, DeltaNetConfig):
        prefix, values = f"{prefix}.linear_attn", own.value_heads * own.value_dim
        sizes = {"qkv": own.channels, "z": values, "b": own.value_heads, "a": own.value_heads}
        inputs = {f"{prefix}.in_proj_{name}": size for name, size in sizes.items()}
        return inputs, ({f"{prefix}.out_proj": hidden}, values), False
    if isinstance(own, Mamba2Config):
        prefix, inner = f"{prefix}.mamba", own.heads * own.head_dim
        return {f"{prefix}.in_proj": product_size(own)}, ({f"{prefix}.out_proj": hidden}, inner), own.bias
    prefix = f"{prefix}.conv"
    return {f"{prefix}.in_proj": product_size(own)}, ({f"{prefix}.out_proj": hidden}, hidden), own.bias


def recurrent_vectors(own: RecurrentConfig, weights: Weights, layer: int) -> dict[int, torch.Tensor]:
    """Return a layer's vectors by the library's numbers; see ty_model_vector."""
    prefix = f"model.layers.{layer}"
    if not isinstance(own, DeltaNetConfig | Mamba2Config):
        found = {CONV: _conv(own, weights, f"{prefix}.conv.conv")}
        return found | ({CONV_BIAS: weights.get(f"{prefix}.conv.conv.bias", (own.channels,))} if own.bias else {})
    delta = isinstance(own, DeltaNetConfig)
    prefix = f"{prefix}.linear_attn" if delta else f"{prefix}.mamba"
    heads = own.value_heads if isinstance(own, DeltaNetConfig) else own.heads
    found = {
        CONV: _conv(own, weights, f"{prefix}.conv1d"),
        DECAY: -weights.get(f"{prefix}.A_log", (heads,)).float().exp(),
        STEP_BIAS: weights.get(f"{prefix}.dt_bias", (heads,)),
    }
    if isinstance(own, DeltaNetConfig):
        return found | {MIXER_NORM: weights.get(f"{prefix}.norm.weight", (own.value_dim,))}
    if own.conv_bias:
        found[CONV_BIAS] = weights.get(f"{prefix}.conv1d.bias", (own.channels,))
    return found | {
        SKIP: weights.get(f"{prefix}.D", (heads,)),
        MIXER_NORM: weights.get(f"{prefix}.norm.weight", (heads * own.head_dim,)),
    }


def _conv(own: RecurrentConfig, weights: Weights, name: str) -> torch.Tensor:
    """The weights of a convolution, [kernel, channels]."""
    return weights.get(f"{name}.weight", (own.channels, 1, own.kernel)).squeeze(1).T


@dataclass(frozen=True, slots=True)
class StateRow:
    """Tokens of one row of a step.

    first: its first token in the batch. slot: its working state, which it continues unless `fresh`.
    runs: tokens, and the slots of the state after them; the last run has no slots where it ends in drafts.
    """

    first: int
    slot: int
    fresh: bool
    runs: list[tuple[int, tuple[int, ...]]]


def rows_of(batch: StateBatch) -> list[StateRow]:
    """Return the rows of a step, those that decode first."""
    targets = [[slot] for slot in batch.decode_slots.tolist()]
    if batch.decode_saves is not None:
        for row, slot in zip(*(column.tolist() for column in batch.decode_saves), strict=True):
            targets[row].append(slot)
    rows = [StateRow(row, slots[0], False, [(1, tuple(slots))]) for row, slots in enumerate(targets)]
    for run in batch.runs:
        # The runs of a row follow each other.
        if len(rows) == len(targets) or rows[-1].slot != run.slot:
            rows.append(StateRow(run.first, run.slot, run.fresh, []))
        rows[-1].runs.append((run.end - run.first, run.targets))
    return rows


class NativeStateRows:
    """The states of a step as the library wants them; it holds addresses only, so the pool must outlive it.

    size: numbers that are kept of a token of a run without targets.
    kept_runs: for each of these runs, its first token among those kept, tokens, slot and whether it continues nothing.
    """

    def __init__(self, pool: StatePool, rows: Sequence[StateRow], size: int, kept: torch.Tensor | None = None) -> None:
        self._pool, self._size = pool, size
        runs = [run for row in rows for run in row.runs]
        self.kept_runs: list[tuple[int, int, int, bool]] = []
        tokens = 0
        for row in rows:
            count, slots = row.runs[-1]
            if not slots:
                self.kept_runs.append((tokens, count, row.slot, row.fresh and len(row.runs) == 1))
                tokens += count
        if kept is None:
            kept = torch.empty(len(pool.conv), tokens, size)
        self._kept = kept
        columns = (
            [row.first for row in rows],
            [-1 if row.fresh else row.slot for row in rows],
            [0, *itertools.accumulate(len(row.runs) for row in rows)],
            [count for count, _ in runs],
            [0, *itertools.accumulate(len(slots) for _, slots in runs)],
            [slot for _, slots in runs for slot in slots],
        )
        self._columns = [np.array(column, np.int64) for column in columns]
        self.described = NativeStates(
            len(rows),
            *(column.ctypes.data for column in self._columns),
            conv=address(pool.conv),
            recurrent=address(pool.recurrent),
            conv_bytes=pool.conv.stride(0) * pool.conv.itemsize,
            recurrent_bytes=pool.recurrent.stride(0) * pool.recurrent.itemsize,
            kept=address(kept),
            kept_tokens=kept.shape[1],
        )

    def again(self, counts: Sequence[int]) -> "NativeStateRows":
        """Describe how states advance by so many of the tokens of each run in `kept_runs`."""
        rows = [
            StateRow(first, slot, fresh, [(count, (slot,))])
            for (first, _, slot, fresh), count in zip(self.kept_runs, counts, strict=True)
            if count
        ]
        return NativeStateRows(self._pool, rows, self._size, self._kept)
