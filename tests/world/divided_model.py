"""A model for the ranks of a tensor-parallel group, whose answers only right KV at all ranks can give.

The product's runner, page table, sampler and KV pool are around it. Keys and values of a token depend on all tokens
before it (`history_marks`). A rank attends to all of its KV, and has a share of the bits of the result; their sum over
the ranks chooses the next token. It is the same for any number of ranks, so engines of different sizes agree.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tokenyard.base import ConfigError, ExecutorInfo, WeightSource
from tokenyard.executor import mock
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_ownership_check import UInt64Array, history_marks, mix, mix_one
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.runner import ModelExecutor

LOAD_S = 0.2
SHAPE = SimpleNamespace(kv_layers=[0], kv_planes=2, kv_shape=lambda layer: (1, 1), two_kv_shapes=False)
"""What a KV pool asks of the config of a model."""

KV_BYTES = 16
MASK = 2**64 - 1


def _chosen(attended: UInt64Array, weights: str, info: ExecutorInfo) -> UInt64Array:
    """The token behind each position, by what was attended to there."""
    tokens = mix(attended + np.uint64(zlib.crc32(weights.encode()))) % np.uint64(info.vocab_size)
    for _ in info.eos_token_ids:
        for token in info.eos_token_ids:
            tokens += tokens == np.uint64(token)
        tokens %= np.uint64(info.vocab_size)
    return tokens


class Answer:
    """What the model may answer to a prompt, token by token."""

    def __init__(self, prompt: Sequence[int], info: ExecutorInfo) -> None:
        marks = history_marks(np.array(prompt, np.int32))
        self._info, self._position = info, len(prompt)
        self._mark, self._attended = int(marks[-1]), int(mix(marks).sum())

    def next(self, weights: str) -> int:
        """The token that these weights choose now."""
        return int(_chosen(np.array([self._attended], np.uint64), weights, self._info)[0])

    def take(self, token: int) -> None:
        """Continue behind a token."""
        self._mark = (self._mark + mix_one(token + (self._position << 32))) & MASK
        self._attended = (self._attended + mix_one(self._mark)) & MASK
        self._position += 1


class DividedModel:
    """A rank's part of the model; see ModelBackend. slowed: seconds that a step takes in addition."""

    def __init__(
        self, pool: KvPool, pages: PageTable, info: ExecutorInfo, part: Any, step_s: float, slowed: Callable[[], float]
    ) -> None:
        assert pages.host is not None
        self._keys, self._values = (plane.view(-1).numpy().view(np.uint64) for plane in pool.layer(0))
        self._table, self._info, self._part = pages.host, info, part
        self._step_s, self._slowed = step_s, slowed
        bits = range(part.rank if part else 0, 64, part.size if part else 1)
        self._share = np.uint64(sum(1 << bit for bit in bits))
        self.weights = ""

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        time.sleep(self._step_s + self._slowed())
        attended, first = [np.zeros(0, np.uint64)], 0
        tokens, rows = batch.token_ids.numpy().astype(np.int32), batch.pool_rows.numpy()
        for start, count in zip(batch.starts.tolist(), batch.counts.tolist(), strict=True):
            attended.append(self._attend(int(rows[first]), start, tokens[first : first + count]))
            first += count
        own = torch.from_numpy((np.concatenate(attended)[batch.logit_tokens.numpy()] & self._share).view(np.int64))
        whole = self._part.group.all_reduce(own) if self._part else own
        if self._part and self._part.rank:
            return torch.empty(0)  # only rank 0 samples
        chosen = _chosen(whole.numpy().view(np.uint64), self.weights, self._info)
        logits = torch.zeros(len(chosen), self._info.vocab_size)
        logits[torch.arange(len(chosen)), torch.from_numpy(chosen.view(np.int64))] = 1.0
        return logits

    def logits(self, first: int, last: int) -> torch.Tensor:
        raise AssertionError("nobody asks for log-probabilities of prompts")

    hidden = logits

    def _attend(self, pool_row: int, start: int, tokens: Any) -> UInt64Array:
        """Write the KV of a row's tokens from `start` on, and attend from each to all before it and itself."""
        size, positions = self._info.page_size, np.arange(start + len(tokens))
        slots = self._table[pool_row, positions // size].astype(np.int64) * size + positions % size
        before = int(self._keys[slots[start - 1]]) if start else 0
        self._keys[slots[start:]] = own = history_marks(tokens, start, before)
        self._values[slots[start:]] = mix(own)
        earlier = self._values[slots[:start]].sum(dtype=np.uint64)
        found: UInt64Array = earlier + np.cumsum(self._values[slots[start:]], dtype=np.uint64)
        return found


@dataclass
class _Updates:
    """Other weights of the model, by the path of their folder; see WeightUpdates."""

    model: DividedModel
    prepared: str = ""

    def prepare(self, source: WeightSource) -> str:
        if not Path(source.folder).exists():
            raise ConfigError(f"there is no model folder {source.folder!r}")
        time.sleep(LOAD_S)
        self.prepared = source.folder
        return f"{zlib.crc32(source.folder.encode()):08x}"

    def take(self) -> Any:
        self.model.weights = self.prepared
        return SimpleNamespace(model=self.model, adapters=None, draft_model=None)

    def drop(self) -> None:
        self.prepared = ""


def load(
    slowed: Callable[[], float],
    model_path: str,
    *,
    part: Any = None,
    pool_memory: Any = None,
    make: Callable[..., ModelExecutor] = ModelExecutor,
    threads: int = 1,
    step_ms: float,
    **options: Any,
) -> ModelExecutor:
    """Load a rank's part; see `model_loader.load_executor`. options: those of the mock."""
    # A second core's threads would wait for this one's tiny steps by spinning.
    torch.set_num_threads(1)
    time.sleep(LOAD_S)
    info = replace(mock.load_executor(model_path, step_ms=step_ms, **options).info, device="cpu", dtype="int64")
    info = replace(info, kv_bytes_per_token=KV_BYTES)
    if part is not None:
        info = part.agree(info)
    device: Any = torch.device("cpu")
    shape: Any = SHAPE
    pool = KvPool(shape, info.num_pages, info.page_size, device, torch.int64, memory=pool_memory)
    pages = PageTable(info.max_pool_rows, info.context_length, info.page_size, device)
    model = DividedModel(pool, pages, info, part, step_ms / 1000, slowed)
    executor = make(model, pool, pages, info, device)
    updates: Any = _Updates(model)
    executor.weight_updates = updates
    return executor
