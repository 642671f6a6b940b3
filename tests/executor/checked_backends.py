"""A second attention backend and a second model backend that only check: they stand where a faster one will stand."""

import numpy as np
import torch

from tokenyard.executor.kv_pool import SCALE_BYTES
from tokenyard.executor.model_loader import load_executor

ROUNDING = {torch.int8: 0.01, torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13}
"""What a number of a pool of bytes may be off, as a share of the largest of its head."""
MAX_DROPPED = {torch.int8: 0.0, torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.05}
"""Numbers that may be off by more: Triton's interpreter drops the carry of one that is rounded up to a power of two."""


def numbers_of(side, kind):
    """Keys or values of a pool of bytes, of each head's numbers and their scale, as float64; see KvPool."""
    if kind is None:
        return side
    scales = side[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return side[..., :-SCALE_BYTES].contiguous().view(kind).double() * scales


class CheckedAttention:
    """Attends query by query in float64, straight over the page table, and holds another backend to that."""

    def __init__(self, inner, pool, pages, spec, tolerance=1e-4):
        self._inner, self._pool, self._pages = inner, pool, pages
        self._spec, self._windows, self._tolerance = spec, spec.windows, tolerance
        self._batch = None
        self.checked = 0

    def prepare(self, batch):
        self._batch, self._layer = batch, 0
        self._inner.prepare(batch)

    def forward(self, layer, q, k, v, batch):
        assert batch is self._batch, "prepare comes before forward, once a step"
        assert layer == self._layer, "layers come in order, each once"
        self._layer += 1
        found = self._inner.forward(layer, q, k, v, batch)
        keys, values = self._pool.layer(layer)
        for side, given in ((keys[batch.slots], k), (values[batch.slots], v)):
            if self._pool.kind is None:
                assert torch.equal(side, given)
            else:
                off = (numbers_of(side, self._pool.kind) - given).abs() / given.abs().amax(-1, keepdim=True)
                assert (off > ROUNDING[self._pool.kind]).double().mean() <= MAX_DROPPED[self._pool.kind]
        expected = self._attend(layer, q.double(), batch)
        torch.testing.assert_close(found.double(), expected, rtol=self._tolerance, atol=self._tolerance)
        self.checked += 1
        return found

    def _attend(self, layer, q, batch):
        keys, values = self._pool.layer(layer)
        group, out = q.shape[1] // keys.shape[1], torch.empty_like(q)
        for token, (row, position) in enumerate(zip(batch.pool_rows, batch.positions, strict=True)):
            first = max(0, int(position) + 1 - self._windows[layer]) if self._windows[layer] else 0
            slots = self._pages.slots(row, torch.arange(first, int(position) + 1)).long()
            own_k, own_v = (
                numbers_of(side[slots], self._pool.kind).double().repeat_interleave(group, dim=1)
                for side in (keys, values)
            )
            scores = torch.einsum("hd,nhd->hn", q[token], own_k) * self._spec.scale
            if self._spec.softcap:
                scores = (scores / self._spec.softcap).tanh() * self._spec.softcap
            if self._spec.sinks:
                scores = torch.cat((scores, self._spec.sinks[layer].double()[:, None]), dim=1)
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(own_v)], own_v)
        return out.flatten(1)


class CheckedModel:
    """Checks what a batch promises and what a step may touch; poisons memory that no step may read."""

    def __init__(self, inner, pool, pages):
        self._inner, self._pool, self._pages = inner, pool, pages
        self._given = None
        self.checked = 0

    def step(self, batch):
        if self._given is not None:
            self._given.fill_(float("nan"))
        self._check_batch(batch)
        before = self._pool.tensor.clone()
        logits = self._inner.step(batch)
        untouched = torch.ones(before.shape[2], dtype=torch.bool)
        untouched[batch.slots] = False
        assert torch.equal(self._pool.tensor[:, :, untouched], before[:, :, untouched])
        assert logits.dtype == torch.float32
        assert len(logits) == len(batch.logit_tokens)
        self.checked += 1
        self._given = logits.clone()
        return self._given

    def logits(self, first, last):
        return self._inner.logits(first, last)

    def hidden(self, first, last):
        return self._inner.hidden(first, last)

    def _check_batch(self, batch):
        tokens = int(batch.counts.sum())
        for column in (batch.token_ids, batch.positions, batch.slots, batch.pool_rows):
            assert column.shape == (tokens,)
            assert column.dtype == torch.int64
        assert (batch.counts[: batch.decode_rows] == 1).all()
        assert (batch.token_ids >= 0).all()
        positions = [np.arange(start, start + count) for start, count in zip(batch.starts, batch.counts, strict=True)]
        assert batch.positions.tolist() == np.concatenate(positions).tolist()
        assert torch.equal(batch.slots, self._pages.slots(batch.pool_rows, batch.positions).long())
        assert (batch.slots >= self._pool.page_size).all(), "page 0 is padding"
        assert len(batch.slots.unique()) == tokens
        logit_tokens = batch.logit_tokens.tolist()
        assert logit_tokens == sorted(set(logit_tokens))
        assert all(0 <= token < tokens for token in logit_tokens)


def load_checked(model_path, **options):
    """An executor whose attention and whose steps are checked by the two backends above."""
    executor = load_executor(model_path, model_impl="torch", **options)
    model, pages = executor.model, executor.pages
    model.attention = CheckedAttention(model.attention, executor.kv_pool, pages, model.attention_spec)
    executor.model = CheckedModel(model, executor.kv_pool, pages)
    return executor
