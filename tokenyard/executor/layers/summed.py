"""What the ranks of a model add up."""

from collections.abc import Callable

import torch

from tokenyard.executor.parallel.group import Group


class Summed:
    """`part(x)` summed over the ranks of a group. part: [rows, n] -> [rows, outputs] in the dtype of x, this rank's
    share.
    """

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor], group: Group) -> None:
        self._part, self._group = part, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share and take the sum: the same bits at every rank."""
        return self._group.sum(self._part(x))
