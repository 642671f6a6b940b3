"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """Scale vectors to a root mean square of one, then by `weight` (Zhang and Sennrich 2019, arXiv 1910.07467).

    weight: [..., size]; leading dimensions match those of the input, so that heads may have weights of their own.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = weight.shape[-1:]
        self._fused = weight.dim() == 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension, in float32 whatever the dtype of `x`."""
        if self._fused:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        return F.rms_norm(x, self._shape, None, self._eps) * self._weight
