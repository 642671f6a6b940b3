"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F

from tokenyard.executor.layers.fused import FusedKernels


class RMSNorm:
    """Scale vectors to a root mean square of one, then by `weight` (Zhang and Sennrich 2019, arXiv 1910.07467).

    weight: [..., size]; leading dimensions match those of the input, so that each head may have its own weights.
    offset: added to the weights, in float32, which are multiplied with before anything is rounded (Gemma).
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight.float() + offset if offset else weight
        self.eps = eps
        self._shape = weight.shape[-1:]
        self._by_torch = weight.dim() == 1
        self._kernels: FusedKernels | None = None

    def fuse(self, kernels: FusedKernels) -> None:
        """Compute by these kernels from now on; weights must be [size]."""
        self._kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension, in float32 whatever the dtype of `x`."""
        if self._kernels is not None:
            return self._kernels.norm(x, self.weight, self.eps)
        if x.dtype != self.weight.dtype:
            return self._scaled(x.float()).to(x.dtype)
        return self._scaled(x)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + other and the norm of that."""
        if self._kernels is not None:
            return self._kernels.add_norm(x, other, self.weight, self.eps)
        x = x + other
        return x, self(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        if self._by_torch:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight
