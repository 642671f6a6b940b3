"""A rank's part of a model: which heads, which columns and rows of its matrices (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are cut by outputs, o and down by inputs, so that a layer needs two sums over the ranks: one behind
the attention and one behind the MLP. A rank keeps a copy of each KV head that its query heads attend to, which others
may have too; where these are not the same number for each KV head, it keeps several copies of some.
Embedding and head are cut by tokens of the vocabulary; norms and routers of experts are whole at every rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.distributed.partition import AgreePages, Range
from tokenyard.executor.distributed.process_group import ProcessGroup
from tokenyard.executor.formats.cuda_products import BLOCK, ScaledRows, ScaledSource, multiplies_packed
from tokenyard.executor.formats.packed import PackedBytes, PackedRows, PackedSource
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.parallel import AllReduceComm, DpAttentionComm, DpTokenRange, TensorParallelComm
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
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
    captures: ClassVar[bool] = True

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
        return shard_weights(source, self.rank, self.size, sizes, kv_heads(whole, self.rank, self.size))

    def compute(self, model: ModelBackend, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
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
    captures: ClassVar[bool] = False

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
        return shard_weights(source, self.rank, self.size, dict.fromkeys(OF_ATTENTION + OF_VOCABULARY, WHOLE))

    def compute(self, model: ModelBackend, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPartition; every rank samples, so only the layers are computed together."""
        assert isinstance(model, TorchModel)
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


class _Cut(NamedTuple):
    """Which part of a tensor a rank has: `pieces` (first, end) along `axis` of a tensor of shape `whole`, in order."""

    whole: tuple[int, ...]
    axis: int
    pieces: list[tuple[int, int]]


class _ShardWeights:
    """sizes: of products that do not follow from a part's, WHOLE for those that are not divided. kv: see `kv_heads`."""

    def __init__(self, source: Weights, rank: int, ranks: int, sizes: dict[str, int], kv: Sequence[int] = ()) -> None:
        self._source, self._rank, self._ranks, self._sizes, self._kv = source, rank, ranks, sizes, kv

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part, of `shape`, of the tensor `name`; see Weights."""
        product, kind = name.split(".")[-2:]
        cut = self._cut(name, shape)
        if kind == "bias" and product in BY_INPUTS and self._rank and self._sizes.get(product) != WHOLE:
            # The bias is added once to a sum over the ranks: by rank 0.
            return torch.zeros_like(self._source.get(name, shape))
        if cut is None:
            return self._source.get(name, shape)
        axis, first, end = cut.axis, cut.pieces[0][0], cut.pieces[-1][1]
        if isinstance(self._source, SafetensorsWeights):
            found = self._source.get(name, cut.whole, (axis, first, end))
        else:
            # Random, quantized and GGUF tensors are made whole one at a time; the clone frees the rest.
            found = self._source.get(name, cut.whole).narrow(axis, first, end - first).clone()
        if len(cut.pieces) > 1:
            return torch.cat([found.narrow(axis, low - first, high - low) for low, high in cut.pieces], dim=axis)
        # A vocabulary that the number of ranks does not divide is padded with tokens that never occur.
        missing = shape[axis] - (end - first)
        return torch.cat((found, found.new_zeros(missing, *shape[1:]))) if missing else found

    def _cut(self, name: str, shape: tuple[int, ...]) -> _Cut | None:
        """Return which part of a tensor this rank has, `shape` of it; None for one that is not divided."""
        product, kind = name.split(".")[-2:]
        product = SINKS if kind == SINKS else product
        axis = 0 if product in BY_OUTPUTS else 1
        if self._sizes.get(product) == WHOLE or product not in BY_OUTPUTS + BY_INPUTS or len(shape) <= axis:
            return None
        part = shape[axis]
        size = self._sizes.get(product, part * self._ranks)
        pieces = [(self._rank * part, min((self._rank + 1) * part, size))]
        if product in OF_KV:
            head_dim = part // len(self._kv)
            pieces = [(head * head_dim, (head + 1) * head_dim) for head in self._kv]
        return _Cut((*shape[:axis], size, *shape[axis + 1 :]), axis, pieces)


class _PackedShardWeights(_ShardWeights):
    """Those of a source whose matrices a CUDA device multiplies as they are packed: see ScaledSource and PackedSource.

    A part of a matrix stays packed where it consists of whole groups.
    """

    _source: ScaledSource

    @property
    def like(self) -> torch.Tensor:
        """See ScaledSource."""
        return self._source.like

    def scaled(self, name: str, shape: tuple[int, int]) -> ScaledRows | None:
        """See ScaledSource."""
        cut = self._cut(name, shape)
        if cut is None:
            return self._source.scaled(name, shape)
        found = self._source.scaled(name, (cut.whole[0], cut.whole[1]))
        if found is None:
            return None
        weight, scales = found.weight, found.scales
        by_block = scales.dim() == 2
        pieces = _units(cut, shape, BLOCK if by_block else 1)
        if pieces is None:
            return None
        if by_block or cut.axis == 0:
            scales = _taken(scales, cut.axis, pieces)
        # As bytes, since torch joins no fp8 on every device.
        return ScaledRows(_taken(weight.view(torch.uint8), cut.axis, cut.pieces).view(weight.dtype), scales)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        if not isinstance(self._source, PackedSource):
            return None
        cut = self._cut(name, shape)
        if cut is None:
            return self._source.packed(name, shape)
        found = self._source.packed(name, (cut.whole[0], cut.whole[1]))
        if found is None:
            return None
        pieces = _units(cut, shape, found.format.inputs if cut.axis else 1)
        if pieces is None or (cut.axis and found.order is not None):
            return None
        width = found.format.block_bytes if cut.axis else 1

        def read() -> PackedBytes:
            whole = found.read()
            places = np.concatenate([np.arange(low * width, high * width) for low, high in pieces])
            return np.take(whole, places, axis=cut.axis)

        return PackedRows(found.format, shape, read, found.order)


def _units(cut: _Cut, shape: tuple[int, int], unit: int) -> list[tuple[int, int]] | None:
    """Return the pieces of a cut in units; None where they are not whole, or do not fill the part of a rank."""
    if any(first % unit or end % unit for first, end in cut.pieces):
        return None
    if sum(end - first for first, end in cut.pieces) < shape[cut.axis]:
        return None
    return [(first // unit, end // unit) for first, end in cut.pieces]


def _taken(tensor: torch.Tensor, axis: int, pieces: list[tuple[int, int]]) -> torch.Tensor:
    """Return some pieces of a tensor, in memory of their own."""
    return torch.cat([tensor.narrow(axis, first, end - first) for first, end in pieces], dim=axis)


def shard_weights(
    source: Weights, rank: int, ranks: int, sizes: dict[str, int], kv: Sequence[int] = ()
) -> _ShardWeights:
    """Return a rank's part of the weights of `source`; see _ShardWeights."""
    kind = _PackedShardWeights if multiplies_packed(source) else _ShardWeights
    return kind(source, rank, ranks, sizes, kv)
