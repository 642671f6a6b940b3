"""The parts of a layer as a checkpoint names them: products, norms and MLPs."""

import torch

from tokenyard.executor.formats.cuda_experts import keeps_packed, packed_experts
from tokenyard.executor.formats.cuda_products import cuda_product
from tokenyard.executor.layers.grouped_experts import GroupedExperts, stacked
from tokenyard.executor.layers.grouped_experts import why_not as why_not_grouped
from tokenyard.executor.layers.linear import Linear, Product
from tokenyard.executor.layers.mlp import ExpertLoop, Experts, GatedMlp, gating
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.weights import Weights


def gated_mlp(config: ModelConfig, weights: Weights, prefix: str, inter: int, bias: bool) -> GatedMlp:
    """Read `prefix`.gate_proj, up_proj and down_proj of an MLP of intermediate size `inter`."""
    gate_up = {f"{prefix}.gate_proj": inter, f"{prefix}.up_proj": inter}
    down = fused(weights, {f"{prefix}.down_proj": config.hidden_size}, inter, bias)
    gated = gating(config.activation, config.gate_limit)
    return GatedMlp(fused(weights, gate_up, config.hidden_size, bias), down, gated)


def experts_of(config: ModelConfig, weights: Weights, prefix: str) -> Experts:
    """Read `prefix`.experts, each a gated MLP."""
    experts = config.experts
    assert experts is not None
    names = [f"{prefix}.experts.{expert}" for expert in range(experts.count)]
    inter, hidden, bias = experts.intermediate_size, config.hidden_size, experts.bias
    like = weights.get(f"{prefix.removesuffix('.mlp')}.input_layernorm.weight", (hidden,))
    gate_up = [{f"{name}.gate_proj": inter, f"{name}.up_proj": inter} for name in names]
    down = [{f"{name}.down_proj": hidden} for name in names]
    gated = gating(config.activation, config.gate_limit)
    both = (gate_up, hidden), (down, inter)
    if keeps_packed(like):
        packed = [
            packed_experts(weights, own, inputs, [fused_bias(weights, one) for one in own] if bias else (), like.device)
            for own, inputs in both
        ]
        if packed[0] is not None and packed[1] is not None:
            return GroupedExperts(packed[0], packed[1], gated)
    if why_not_grouped(config, like.device, like.dtype):
        return ExpertLoop([gated_mlp(config, weights, name, inter, bias) for name in names])
    found = [stacked(experts.count, (fused_parts(weights, one, inputs, bias) for one in own)) for own, inputs in both]
    return GroupedExperts(found[0], found[1], gated)


def read_norm(config: ModelConfig, weights: Weights, name: str, size: int = 0) -> RMSNorm:
    """Read the norm `name`, over `size` numbers, 0 for the hidden size."""
    return RMSNorm(weights.get(f"{name}.weight", (size or config.hidden_size,)), config.norm_eps, config.norm_offset)


def fused(weights: Weights, outputs: dict[str, int], inputs: int, bias: bool) -> Product:
    """One product in the place of several over the same input; see fused_parts. Packed where a CUDA device multiplies
    what the checkpoint has.
    """
    found = cuda_product(weights, outputs, inputs, fused_bias(weights, outputs) if bias else None)
    return found or Linear(*fused_parts(weights, outputs, inputs, bias))


def fused_parts(
    weights: Weights, outputs: dict[str, int], inputs: int, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of several products over the same input as of one; `outputs` maps names to sizes."""
    parts = [weights.get(f"{name}.weight", (size, inputs)) for name, size in outputs.items()]
    return parts[0] if len(parts) == 1 else torch.cat(parts), fused_bias(weights, outputs) if bias else None


def fused_bias(weights: Weights, outputs: dict[str, int]) -> torch.Tensor:
    """Return the bias of several products as of one."""
    biases = [weights.get(f"{name}.bias", (size,)) for name, size in outputs.items()]
    return biases[0] if len(biases) == 1 else torch.cat(biases)


class EagleInput:
    """What the layer of an EAGLE head has in the place of its first norm.

    The first EAGLE has no norm there. EAGLE-3 reads [T, 2 * hidden], the embedding of the token after each one and what
    was found at it: both are normed for attention, and the second one is the residual stream.
    """

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        assert config.eagle is not None
        self._both = bool(config.eagle.aux_layers)
        self._norm_before_residual = config.eagle.norm_before_residual
        if self._both:
            self._embedding_norm = read_norm(config, weights, f"{prefix}.input_layernorm")
            self._hidden_norm = read_norm(config, weights, f"{prefix}.hidden_norm")

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream, [T, hidden], and what attention reads."""
        if not self._both:
            return x, x
        embedded, hidden = x.chunk(2, dim=-1)
        normed = self._hidden_norm(hidden)
        read = torch.cat((self._embedding_norm(embedded), normed), dim=-1)
        return (normed if self._norm_before_residual else hidden.contiguous()), read
