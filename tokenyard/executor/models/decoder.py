"""The decoder that runs all supported architectures."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tokenyard.executor.attention.backend import AttentionBackend, AttentionSpec
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.delta_net import DeltaNetWeights, GatedDeltaNet
from tokenyard.executor.layers.fused import FusedKernels
from tokenyard.executor.layers.linear import Linear, Product
from tokenyard.executor.layers.mamba2 import Mamba2, Mamba2Weights
from tokenyard.executor.layers.mlp import GatedMlp, GroupedTopK, SharedExpert, SparseMoe, TopK
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.parallel import TensorParallelComm
from tokenyard.executor.layers.rotary import Rotary, rotate
from tokenyard.executor.layers.short_conv import ShortConv
from tokenyard.executor.models.config import DeltaNetConfig, Mamba2Config, ModelConfig, ShortConvConfig
from tokenyard.executor.models.latent_attention import LatentAttention
from tokenyard.executor.models.parts import EagleInput, experts_of, fused, fused_parts, gated_mlp, read_norm
from tokenyard.executor.models.shared_kv import (
    MlpAndExperts,
    PerLayerInputs,
    PerLayerOutput,
    SharedKvAttention,
    mlp_of_gemma4,
)
from tokenyard.executor.weights import Weights

MakeExperts = Callable[[ModelConfig, Weights, int], Product]


class Decoder:
    """A decoder-only transformer that runs batches of tokens of many rows at once.

    Weights are read by their Hugging Face names as the model is built; q, k and v are fused into one product, and so
    are gate and up. Raises ConfigError if a weight is missing or misshapen.

    tp_comm: given if this is one rank's part of a model (see `distributed.tensor_parallel`); config and weights are
    then those of the part.
    make_experts: makes the experts of a layer from config, weights and the layer's number, None for torch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        context_length: int,
        tp_comm: TensorParallelComm | None = None,
        make_experts: MakeExperts | None = None,
    ) -> None:
        self.config = config
        self.aux_layers: tuple[int, ...] = ()
        """Layers, rising, before which `forward` copies the residual stream; their number is for behind the last."""
        make_experts = make_experts or _experts
        embedding_shape = (config.vocab_part or config.vocab_size, config.hidden_size)
        tied = config.tied_embeddings
        if config.has_embedding or (config.has_lm_head and tied):
            table = weights.get("model.embed_tokens.weight", embedding_shape)
            self._embedding = table.__getitem__ if tp_comm is None else tp_comm.embedding(table)
            # In the dtype of the weights, as transformers has it.
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=table.dtype).item()
        self._ropes = [(rope, config.rope_dim(layer)) for layer, rope in enumerate(config.ropes)]
        self._rotary = {key: Rotary(*key, context_length, device) for key in dict.fromkeys(self._ropes)}
        self._per_layer = PerLayerInputs(config, weights) if config.per_layer_size else None
        self._layers = [_Layer(config, weights, index, tp_comm, make_experts) for index in range(config.num_layers)]
        self._hidden_like = weights.get(f"model.layers.0.{norm_names(config).before_mlp}.weight", (config.hidden_size,))
        windows = tuple(config.windows[layer] for layer in config.kv_layers)
        self.attention_spec = AttentionSpec(
            windows, config.score_scale, config.attention_softcap, _sinks(config, weights)
        )
        if not config.has_lm_head:
            return
        self._norm = read_norm(config, weights, "model.norm")
        head = Linear(table if tied else weights.get("lm_head.weight", embedding_shape))
        self._head: Product = head if tp_comm is None else tp_comm.head(head, config.vocab_size)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run the layers: [T, hidden]. Keys and values of the batch's tokens are in the pool afterwards."""
        x = self.embedded(batch.token_ids) if batch.hidden is None else batch.hidden
        cos_sin = {key: rotary.at(batch.positions) for key, rotary in self._rotary.items()}
        added = None if self._per_layer is None else self._per_layer(x, batch.token_ids)
        found = None
        kept: list[torch.Tensor] = []
        for index, (layer, rope) in enumerate(zip(self._layers, self._ropes, strict=True)):
            if index in self.aux_layers:
                # A copy, as a kernel may add to x where it lies.
                kept.append(x.clone() if found is None else x + found)
            x, found = layer(x, found, cos_sin[rope], batch, attention)
            if layer.ending is not None:
                x, found = layer.ending(x, found, None if added is None else added[:, index]), None
        x = x if found is None else x + found
        if self.aux_layers:
            last = (x,) if len(self._layers) in self.aux_layers else ()
            batch.aux_hidden_states = torch.cat((*kept, *last), dim=-1)
        return x

    def fuse(self, kernels: FusedKernels) -> None:
        """Compute norms, gates, and all from rotation to attention by these kernels, which attend as the attention
        backend given to `forward` does.
        """
        if self.config.has_lm_head:
            self._norm.fuse(kernels)
        for layer in self._layers:
            layer.fuse(kernels)

    def idle(self) -> None:
        """Compute this rank's share of each layer's MLP for the tokens of other ranks; this rank has none."""
        nothing = self.hidden_states(0)
        for layer in self._layers:
            layer.idle(nothing)

    def hidden_states(self, tokens: int) -> torch.Tensor:
        """Return memory for what `forward` returns for `tokens` tokens."""
        return self._hidden_like.new_empty(tokens, self.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states."""
        return self._hidden_like.dtype

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed int64[T]: [T, hidden]."""
        x = self.table_rows(token_ids)
        return x * self._embedding_scale if self._embedding_scale != 1.0 else x

    def table_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] of int64[T], the rows of the embedding as they are, which an EAGLE head reads."""
        return self._embedding(token_ids)

    def adapt(self, change: Callable[[int, str, Product], Product]) -> None:
        """Replace each layer's products qkv, output, gate_up and down, and mixer_in and mixer_out of one with a
        recurrent state, by `change(layer, name, product)`. Experts are left unchanged.
        """
        for layer in self._layers:
            layer.adapt(change)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Turn [rows, hidden] out of `forward` into float32[rows, vocabulary], in `out` where it is given."""
        return self.logits_of_normed(self.normed(hidden), out)

    def logits_of_normed(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same of what `normed` returns."""
        found = self._head(normed)
        found = found.float() if out is None else out.copy_(found)
        if self.config.logit_scale != 1.0:
            found.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        return found.div_(cap).tanh_().mul_(cap) if cap else found

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the last norm to [rows, hidden] out of `forward`."""
        return self._norm(hidden)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        index: int,
        tp_comm: TensorParallelComm | None,
        make_experts: MakeExperts,
    ) -> None:
        prefix = f"model.layers.{index}"
        self._index, self._scale = index, config.residual_scale
        self._attention_norm: RMSNorm | EagleInput
        if config.eagle is None:
            self._attention_norm = read_norm(config, weights, f"{prefix}.input_layernorm")
        else:
            self._attention_norm = EagleInput(config, weights, prefix)
        names = norm_names(config)
        self._mlp_norm = read_norm(config, weights, f"{prefix}.{names.before_mlp}")
        self._after_attention = (
            read_norm(config, weights, f"{prefix}.{names.after_attention}") if config.post_norms else None
        )
        self._after_mlp = read_norm(config, weights, f"{prefix}.{names.after_mlp}") if names.after_mlp else None
        self._attention: _Attention | None = None
        if index in config.attention_layers and not config.kv_sources and config.latent is None:
            self._attention = _Attention(config, weights, index, tp_comm)
        self._mixer = self._attention or _mixer(config, weights, index)
        self.ending = PerLayerOutput(config, weights, index) if config.layer_scalars else None
        mlp = _mlp(config, weights, index, make_experts)
        self._mlp: Product = mlp if tp_comm is None else tp_comm.mlp(mlp)
        self._gated = mlp if isinstance(mlp, GatedMlp) else None

    def fuse(self, kernels: FusedKernels) -> None:
        """See `Decoder.fuse`."""
        if self._attention is not None:
            self._attention.fuse(kernels)
        for norm in (self._attention_norm, self._mlp_norm, self._after_attention, self._after_mlp):
            if isinstance(norm, RMSNorm):
                norm.fuse(kernels)
        if self._gated is not None:
            self._gated.fuse(kernels)

    def idle(self, nothing: torch.Tensor) -> None:
        """See `Decoder.idle`."""
        self._mlp(nothing)

    def adapt(self, change: Callable[[int, str, Product], Product]) -> None:
        """See `Decoder.adapt`."""
        if isinstance(self._mixer, _Attention | _Recurrent):
            self._mixer.adapt(change)
        if isinstance(self._mlp, GatedMlp):
            self._mlp.gate_up = change(self._index, "gate_up", self._mlp.gate_up)
            self._mlp.down = change(self._index, "down", self._mlp.down)

    def __call__(
        self,
        x: torch.Tensor,
        found: torch.Tensor | None,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: the residual stream, without what the layer before found, so that its sum and its norm can be one kernel.
        Returns the same of this layer.
        """
        if isinstance(self._attention_norm, EagleInput):
            x, normed = self._attention_norm(x)
        elif found is None:
            normed = self._attention_norm(x)
        else:
            x, normed = self._attention_norm.plus(x, found)
        found = self._mixer(normed, cos_sin, batch, attention)
        if self._after_attention is not None:
            found = self._after_attention(found)
        if self._scale != 1.0:
            found = found * self._scale
        x, normed = self._mlp_norm.plus(x, found)
        found = self._mlp.both(x, normed) if isinstance(self._mlp, MlpAndExperts) else self._mlp(normed)
        if self._after_mlp is not None:
            found = self._after_mlp(found)
        return x, found * self._scale if self._scale != 1.0 else found


class _Attention:
    """Grouped-query attention of one layer: `_index` is its number in the model, `_place` among those with KV."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, tp_comm: TensorParallelComm | None) -> None:
        prefix = f"model.layers.{index}.self_attn"
        self._index, self._place = index, config.kv_layers.index(index)
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._gated = config.head_dim, config.output_gate
        self._qk_norm = _qk_norm(config, weights, prefix) if config.qk_norm else None
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        self._qkv: Product
        if self._gated:
            sizes[f"{prefix}.q_proj"] *= 2
            weight, bias = fused_parts(weights, sizes, config.attention_inputs, config.qkv_bias)
            weight = _gates_last(weight, config.num_heads, config.head_dim)
            bias = None if bias is None else _gates_last(bias, config.num_heads, config.head_dim)
            self._qkv = Linear(weight, bias)
        else:
            self._qkv = fused(weights, sizes, config.attention_inputs, config.qkv_bias)
        output = fused(weights, {f"{prefix}.o_proj": config.hidden_size}, q_size, config.output_bias)
        self._output: Product = output if tp_comm is None else tp_comm.output(output)
        self._kernels: FusedKernels | None = None

    def fuse(self, kernels: FusedKernels) -> None:
        """See `Decoder.fuse`."""
        self._kernels = kernels

    def adapt(self, change: Callable[[int, str, Product], Product]) -> None:
        """See `Decoder.adapt`."""
        self._qkv, self._output = change(self._index, "qkv", self._qkv), change(self._index, "output", self._output)

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        if not self._gated:
            return self._output(self._attend(qkv, cos_sin, batch, attention))
        qkv, gate = qkv[:, : -self._heads], qkv[:, -self._heads :]
        return self._output(self._attend(qkv.contiguous(), cos_sin, batch, attention) * gate.flatten(1).sigmoid())

    def _attend(
        self, qkv: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        if self._kernels is not None:
            weight, eps = (None, 0.0) if self._qk_norm is None else (self._qk_norm.weight, self._qk_norm.eps)
            return self._kernels.attend(self._place, qkv, weight, eps, cos_sin, batch)
        rotated = self._heads + self._kv_heads
        qk = qkv[:, :rotated]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotate(qk, cos_sin)
        return attention.forward(self._place, qk[:, : self._heads], qk[:, self._heads :], qkv[:, rotated:], batch)


def _mixer(config: ModelConfig, weights: Weights, index: int) -> "SharedKvAttention | LatentAttention | _Recurrent":
    """Return what a layer has in the place of `_Attention`."""
    if config.kv_sources:
        return SharedKvAttention(config, weights, index)
    if config.latent is not None:
        return LatentAttention(config, weights, index)
    return _Recurrent(config, weights, index)


class _Recurrent:
    """A layer with a recurrent state, which takes what attention takes."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        own = config.recurrent
        assert own is not None
        self._index, place = index, sorted(own.layers).index(index)
        self._net: GatedDeltaNet | Mamba2 | ShortConv
        if isinstance(own, DeltaNetConfig):
            self._net = self._delta_net(config, own, weights, index, place)
        elif isinstance(own, Mamba2Config):
            self._net = self._mamba2(config, own, weights, index, place)
        else:
            self._net = self._short_conv(config, own, weights, index, place)

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._net(x, batch)

    def adapt(self, change: Callable[[int, str, Product], Product]) -> None:
        """See `Decoder.adapt`."""
        self._net.inputs = change(self._index, "mixer_in", self._net.inputs)
        self._net.output = change(self._index, "mixer_out", self._net.output)

    @staticmethod
    def _short_conv(config: ModelConfig, own: ShortConvConfig, weights: Weights, index: int, place: int) -> ShortConv:
        prefix, hidden = f"model.layers.{index}.conv", config.hidden_size
        return ShortConv(
            place,
            fused(weights, {f"{prefix}.in_proj": 3 * hidden}, hidden, own.bias),
            _conv(weights, f"{prefix}.conv", own.channels, own.kernel),
            weights.get(f"{prefix}.conv.bias", (hidden,)) if own.bias else None,
            fused(weights, {f"{prefix}.out_proj": hidden}, hidden, own.bias),
        )

    @staticmethod
    def _mamba2(config: ModelConfig, own: Mamba2Config, weights: Weights, index: int, place: int) -> Mamba2:
        prefix, inner = f"model.layers.{index}.mamba", own.heads * own.head_dim
        found = Mamba2Weights(
            inputs=fused(
                weights, {f"{prefix}.in_proj": inner + own.channels + own.heads}, config.hidden_size, own.bias
            ),
            conv=_conv(weights, f"{prefix}.conv1d", own.channels, own.kernel),
            conv_bias=weights.get(f"{prefix}.conv1d.bias", (own.channels,)) if own.conv_bias else None,
            log_decay=weights.get(f"{prefix}.A_log", (own.heads,)),
            step_bias=weights.get(f"{prefix}.dt_bias", (own.heads,)),
            skip=weights.get(f"{prefix}.D", (own.heads,)),
            norm=weights.get(f"{prefix}.norm.weight", (inner,)),
            output=fused(weights, {f"{prefix}.out_proj": config.hidden_size}, inner, own.bias),
        )
        return Mamba2(own, place, found, config.norm_eps)

    @staticmethod
    def _delta_net(config: ModelConfig, net: DeltaNetConfig, weights: Weights, index: int, place: int) -> GatedDeltaNet:
        prefix = f"model.layers.{index}.linear_attn"
        values = net.value_heads * net.value_dim
        inputs = {"qkv": net.channels, "z": values, "b": net.value_heads, "a": net.value_heads}
        found = DeltaNetWeights(
            inputs=fused(
                weights, {f"{prefix}.in_proj_{name}": size for name, size in inputs.items()}, config.hidden_size, False
            ),
            conv=_conv(weights, f"{prefix}.conv1d", net.channels, net.kernel),
            log_decay=weights.get(f"{prefix}.A_log", (net.value_heads,)).float(),
            step_bias=weights.get(f"{prefix}.dt_bias", (net.value_heads,)).float(),
            norm=weights.get(f"{prefix}.norm.weight", (net.value_dim,)),
            output=fused(weights, {f"{prefix}.out_proj": config.hidden_size}, values, False),
        )
        return GatedDeltaNet(net, place, found, config.norm_eps)


def _conv(weights: Weights, name: str, channels: int, kernel: int) -> torch.Tensor:
    """Read the weights of a convolution of each channel: [kernel, channels]."""
    return weights.get(f"{name}.weight", (channels, 1, kernel)).squeeze(1).T.contiguous()


def _mlp(config: ModelConfig, weights: Weights, index: int, make_experts: MakeExperts) -> GatedMlp | Product:
    """Return the MLP of a layer, or its experts where the model has them."""
    if config.kv_sources:
        return mlp_of_gemma4(config, weights, index)
    if config.experts is None or index not in config.experts.layers:
        prefix = f"model.layers.{index}.mlp"
        return gated_mlp(config, weights, prefix, config.intermediate_size, config.mlp_bias)
    make_experts = make_experts if config.experts.plain else _experts
    routed, shared = make_experts(config, weights, index), config.experts.shared_size
    if not shared:
        return routed
    prefix = f"model.layers.{index}.mlp"
    gate = None
    if config.experts.shared_gated:
        gate = fused(weights, {f"{prefix}.shared_expert_gate": 1}, config.hidden_size, False)
    return SharedExpert(routed, gated_mlp(config, weights, f"{prefix}.shared_expert", shared, config.mlp_bias), gate)


def _experts(config: ModelConfig, weights: Weights, index: int) -> SparseMoe:
    prefix, experts = f"model.layers.{index}.mlp", config.experts
    assert experts is not None
    router = fused(weights, {f"{prefix}.gate": experts.count}, config.hidden_size, experts.bias)
    each = experts_of(config, weights, prefix)
    if experts.plain and config.latent is None:
        return SparseMoe(router, each, TopK(experts.active, experts.normed))
    # In float32, as transformers has it of DeepSeek, V2-Lite too, whose choice is plain.
    router = Linear(weights.get(f"{prefix}.gate.weight", (experts.count, config.hidden_size)).float())
    correction = None
    if experts.sigmoid:
        correction = weights.get(f"{prefix}.gate.e_score_correction_bias", (experts.count,)).float()
    return SparseMoe(lambda x: router(x.float()), each, GroupedTopK(experts, correction))


class NormNames(NamedTuple):
    """The checkpoint's names of a layer's norms after the first one; "" where there is none."""

    before_mlp: str
    after_attention: str = ""
    after_mlp: str = ""


def norm_names(config: ModelConfig) -> NormNames:
    """Return the names of a model's norms."""
    if config.post_norms:
        return NormNames("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    return NormNames("post_attention_layernorm")


def _sinks(config: ModelConfig, weights: Weights) -> tuple[torch.Tensor, ...]:
    """Return float32[heads] for each layer, () for a model without sinks."""
    if not config.sinks:
        return ()
    names = (f"model.layers.{layer}.self_attn.sinks" for layer in range(config.num_layers))
    return tuple(weights.get(name, (config.num_heads,)).float() for name in names)


def _qk_norm(config: ModelConfig, weights: Weights, prefix: str) -> RMSNorm:
    """Norm of query and key heads together: a weight per head, the same one for all of a kind."""
    q = weights.get(f"{prefix}.q_norm.weight", (config.head_dim,)).expand(config.num_heads, -1)
    k = weights.get(f"{prefix}.k_norm.weight", (config.head_dim,)).expand(config.num_kv_heads, -1)
    return RMSNorm(torch.cat((q, k)), config.norm_eps, config.norm_offset)


def _gates_last(rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Move the output gates to the end of the rows of q, k and v; a checkpoint has them after each head's query."""
    both = rows[: 2 * heads * head_dim].reshape(heads, 2, head_dim, *rows.shape[1:])
    return torch.cat((both[:, 0].flatten(0, 1), rows[2 * heads * head_dim :], both[:, 1].flatten(0, 1)))
