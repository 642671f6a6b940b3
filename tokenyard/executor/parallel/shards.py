"""A rank's part of a model: which heads, which columns and rows of its matrices (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are cut by outputs, o and down by inputs, so that a layer needs two sums over the ranks: one behind
the attention and one behind the MLP. Where there are fewer KV heads than ranks, ranks share one and each keeps a copy.
Embedding, norms, the head and routers of experts are whole at every rank that needs them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.backend import TorchModel
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.parallel.group import Group
from tokenyard.executor.parallel.part import Agree
from tokenyard.executor.weights import SafetensorsWeights, Weights

SINKS = "sinks"
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", SINKS)
BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """See ModelPart."""

    flag: ClassVar[str] = "--tp-size"
    takes_all: ClassVar[bool] = True

    rank: int
    size: int
    group: Group
    agree: Agree

    @property
    def layers_group(self) -> Group:
        """All ranks."""
        return self.group

    def config(self, whole: ModelConfig) -> ModelConfig:
        """See ModelPart."""
        self._check(whole)
        experts = whole.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=max(1, whole.num_kv_heads // self.size),
            intermediate_size=whole.intermediate_size // self.size,
            experts=experts,
        )

    def _check(self, whole: ModelConfig) -> None:
        size, kv = self.size, whole.num_kv_heads
        inner = {"intermediate_size": whole.intermediate_size}
        if whole.experts is not None:
            inner["moe_intermediate_size"] = whole.experts.intermediate_size
        for name, number in {"num_attention_heads": whole.num_heads, **inner}.items():
            if number % size:
                raise ConfigError(f"--tp-size {size} does not divide the model's {name} of {number}")
        if kv % size and size % kv:
            raise ConfigError(
                f"--tp-size {size} and the model's num_key_value_heads of {kv}: one must divide the other"
            )

    def weights(self, source: Weights, whole: ModelConfig) -> Weights:
        """See ModelPart."""
        return _ShardWeights(source, self, whole)

    def compute(self, model: TorchModel, batch: ForwardBatch, *, open_tokens: bool) -> None:
        """See ModelPart."""
        if open_tokens:
            batch.token_ids = self.group.from_first(batch.token_ids)
        model.layers(batch)


class _ShardWeights:
    def __init__(self, source: Weights, shard: Shard, whole: ModelConfig) -> None:
        self._source, self._shard = source, shard
        q_size, kv_size = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        self._sizes = {"q_proj": q_size, "o_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._sizes[SINKS] = whole.num_heads

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part, of `shape`, of the tensor `name`; see Weights."""
        product, kind = name.split(".")[-2:]
        if kind == "bias" and product in BY_INPUTS and self._shard.rank:
            # A sum has its bias once: rank 0 adds it.
            return torch.zeros_like(self._source.get(name, shape))
        if kind == SINKS:
            product = SINKS
        axis = 0 if product in BY_OUTPUTS else 1
        if product not in BY_OUTPUTS + BY_INPUTS or len(shape) <= axis:
            return self._source.get(name, shape)
        part = shape[axis]
        size = self._sizes.get(product, part * self._shard.size)
        # With fewer KV heads than ranks there are fewer parts than ranks, and neighbours have the same one.
        first = self._shard.rank * (size // part) // self._shard.size * part
        whole = (*shape[:axis], size, *shape[axis + 1 :])
        if isinstance(self._source, SafetensorsWeights):
            return self._source.get(name, whole, (axis, first, first + part))
        # Random, quantized and GGUF tensors are made whole one at a time; a copy lets go of the rest.
        return self._source.get(name, whole).narrow(axis, first, part).clone()
