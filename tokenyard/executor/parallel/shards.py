"""A rank's part of a model: which heads, which columns and rows of its matrices (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are cut by outputs, o and down by inputs, so that a layer needs two sums over the ranks: one behind
the attention and one behind the MLP. Where there are fewer KV heads than ranks, ranks share one and each keeps a copy.
Embedding and head are cut by tokens of the vocabulary; norms and routers of experts are whole at every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.summed import GatheredMlps, Joint, Places, SummedLayers
from tokenyard.executor.models.backend import TorchModel
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.parallel.group import Group
from tokenyard.executor.parallel.part import Agree
from tokenyard.executor.parallel.steps import Range
from tokenyard.executor.weights import SafetensorsWeights, Weights

SINKS = "sinks"
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", SINKS, "embed_tokens", "lm_head")
BY_INPUTS = ("o_proj", "down_proj")
OF_VOCABULARY = ("embed_tokens", "lm_head")
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", SINKS)
WHOLE = -1


@dataclass(frozen=True, slots=True)
class Shard:
    """See ModelPart."""

    flag: ClassVar[str] = "--tp-size"
    takes_all: ClassVar[bool] = True
    within_rank: ClassVar[bool] = True

    rank: int
    size: int
    group: Group
    agree: Agree

    @property
    def joint(self) -> Joint:
        """Sums behind the attention and behind the MLP."""
        return SummedLayers(self.group, self.rank)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPart."""
        self._check(whole)
        return replace(
            thinner(whole, self.size),
            num_heads=whole.num_heads // self.size,
            num_kv_heads=max(1, whole.num_kv_heads // self.size),
            vocab_part=-(-whole.vocab_size // self.size),
        )

    def _check(self, whole: ModelConfig) -> None:
        size, kv = self.size, whole.num_kv_heads
        inner = inner_sizes(whole)
        check_divisible(size, {"num_attention_heads": whole.num_heads, **inner})
        if (size - 1) * -(-whole.vocab_size // size) >= whole.vocab_size:
            raise ConfigError(f"--tp-size {size} is too many for the model's vocab_size of {whole.vocab_size}")
        if kv % size and size % kv:
            raise ConfigError(
                f"--tp-size {size} and the model's num_key_value_heads of {kv}: one must divide the other"
            )

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPart."""
        return _ShardWeights(source, self.rank, self.size, attention_sizes(whole) | vocabulary_sizes(whole))

    def compute(self, model: TorchModel, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPart."""
        if open_tokens:
            batch.token_ids = self.group.from_first(batch.token_ids)
        model.step(batch)
        for first, end in ranges:
            model.logits(first, end)


@dataclass(frozen=True, slots=True)
class MlpShard:
    """See ModelPart. All of the attention, and a share of what follows it: a data-parallel rank that attends for
    requests of its own. places: where its tokens stand in a step.
    """

    flag: ClassVar[str] = "--enable-dp-attention"
    takes_all: ClassVar[bool] = True
    within_rank: ClassVar[bool] = False

    rank: int
    size: int
    group: Group
    agree: Agree
    places: Places

    @property
    def joint(self) -> Joint:
        """Sums before and behind the MLP."""
        return GatheredMlps(self.group, self.places)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPart."""
        check_divisible(self.size, inner_sizes(whole))
        return thinner(whole, self.size)

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPart."""
        return _ShardWeights(source, self.rank, self.size, dict.fromkeys(OF_ATTENTION + OF_VOCABULARY, WHOLE))

    def compute(self, model: TorchModel, batch: ForwardBatch, ranges: Sequence[Range], *, open_tokens: bool) -> None:
        """See ModelPart; every rank samples, so only the layers are computed together."""
        model.layers(batch)


def inner_sizes(whole: ModelConfig) -> dict[str, int]:
    """Sizes of the MLPs of a model by their names in config.json."""
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
    """A model with MLPs of a share of the size."""
    experts = whole.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(whole, intermediate_size=whole.intermediate_size // size, experts=experts)


def attention_sizes(whole: ModelConfig) -> dict[str, int]:
    """Sizes of what is divided of an attention: with fewer KV heads than ranks they do not follow from a part's."""
    q_size, kv_size = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
    return {"q_proj": q_size, "o_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, SINKS: whole.num_heads}


def vocabulary_sizes(whole: ModelConfig) -> dict[str, int]:
    """Sizes of embedding and head, which the number of ranks need not divide."""
    return dict.fromkeys(OF_VOCABULARY, whole.vocab_size)


class _ShardWeights:
    """sizes: of products that do not follow from a part's, WHOLE for those that are not divided."""

    def __init__(self, source: Weights, rank: int, ranks: int, sizes: dict[str, int]) -> None:
        self._source, self._rank, self._ranks, self._sizes = source, rank, ranks, sizes

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part, of `shape`, of the tensor `name`; see Weights."""
        product, kind = name.split(".")[-2:]
        if self._sizes.get(SINKS if kind == SINKS else product) == WHOLE:
            return self._source.get(name, shape)
        if kind == "bias" and product in BY_INPUTS and self._rank:
            # A sum has its bias once: rank 0 adds it.
            return torch.zeros_like(self._source.get(name, shape))
        if kind == SINKS:
            product = SINKS
        axis = 0 if product in BY_OUTPUTS else 1
        if product not in BY_OUTPUTS + BY_INPUTS or len(shape) <= axis:
            return self._source.get(name, shape)
        part = shape[axis]
        size = self._sizes.get(product, part * self._ranks)
        # With fewer KV heads than ranks there are fewer parts than ranks, and neighbours have the same one.
        first = self._rank * part if product in OF_VOCABULARY else self._rank * (size // part) // self._ranks * part
        whole = (*shape[:axis], size, *shape[axis + 1 :])
        end = min(first + part, size)
        if isinstance(self._source, SafetensorsWeights):
            found = self._source.get(name, whole, (axis, first, end))
        else:
            # Random, quantized and GGUF tensors are made whole one at a time; a copy lets go of the rest.
            found = self._source.get(name, whole).narrow(axis, first, end - first).clone()
        # A vocabulary that the number of ranks does not divide is filled up with tokens that never come.
        return found if end - first == part else torch.cat((found, found.new_zeros(first + part - end, *shape[1:])))
