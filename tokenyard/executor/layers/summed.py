"""What the ranks of a model compute of a layer together."""

from collections.abc import Callable
from typing import Protocol

import torch

from tokenyard.executor.parallel.group import Group

Part = Callable[[torch.Tensor], torch.Tensor]
"""[rows, n] -> [rows, outputs] in the dtype of its input."""


class Joint(Protocol):
    """How the ranks of a model make whole what each computes of a layer."""

    def output(self, part: Part) -> Part:
        """Put around this rank's product behind the attention."""

    def mlp(self, part: Part) -> Part:
        """Put around this rank's share of what follows the attention."""


class Summed:
    """`part(x)` summed over the ranks of a group, of which each has the same x."""

    def __init__(self, part: Part, group: Group) -> None:
        self._part, self._group = part, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share and take the sum: the same bits at every rank."""
        return self._group.sum(self._part(x))


class SummedLayers:
    """A Joint of ranks that share every product of a layer (tensor parallelism)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def output(self, part: Part) -> Part:
        """See Joint."""
        return Summed(part, self._group)

    def mlp(self, part: Part) -> Part:
        """See Joint."""
        return Summed(part, self._group)


class Places:
    """Where the tokens of this rank stand among those of all ranks in a step: `first` to `first + own` of `total`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.first = self.total = 0

    def set(self, counts: list[int]) -> None:
        """Begin a step; counts: tokens of each rank."""
        self.first, self.total = sum(counts[: self._rank]), sum(counts)


class Gathered:
    """`part(x)` of the tokens of all ranks, summed over the ranks; each gets that of its own tokens.

    The tokens are gathered by a sum too, with zeros in the places of other ranks (as SGLang does).
    """

    def __init__(self, part: Part, group: Group, places: Places) -> None:
        self._part, self._group, self._places = part, group, places

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share for all tokens; x: [own tokens, n], none for a rank that has nothing to do."""
        own = slice(self._places.first, self._places.first + len(x))
        everyone = x.new_zeros(self._places.total, x.shape[1])
        everyone[own] = x
        return self._group.sum(self._part(self._group.sum(everyone)))[own]


class GatheredMlps:
    """A Joint of ranks that attend to tokens of their own and share what follows (attention by data-parallel rank)."""

    def __init__(self, group: Group, places: Places) -> None:
        self._group, self._places = group, places

    def output(self, part: Part) -> Part:
        """See Joint."""
        return part

    def mlp(self, part: Part) -> Part:
        """See Joint."""
        return Gathered(part, self._group, self._places)
