"""The interface of fused kernels: what a device may compute in one launch in a decoder of torch layers."""

from typing import Protocol

import torch

from tokenyard.executor.forward_batch import ForwardBatch


class FusedKernels(Protocol):
    """Each method replaces several torch operations; see `Decoder.fuse`. All compute in float32 and round once."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of [rows, size], times weight [size], in x's dtype."""

    def add_norm(
        self, x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + other and the norm of that, both [rows, size]."""

    def silu_gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [rows, size]."""

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Rotate [T, heads + 2 kv heads, head_dim] by what Rotary.at returned, store keys and values, and attend:
        [T, heads * head_dim]. norm_weight: [heads + kv heads, head_dim] of a norm of each head before, or None.
        """
