"""Attention by the native kernels, straight over the page table."""

import ctypes

import torch

from tokenyard.executor.attention.backend import AttentionSpec
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.native.library import NativeAttentionTask
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, check, describe_step, int32s


class NativeAttention:
    """An AttentionBackend for a CPU: decodes, chunks and rows of several queries, with no copy of keys to speak of."""

    def __init__(self, engine: NativeRuntime, pool: KvPool, pages: PageTable, spec: AttentionSpec, heads: int) -> None:
        self._engine, self._pool, self._pages = engine, pool, pages
        self._spec, self._heads = spec, heads
        self._sinks = [layer.float().contiguous() for layer in spec.sinks]
        self._kv_heads, self._head_dim = pool.tensor.shape[3:]
        self._active = engine.active_dtype(pool.tensor.dtype)
        self._kernels = engine.functions.ty_attention_new(
            engine.pool, engine.level, DTYPES[pool.tensor.dtype], heads, self._kv_heads, self._head_dim
        )

    def __del__(self) -> None:
        if getattr(self, "_kernels", None):
            self._engine.functions.ty_attention_free(self._kernels)

    def prepare(self, batch: ForwardBatch) -> None:
        """Cut the step into tasks; see AttentionBackend."""
        step = describe_step(batch, self._pool, self._pages, None)
        windows = int32s(self._spec.windows)
        check(
            self._engine.functions.ty_attention_prepare(
                self._kernels, ctypes.byref(step), ctypes.cast(windows, ctypes.c_void_p), len(windows)
            )
        )

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store keys and values and attend; see AttentionBackend."""
        keys, values = self._pool.layer(layer)
        keys.index_copy_(0, batch.slots, k)
        values.index_copy_(0, batch.slots, v)
        queries = q.to(self._active).contiguous()
        out = torch.empty(len(q), self._heads * self._head_dim, dtype=self._active)
        job = NativeAttentionTask(
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            window=self._spec.windows[layer],
            scale=self._spec.scale,
            softcap=self._spec.softcap,
            sinks=address(self._sinks[layer]) if self._sinks else None,
            q=address(queries),
            keys=address(keys),
            values=address(values),
            out=address(out),
        )
        check(self._engine.functions.ty_attention_run(self._kernels, ctypes.byref(job)))
        return out.to(q.dtype)
