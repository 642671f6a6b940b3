"""Layers that are divided over the ranks of a model, and the communication between the ranks."""

from collections.abc import Callable
from typing import Protocol

import torch

from tokenyard.executor.distributed.process_group import ProcessGroup

EmbeddingLookup = Callable[[torch.Tensor], torch.Tensor]
"""int64[tokens] -> [tokens, hidden]: an embedding."""

Part = Callable[[torch.Tensor], torch.Tensor]
"""[rows, n] -> [rows, outputs] in the dtype of its input."""


class TensorParallelComm(Protocol):
    """How the ranks of a model combine their shares of a layer."""

    def output(self, part: Part) -> Part:
        """Wrap this rank's share of the output projection of the attention."""

    def mlp(self, part: Part) -> Part:
        """Wrap this rank's share of the MLP."""

    def embedding(self, rows: torch.Tensor) -> EmbeddingLookup:
        """The embedding, of which this rank has these rows: [tokens of the vocabulary, hidden]."""

    def head(self, part: Part, vocabulary: int) -> Part:
        """Wrap this rank's share of the LM head; `vocabulary`: logits of all ranks."""


class AllReducedLinear:
    """`part(x)` summed over the ranks of a group, of which each has the same x."""

    def __init__(self, part: Part, group: ProcessGroup) -> None:
        self._part, self._group = part, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share and take the sum: the same bits at every rank."""
        return self._group.all_reduce(self._part(x))


class VocabParallelEmbedding:
    """An embedding whose rows are divided over the ranks in equal parts, in order of ranks.

    The rank that has a token looks it up, the others add zeros, so the sum is exact. SGLang's and vLLM's
    VocabParallelEmbedding.
    """

    def __init__(self, rows: torch.Tensor, group: ProcessGroup, rank: int) -> None:
        self._rows, self._group = rows, group
        self._first = rank * len(rows)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up int64[tokens]: [tokens, hidden]."""
        places = token_ids - self._first
        elsewhere = (places < 0) | (places >= len(self._rows))
        found = self._rows[places.masked_fill_(elsewhere, 0)]
        return self._group.all_reduce(found.masked_fill_(elsewhere[:, None], 0.0))


class ParallelLMHead:
    """A product that makes logits, of which each rank makes some; rank 0 gets them all."""

    def __init__(self, part: Part, group: ProcessGroup, vocabulary: int) -> None:
        self._part, self._group, self._vocabulary = part, group, vocabulary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's part of [rows, vocabulary]; returns all at rank 0, and only the part elsewhere.

        Nothing is exchanged for no rows.
        """
        part = self._part(x)
        if not len(x):
            return part.new_empty(0, self._vocabulary)
        parts = self._group.gather_to_rank0(part)
        # The last part may be padded.
        return torch.cat(parts, dim=-1)[:, : self._vocabulary] if parts else part


class AllReduceComm:
    """The TensorParallelComm of ranks that share every product of a layer, and the vocabulary (tensor parallelism)."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def embedding(self, rows: torch.Tensor) -> EmbeddingLookup:
        """See TensorParallelComm."""
        return VocabParallelEmbedding(rows, self._group, self._rank)

    def head(self, part: Part, vocabulary: int) -> Part:
        """See TensorParallelComm."""
        return ParallelLMHead(part, self._group, vocabulary)

    def output(self, part: Part) -> Part:
        """See TensorParallelComm."""
        return AllReducedLinear(part, self._group)

    def mlp(self, part: Part) -> Part:
        """See TensorParallelComm."""
        return AllReducedLinear(part, self._group)


class DpTokenRange:
    """The range of this rank's tokens among those of all ranks in a step: `first` to `first + own` of `total`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.first = self.total = 0

    def set(self, counts: list[int]) -> None:
        """Begin a step; counts: tokens of each rank."""
        self.first, self.total = sum(counts[: self._rank]), sum(counts)


class DpAttentionMlp:
    """`part(x)` of the tokens of all ranks, summed over the ranks; each keeps that of its tokens.

    The tokens are gathered by a sum too, with zeros in the places of other ranks (as SGLang does).
    """

    def __init__(self, part: Part, group: ProcessGroup, places: DpTokenRange) -> None:
        self._part, self._group, self._places = part, group, places

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share for all tokens; x: [own tokens, n], none for a rank that has nothing to do."""
        own = slice(self._places.first, self._places.first + len(x))
        everyone = x.new_zeros(self._places.total, x.shape[1])
        everyone[own] = x
        return self._group.all_reduce(self._part(self._group.all_reduce(everyone)))[own]


class DpAttentionComm:
    """Communication of DP attention: each rank attends for its own tokens, and all share the MLPs."""

    def __init__(self, group: ProcessGroup, places: DpTokenRange) -> None:
        self._group, self._places = group, places

    def embedding(self, rows: torch.Tensor) -> EmbeddingLookup:
        """See TensorParallelComm; this rank holds all of it."""
        return rows.__getitem__

    def head(self, part: Part, vocabulary: int) -> Part:
        """See TensorParallelComm; this rank holds all of it."""
        return part

    def output(self, part: Part) -> Part:
        """See TensorParallelComm."""
        return part

    def mlp(self, part: Part) -> Part:
        """See TensorParallelComm."""
        return DpAttentionMlp(part, self._group, self._places)
