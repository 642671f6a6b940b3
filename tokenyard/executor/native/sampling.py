"""Sampling by the native kernels: one thread reads a row's logits in place and copies nothing."""

import torch

from tokenyard.executor.native.runtime import NativeRuntime, address, check
from tokenyard.executor.sampling.top_k_top_p import SamplingInputs, likeliest


class NativeSamplingBackend:
    """A SamplingBackend for float32 logits on a CPU; it keeps and draws tokens as sampling/top_k_top_p.py does."""

    def __init__(self, engine: NativeRuntime, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._sampling_backend = engine.functions.ty_drawer_new(engine.pool, engine.level, vocab_size)
        if not self._sampling_backend:
            raise MemoryError("the native kernels found no memory to draw tokens in")

    def __del__(self) -> None:
        if getattr(self, "_sampling_backend", None):
            self._engine.functions.ty_drawer_free(self._sampling_backend)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first of the largest logits of each row; see SamplingBackend."""
        return likeliest(logits)

    def draw(self, logits: torch.Tensor, draws: SamplingInputs) -> torch.Tensor:
        """Draw a token for each of `draws`; see SamplingBackend."""
        tokens, own, logits = torch.empty_like(draws.rows), draws.pool_rows, logits.contiguous()
        kept = draws.parameters
        # Bound to names, so that they outlive the call.
        top_k, uniforms = kept.device_top_k(own), draws.uniforms()
        columns = (draws.rows, top_k, uniforms, kept.temperature(own), kept.top_p(own), kept.min_p(own), tokens)
        check(
            self._engine.functions.ty_drawer_run(
                self._sampling_backend,
                address(logits),
                self._vocab_size,
                len(tokens),
                *map(address, columns),
            )
        )
        return tokens
