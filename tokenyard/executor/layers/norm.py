"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """Scale vectors to a root mean square of one, then by `weight` (Zhang and Sennrich 2019, arXiv 1910.07467).

    weight: [..., size]; leading dimensions match those of the input, so that heads may have weights of their own.
    offset: added to the weights, in float32, which are multiplied with before anything is rounded (Gemma).
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._weight = weight.float() + offset if offset else weight
        self._eps = eps
        self._shape = weight.shape[-1:]
        self._fused = weight.dim() == 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension, in float32 whatever the dtype of `x`."""
        if x.dtype != self._weight.dtype:
            return self._scaled(x.float()).to(x.dtype)
        return self._scaled(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        return F.rms_norm(x, self._shape, None, self._eps) * self._weight
