"""A mixture of experts by the native kernels: a layer is one call, and only experts that a token chose are read."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.models.config import ACTIVATIONS, ModelConfig
from tokenyard.executor.models.parts import fused_parts
from tokenyard.executor.native.library import DOWN, GATE_UP, ROUTER, NativeMoeLayers
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, check
from tokenyard.executor.weights import Weights


class ExpertProduct(NamedTuple):
    """A product of a layer of experts: ROUTER, GATE_UP or DOWN, of which expert, rows by name, and numbers of a row."""

    which: int
    expert: int
    outputs: dict[str, int]
    inputs: int


NO_MEMORY = "there is no memory for the packed weights; try a smaller model or --model-impl torch"


class NativeMoe:
    """A mixture of experts as `layers.mlp.SparseMoe` is one, laid out once for the library's products.

    Weights are read one after another, so that a second copy of the layer never lies in memory. Raises ConfigError if
    one is missing or misshapen or memory runs out.
    """

    def __init__(
        self, engine: NativeRuntime, dtype: torch.dtype, config: ModelConfig, weights: Weights, layer: int
    ) -> None:
        self._engine, self.functions = engine, engine.functions
        self.activations = engine.active_dtype(dtype)
        wanted = describe_moe(config, dtype)
        self.handle = self.functions.ty_experts_new(engine.pool, engine.level, ctypes.byref(wanted))
        if not self.handle:
            raise ConfigError(NO_MEMORY)
        assert config.experts is not None
        for product in expert_products(config, layer):
            found = fused_parts(weights, product.outputs, product.inputs, config.experts.bias)
            call = partial(self.functions.ty_experts_linear, self.handle, product.which, product.expert)
            with_addresses(call, *found)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.functions.ty_experts_free(self.handle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden], in the dtype of `x`."""
        given = x.to(self.activations).contiguous()
        found = torch.empty(x.shape, dtype=torch.float32)
        check(self.functions.ty_experts_run(self.handle, address(given), len(x), address(found)))
        return found.to(x.dtype)


def with_addresses(call: Callable[[int, int | None], None], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Call a function of the library that copies a weight and a bias, with their addresses."""
    weight = weight.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    call(address(weight), None if bias is None else address(bias))


def describe_moe(config: ModelConfig, dtype: torch.dtype, *, int8: bool = False) -> NativeMoeLayers:
    """Return the library's description of a model's layers of experts."""
    experts = config.experts
    assert experts is not None
    return NativeMoeLayers(
        dtype=DTYPES[dtype],
        int8=int8,
        hidden=config.hidden_size,
        inter=experts.intermediate_size,
        count=experts.count,
        active=experts.active,
        normed=experts.normed,
        gate=ACTIVATIONS.index(config.activation),
        gate_limit=config.gate_limit,
    )


def expert_products(config: ModelConfig, layer: int) -> Iterator[ExpertProduct]:
    """Yield a layer's router, then the products of its experts."""
    experts, prefix = config.experts, f"model.layers.{layer}.mlp"
    assert experts is not None
    hidden, inter = config.hidden_size, experts.intermediate_size
    yield ExpertProduct(ROUTER, 0, {f"{prefix}.gate": experts.count}, hidden)
    for expert in range(experts.count):
        own = f"{prefix}.experts.{expert}"
        yield ExpertProduct(GATE_UP, expert, {f"{own}.gate_proj": inter, f"{own}.up_proj": inter}, hidden)
        yield ExpertProduct(DOWN, expert, {f"{own}.down_proj": hidden}, inter)
