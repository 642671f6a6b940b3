"""A rank's part of a model: which heads, which columns and rows of its matrices (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are cut by outputs, o and down by inputs, so that a layer needs two sums over the ranks: one behind
the attention and one behind the MLP. A rank keeps a copy of each KV head that its query heads attend to, which others
may have too; where these are not the same number for each KV head, it keeps several copies of some.
Embedding and head are cut by tokens of the vocabulary; norms and routers of experts are whole at every rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.distributed.partition import AgreePages, Range
from tokenyard.executor.distributed.process_group import ProcessGroup
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.parallel import AllReduceComm, DpAttentionComm, DpTokenRange, TensorParallelComm
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.weights import SafetensorsWeights, Weights

SINKS = "sinks"
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", SINKS, "embed_tokens", "lm_head")
BY_INPUTS = ("o_proj", "down_proj")
OF_KV = ("k_proj", "v_proj")
OF_VOCABULARY = ("embed_tokens", "lm_head")
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", SINKS)
WHOLE = -1


@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """See ModelPartition."""

    flag: ClassVar[str] = "--tp-size"
    takes_all: ClassVar[bool] = True
    within_rank: ClassVar[bool] = True

    rank: int
    size: int
    group: ProcessGroup
    agree: AgreePages

    @property
    def tp_comm(self) -> TensorParallelComm:
        """Sums after the attention and after the MLP."""
        return AllReduceComm(self.group, self.rank)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPartition."""
        self._check(whole)
        return replace(
            thinner(whole, self.size),
            num_heads=whole.num_heads // self.size,
            num_kv_heads=len(kv_heads(whole, self.rank, self.size)),
            vocab_part=-(-whole.vocab_size // self.size),
        )

    def _check(self, whole: ModelConfig) -> None:
        size = self.size
        inner = inner_sizes(whole)
        check_divisible(size, {"num_attention_heads": whole.num_heads, **inner})
        if (size - 1) * -(-whole.vocab_size // size) >= whole.vocab_size:
            raise ConfigError(f"--tp-size {size} is too many for the model's vocab_size of {whole.vocab_size}")

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPartition."""
        sizes = dict.fromkeys(OF_VOCABULARY, whole.vocab_size)
        sizes |= dict.fromkeys(OF_KV, whole.num_kv_heads * whole.head_dim)
        return _ShardWeights(source, self.rank, self.size, sizes, kv_heads(whole, self.rank, self.size))

    def compute(self, model: TorchModel, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPartition."""
        if open_tokens:
            batch.token_ids = self.group.broadcast_from_rank0(batch.token_ids)
        model.step(batch)
        for first, end in ranges:
            model.logits(first, end)


@dataclass(frozen=True, slots=True)
class DpAttentionShard:
    """See ModelPartition. A data-parallel rank with the whole attention, for its own requests, and a share of each MLP.

    places: the range of its tokens in a step.
    """

    flag: ClassVar[str] = "--enable-dp-attention"
    takes_all: ClassVar[bool] = True
    within_rank: ClassVar[bool] = False

    rank: int
    size: int
    group: ProcessGroup
    agree: AgreePages
    places: DpTokenRange

    @property
    def tp_comm(self) -> TensorParallelComm:
        """Sums before and after the MLP."""
        return DpAttentionComm(self.group, self.places)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPartition."""
        check_divisible(self.size, inner_sizes(whole))
        return thinner(whole, self.size)

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPartition."""
        return _ShardWeights(source, self.rank, self.size, dict.fromkeys(OF_ATTENTION + OF_VOCABULARY, WHOLE))

    def compute(self, model: TorchModel, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPartition; every rank samples, so only the layers are computed together."""
        model.layers(batch)


def inner_sizes(whole: ModelConfig) -> dict[str, int]:
    """Return the sizes of the MLPs of a model by their names in config.json."""
    inner = {"intermediate_size": whole.intermediate_size}
    if whole.experts is not None:
        inner["moe_intermediate_size"] = whole.experts.intermediate_size
    return inner


def check_divisible(size: int, numbers: dict[str, int]) -> None:
    """Raise ConfigError for the first number that `size` ranks cannot share."""
    for name, number in numbers.items():
        if number % size:
            raise ConfigError(f"--tp-size {size} does not divide the model's {name} of {number}")


def thinner(whole: ModelConfig, size: int) -> ModelConfig:
    """Return the model with MLPs of 1 / `size` of their width."""
    experts = whole.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(whole, intermediate_size=whole.intermediate_size // size, experts=experts)


def kv_heads(whole: ModelConfig, rank: int, size: int) -> list[int]:
    """Return for each KV head of a rank which one of the whole model it is, in order; some may appear more than once.

    Kernels expect that all KV heads of a rank serve equally many of its query heads. The largest such number divides
    both the query heads of a rank and those of a group.
    """
    heads, group = whole.num_heads // size, whole.num_heads // whole.num_kv_heads
    return [head // group for head in range(rank * heads, (rank + 1) * heads, math.gcd(heads, group))]


class _ShardWeights:
    """sizes: of products that do not follow from a part's, WHOLE for those that are not divided. kv: see `kv_heads`."""

    def __init__(self, source: Weights, rank: int, ranks: int, sizes: dict[str, int], kv: Sequence[int] = ()) -> None:
        self._source, self._rank, self._ranks, self._sizes, self._kv = source, rank, ranks, sizes, kv

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part, of `shape`, of the tensor `name`; see Weights."""
        product, kind = name.split(".")[-2:]
        if self._sizes.get(SINKS if kind == SINKS else product) == WHOLE:
            return self._source.get(name, shape)
        if kind == "bias" and product in BY_INPUTS and self._rank:
            # The bias is added once to a sum over the ranks: by rank 0.
            return torch.zeros_like(self._source.get(name, shape))
        if kind == SINKS:
            product = SINKS
        axis = 0 if product in BY_OUTPUTS else 1
        if product not in BY_OUTPUTS + BY_INPUTS or len(shape) <= axis:
            return self._source.get(name, shape)
        part = shape[axis]
        size = self._sizes.get(product, part * self._ranks)
        first, end = self._rank * part, min((self._rank + 1) * part, size)
        if product in OF_KV:
            head_dim = part // len(self._kv)
            first, end = self._kv[0] * head_dim, (self._kv[-1] + 1) * head_dim
        whole = (*shape[:axis], size, *shape[axis + 1 :])
        if isinstance(self._source, SafetensorsWeights):
            found = self._source.get(name, whole, (axis, first, end))
        else:
            # Random, quantized and GGUF tensors are made whole one at a time; the clone frees the rest.
            found = self._source.get(name, whole).narrow(axis, first, end - first).clone()
        if product in OF_KV:
            heads = [head - self._kv[0] for head in self._kv]
            return found.view(-1, head_dim, *shape[1:])[heads].view(shape)
        # A vocabulary that the number of ranks does not divide is padded with tokens that never occur.
        return found if end - first == part else torch.cat((found, found.new_zeros(first + part - end, *shape[1:])))
