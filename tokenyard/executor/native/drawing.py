"""Draws of tokens by the native kernels: a row's weights are looked at once, by one thread, and copied nowhere."""

import numpy as np
import torch

from tokenyard.executor.native.engine import NativeEngine, address, check
from tokenyard.executor.sampling.draw import Draws


class NativeDrawer:
    """A Drawer for float32 logits on a CPU; which tokens stay in and how one is drawn is as in sampling/draw.py."""

    def __init__(self, engine: NativeEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._drawer = engine.functions.ty_drawer_new(engine.pool, engine.level, vocab_size)
        if not self._drawer:
            raise MemoryError("the native kernels found no memory to draw tokens in")

    def __del__(self) -> None:
        if getattr(self, "_drawer", None):
            self._engine.functions.ty_drawer_free(self._drawer)

    def __call__(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Draw a token for each of `draws`: int64[n]. logits: float32[m, vocabulary]."""
        tokens = torch.empty(len(draws.rows), dtype=torch.int64)
        rows = np.ascontiguousarray(draws.rows, dtype=np.int64)
        columns = [column.contiguous() for column in (draws.uniforms, draws.temperature, draws.top_p, draws.min_p)]
        check(
            self._engine.functions.ty_drawer_run(
                self._drawer,
                address(logits),
                self._vocab_size,
                len(rows),
                rows.ctypes.data,
                draws.top_k.ctypes.data,
                *map(address, columns),
                address(tokens),
            )
        )
        return tokens
