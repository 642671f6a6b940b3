"""A rank's part of a model: which heads, which columns and rows of its matrices (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are cut by outputs, o and down by inputs, so that a layer needs two sums over the ranks: one behind
the attention and one behind the MLP. Where there are fewer KV heads than ranks, ranks share one and each keeps a copy.
Embedding, norms, the head and routers of experts are whole at every rank that needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tokenyard.base import ConfigError, ExecutorInfo
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.parallel.group import Group
from tokenyard.executor.weights import SafetensorsWeights, Weights

SINKS = "sinks"
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", SINKS)
BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of the `size` ranks of a model. agree: compares what this rank has loaded with the others
    and returns it with the number of pages that all have.
    """

    rank: int
    size: int
    group: Group
    agree: Callable[[ExecutorInfo], ExecutorInfo]

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The part of a model that this rank computes, as a model. Raises ConfigError where it cannot be divided."""
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
        """This rank's part of the tensors of `source`, which are those of the whole model."""
        return _ShardWeights(source, self, whole)


def layers_only(model_impl: str) -> str:
    """What computes a part of a model: torch's layers, as sums over the ranks lie within a step. Raises ConfigError
    where whole steps by native kernels are asked for by name.
    """
    if model_impl == "native":
        raise ConfigError("--model-impl native computes whole steps and cannot be used with --tp-size; leave it out")
    return "torch"


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
