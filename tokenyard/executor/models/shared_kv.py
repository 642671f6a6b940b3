"""The layers of Gemma 4: several share keys and values, heads have two sizes, and each layer has inputs of its own."""

import torch

from tokenyard.executor.attention.backend import AttentionBackend
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.grouped_experts import GroupedExperts, StackedProduct
from tokenyard.executor.layers.grouped_experts import why_not as why_not_grouped
from tokenyard.executor.layers.linear import Linear
from tokenyard.executor.layers.mlp import ExpertLoop, Experts, GatedMlp, SparseMoe, TopK, gating
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.rotary import rotate
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.parts import fused, gated_mlp, read_norm
from tokenyard.executor.weights import Weights


class SharedKvAttention:
    """Attention whose keys and values may be those of an earlier layer, and whose heads are normed, values too.

    A layer that reads another one's writes the same keys and values to the same slots again, so that attention backends
    need to know nothing of it.
    """

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix, self._source = f"model.layers.{index}.self_attn", config.kv_sources[index]
        self._place = config.kv_layers.index(self._source)
        self._heads, (self._kv_heads, self._head_dim) = config.num_heads, config.kv_shape(index)
        self._own = self._source == index
        q_size, kv_size = self._heads * self._head_dim, self._kv_heads * self._head_dim
        sizes = {f"{prefix}.q_proj": q_size}
        if self._own:
            sizes[f"{prefix}.k_proj"] = kv_size
            if not config.k_eq_v or config.windows[index]:
                sizes[f"{prefix}.v_proj"] = kv_size
            self._k_norm = read_norm(config, weights, f"{prefix}.k_norm", self._head_dim)
        self._v_norm = RMSNorm(
            torch.ones_like(weights.get(f"{prefix}.q_norm.weight", (self._head_dim,))), config.norm_eps
        )
        self._q_norm = read_norm(config, weights, f"{prefix}.q_norm", self._head_dim)
        self._inputs = fused(weights, sizes, config.hidden_size, config.qkv_bias)
        self._output = fused(weights, {f"{prefix}.o_proj": config.hidden_size}, q_size, config.output_bias)

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv = self._inputs(x).view(len(x), -1, self._head_dim)
        q = rotate(self._q_norm(qkv[:, : self._heads]), cos_sin)
        if self._own:
            k, v = qkv[:, self._heads : self._heads + self._kv_heads], qkv[:, -self._kv_heads :]
            batch.shared_kv[self._source] = rotate(self._k_norm(k), cos_sin), self._v_norm(v)
        return self._output(attention.forward(self._place, q, *batch.shared_kv[self._source], batch))


class PerLayerInputs:
    """What each layer is given of the tokens besides the residual stream: an embedding, and a product of the stream."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._shape = config.num_layers, config.per_layer_size
        width = config.num_layers * config.per_layer_size
        self._table = weights.get("model.embed_tokens_per_layer.weight", (config.per_layer_vocab, width))
        # In the dtype of the weights, as transformers has it.
        self._table_scale = torch.tensor(config.per_layer_size**0.5, dtype=self._table.dtype).item()
        self._product = fused(weights, {"model.per_layer_model_projection": width}, config.hidden_size, False)
        self._product_scale = config.hidden_size**-0.5
        self._norm = read_norm(config, weights, "model.per_layer_projection_norm", config.per_layer_size)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedded tokens [tokens, hidden] and their int64[tokens] -> [tokens, layers, per_layer_size]."""
        projected = self._norm((self._product(x) * self._product_scale).view(len(x), *self._shape))
        found: torch.Tensor = (projected + (self._table[token_ids] * self._table_scale).view_as(projected)) * 2.0**-0.5
        return found


class PerLayerOutput:
    """The end of a layer: its own inputs, gated by what it found, are added, and all is scaled."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix, size = f"model.layers.{index}", config.per_layer_size
        self._scalar = weights.get(f"{prefix}.layer_scalar", (1,))
        self._gated = gating(config.activation, 0.0)
        if size:
            self._gate = fused(weights, {f"{prefix}.per_layer_input_gate": size}, config.hidden_size, False)
            self._product = fused(weights, {f"{prefix}.per_layer_projection": config.hidden_size}, size, False)
            self._norm = read_norm(config, weights, f"{prefix}.post_per_layer_input_norm")

    def __call__(self, x: torch.Tensor, found: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        """x, found: [tokens, hidden], of a layer; added: [tokens, per_layer_size] of this layer, None for none."""
        x = x + found
        if added is not None:
            x = x + self._norm(self._product(self._gated(self._gate(x), added)))
        return x * self._scalar


class MlpAndExperts:
    """An MLP and a mixture of experts, each with norms: the experts and their router see the residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, mlp: GatedMlp) -> None:
        prefix, experts = f"model.layers.{index}", config.experts
        assert experts is not None
        self._mlp = mlp
        self._after_mlp, self._after_experts = (
            read_norm(config, weights, f"{prefix}.post_feedforward_layernorm_{which}") for which in (1, 2)
        )
        scale = weights.get(f"{prefix}.router.scale", (config.hidden_size,)) * config.hidden_size**-0.5
        router_norm = RMSNorm(scale, config.norm_eps)
        router = fused(weights, {f"{prefix}.router.proj": experts.count}, config.hidden_size, False)
        self._experts = SparseMoe(
            lambda x: router(router_norm(x)),
            _experts_of(config, weights, prefix),
            TopK(experts.active, experts.normed),
            before=read_norm(config, weights, f"{prefix}.pre_feedforward_layernorm_2"),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Not for these: they have two inputs; see `both`."""
        raise AssertionError("an MLP with experts beside it takes the residual stream too")

    def both(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the residual stream and of its norm -> [tokens, hidden]."""
        return self._after_mlp(self._mlp(normed)) + self._after_experts(self._experts(x))


def mlp_of_gemma4(config: ModelConfig, weights: Weights, index: int) -> GatedMlp | MlpAndExperts:
    """Return the MLP of a layer, with the experts beside it if the model has them."""
    wide = config.wide_shared_mlp and config.kv_sources[index] != index
    mlp = gated_mlp(
        config, weights, f"model.layers.{index}.mlp", config.intermediate_size * (2 if wide else 1), config.mlp_bias
    )
    return mlp if config.experts is None else MlpAndExperts(config, weights, index, mlp)


def _experts_of(config: ModelConfig, weights: Weights, prefix: str) -> Experts:
    """Read the experts of a layer; the factor on what each gives is in its last product."""
    experts, gated = config.experts, gating(config.activation, config.gate_limit)
    assert experts is not None
    hidden, inter = config.hidden_size, experts.intermediate_size
    gate_up = weights.get(f"{prefix}.experts.gate_up_proj", (experts.count, 2 * inter, hidden))
    down = weights.get(f"{prefix}.experts.down_proj", (experts.count, hidden, inter))
    factors = weights.get(f"{prefix}.router.per_expert_scale", (experts.count,))
    if not why_not_grouped(config, down.device, down.dtype):
        return GroupedExperts(StackedProduct(gate_up), StackedProduct(down * factors[:, None, None]), gated)
    return ExpertLoop(
        [
            GatedMlp(Linear(gate_up[expert]), Linear(down[expert] * factors[expert]), gated)
            for expert in range(experts.count)
        ]
    )
