"""The description of a decoder in numbers and flags, which covers every supported family."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""In the order in which the native library numbers them."""
MAX_CONV = 16
"""Most tokens that a convolution of the native library sees."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model; `factor` and the fields after it are for the scaled kinds only.

    kind: one of ROPE_TYPES.
    share: the fraction of each head that is rotated, its first dimensions; the others are left unchanged.
    original_context: tokens of context the model was trained on before scaling.
    short_factors, long_factors: of longrope, one for each frequency.
    """

    kind: str = "default"
    theta: float = 10000.0
    share: float = 1.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts that replaces an MLP: the router chooses the `active` best of `count` experts for each
    token.

    intermediate_size: of one expert.
    normed: whether the weights of the chosen experts sum to one.
    layers: the layers that have experts; the others have an MLP.
    bias: whether router and experts have biases.
    shared_size: intermediate size of an expert that every token goes to, 0 for none.
    shared_gated: whether a sigmoid gate weights that expert.
    sigmoid: whether scores are sigmoids with a correction for the choice, in the place of a softmax (DeepSeek V3).
    groups, top_groups: experts are chosen of the best groups only; 1 of 1 for no groups.
    scale: the factor on the weights of the chosen experts.
    beside_mlp: whether layers with experts have an MLP too, and norms of both (Gemma 4).
    """

    count: int
    active: int
    intermediate_size: int
    normed: bool
    layers: frozenset[int]
    bias: bool = False
    shared_size: int = 0
    shared_gated: bool = True
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    beside_mlp: bool = False

    @property
    def plain(self) -> bool:
        """Whether experts are chosen by a softmax alone."""
        return not self.sigmoid and (self.groups, self.scale) == (1, 1.0)


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with a gated delta net, and so with a recurrent state, in the place of attention.

    layers: their numbers in the model.
    key_heads, value_heads: heads of queries and keys, and of values; each of the first serves several of the second.
    key_dim, value_dim: sizes of these heads.
    kernel: tokens that the convolution sees, the own one included.
    """

    plural: ClassVar = "gated delta nets"
    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Numbers per token that the convolution takes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of what a layer keeps of a row besides the convolution's last inputs."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Layers with Mamba-2 in the place of attention.

    layers, kernel: see DeltaNetConfig.
    heads, head_dim: of what is written to the state and read from it.
    groups: groups of heads that share how they write and read.
    state_size: numbers that the state keeps of each dimension of a head.
    bias, conv_bias: whether the products and the convolution have one.
    step_limits: bounds of the step size.
    """

    plural: ClassVar = "layers of Mamba-2"
    layers: frozenset[int]
    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    bias: bool
    conv_bias: bool
    step_limits: tuple[float, float]

    @property
    def channels(self) -> int:
        """Numbers per token that the convolution takes."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """See DeltaNetConfig."""
        return self.heads, self.head_dim, self.state_size


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Layers with a gated short convolution in the place of attention (LFM2); its last inputs are all they keep.

    layers, kernel: see DeltaNetConfig. channels: numbers per token. bias: whether products and convolution have one.
    """

    plural: ClassVar = "short convolutions"
    state_shape: ClassVar[tuple[int, ...]] = (0,)
    layers: frozenset[int]
    channels: int
    kernel: int
    bias: bool


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: what is kept of a token is one vector for all heads (DeepSeek).

    kv_rank: size of that vector, next to which the rotated part of keys is kept, which has the model's head_dim.
    q_rank: size of the vector between the two products of queries; 0 for one product.
    plain_dim: dimensions of a query that are not rotated. value_dim: of a value.
    interleaved: whether the checkpoint's rotated dimensions come in pairs, not in halves.
    """

    kv_rank: int
    q_rank: int
    plain_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What only the layer of an EAGLE head has.

    aux_layers: the layers of the target before which an EAGLE-3 head reads, rising; their number stands for behind the
        last. () for the first EAGLE, which reads what the output head does.
    draft_vocab_size: tokens that the head can draft.
    norm_before_residual: whether what an EAGLE-3 head has read is normed before it is the residual stream too.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary embedding, grouped-query attention and a gated MLP.

    windows: for each layer, how many tokens back (its own included) a token sees, 0 for all.
    global_head_dim, global_kv_heads: of layers without a window where these have others than head_dim and num_kv_heads,
        else 0.
    kv_sources: for each layer, the one whose keys and values it reads, itself for most; () for a model whose layers all
        have their own.
    k_eq_v: whether values are the keys' projection in layers without a window.
    v_norm: whether each head of values is normed.
    wide_shared_mlp: whether layers that read another one's keys and values have an MLP twice as wide.
    layer_scalars: whether a factor scales what each layer returns.
    per_layer_size, per_layer_vocab: of an embedding of which each layer adds a part to its output, 0 for none.
    local_rope: rope of layers with a window, None where it is the same as that of the others.
    attention_scale: the factor on scores, None for head_dim ** -0.5.
    attention_softcap, logit_softcap: caps of scores and logits by a tanh, 0 for none.
    sinks: whether each head has a score that joins the softmax and has no value.
    activation: one of ACTIVATIONS.
    gate_limit: the limit of clamped_swiglu.
    norm_offset: added to weights of norms.
    post_norms: whether a norm follows the attention and another one the MLP.
    residual_scale: the factor on what attention and MLP add to the residual stream.
    logit_scale: the factor on logits.
    output_gate: whether a sigmoid gates what attention finds, by numbers that q_proj gives after those of each head.
    latent: latent attention, None for a model that keeps keys and values.
    experts: None for a model without.
    recurrent: the layers with a recurrent state, None for a model whose layers all attend.
    eagle: what the layer of an EAGLE head has, None for other models.
    has_embedding, has_lm_head: a pipeline stage without embedding takes hidden states; one without head returns them.
    vocab_part: how many rows of embedding and head this rank has where ranks share them, 0 for all.
    eos_token_ids, dtype, quantization: what the checkpoint declares; dtype is "" where it declares none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: RopeConfig
    windows: tuple[int, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    global_head_dim: int = 0
    global_kv_heads: int = 0
    kv_sources: tuple[int, ...] = ()
    k_eq_v: bool = False
    v_norm: bool = False
    wide_shared_mlp: bool = False
    layer_scalars: bool = False
    per_layer_size: int = 0
    per_layer_vocab: int = 0
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sinks: bool = False
    activation: str = "silu"
    gate_limit: float = 0.0
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    output_gate: bool = False
    latent: LatentConfig | None = None
    experts: MoeConfig | None = None
    recurrent: DeltaNetConfig | Mamba2Config | ShortConvConfig | None = None
    eagle: EagleConfig | None = None
    has_embedding: bool = True
    has_lm_head: bool = True
    vocab_part: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    quantization: Mapping[str, Any] | None = None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV pool stores for one token, over all layers."""
        return sum(self.kv_values(layer) for layer in self.kv_layers)

    def kv_values(self, layer: int) -> int:
        """Numbers that the KV pool stores for one token in a layer of `kv_layers`."""
        return self.kv_planes * math.prod(self.kv_shape(layer))

    @property
    def kv_planes(self) -> int:
        """How many vectors of `kv_shape` a token has in a layer: keys and values, or latents, which are both."""
        return 1 if self.latent is not None else 2

    def rope_dim(self, layer: int) -> int:
        """Dimensions of the heads that are rotated in a layer."""
        return self.head_dim if self.latent is not None else self.kv_shape(layer)[1]

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """KV heads and their dimensions in a layer."""
        if self.latent is not None:
            return 1, self.latent.kv_rank + self.head_dim
        if self.windows[layer]:
            return self.num_kv_heads, self.head_dim
        return self.global_kv_heads or self.num_kv_heads, self.global_head_dim or self.head_dim

    @property
    def attention_inputs(self) -> int:
        """Numbers of a token that queries, keys and values are made of."""
        return self.hidden_size * (2 if self.eagle is not None and self.eagle.aux_layers else 1)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own, in the order of the KV pool."""
        if not self.kv_sources:
            return self.attention_layers
        return tuple(layer for layer in self.attention_layers if self.kv_sources[layer] == layer)

    @property
    def two_kv_shapes(self) -> bool:
        """Whether layers with a window have keys and values of another shape than those without."""
        return len({self.kv_shape(layer) for layer in self.kv_layers}) > 1

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend."""
        others = self.recurrent.layers if self.recurrent is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def torch_layers(self) -> str:
        """What this model has that only torch's layers compute; "" for nothing."""
        special = {
            "latent attention": self.latent,
            "layers that share keys and values": self.kv_sources,
            f"convolutions over more than {MAX_CONV} tokens": self.recurrent and self.recurrent.kernel > MAX_CONV,
        }
        return next((name for name, having in special.items() if having), "")

    @property
    def special_layers(self) -> str:
        """What this model has that ranks cannot divide; "" for nothing."""
        if self.recurrent is not None:
            return f"recurrent states ({self.recurrent.plural})"
        special = {
            "latent attention": self.latent,
            "layers that share keys and values": self.kv_sources,
            "gates of what attention finds": self.output_gate,
            "shared experts": self.experts is not None and self.experts.shared_size,
            "scales of residuals and logits": (self.residual_scale, self.logit_scale) != (1.0, 1.0),
        }
        return next((name for name, having in special.items() if having), "")

    @property
    def score_scale(self) -> float:
        """The factor on scores of queries and keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embedding of each layer."""
        local = self.local_rope or self.rope
        return tuple(local if window else self.rope for window in self.windows)
