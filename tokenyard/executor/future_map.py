"""The last token each row sampled, kept on the device so that the next step need not wait for the host."""

import torch


class FutureMap:
    """`last_token[pool_row]`. Sampling writes it, and a later step reads it where its plan says LAST_SAMPLED.

    Steps run in order on one stream, so step N + 1 reads what step N wrote without a trip to the host.
    """

    def __init__(self, max_pool_rows: int, device: torch.device) -> None:
        self._last_token = torch.zeros(max_pool_rows, dtype=torch.int64, device=device)

    def resolve(self, tokens: torch.Tensor, pool_rows: torch.Tensor) -> torch.Tensor:
        """Return int64[tokens] with each LAST_SAMPLED replaced by its row's last token; pool_rows: int64[tokens]."""
        return torch.where(tokens < 0, self._last_token[pool_rows], tokens)

    def store(self, pool_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the sampled int64[n] tokens of int64[n] rows."""
        self._last_token[pool_rows] = tokens
