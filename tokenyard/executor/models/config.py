"""The description of a decoder in numbers and flags, which covers every supported family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""In the order in which the native library numbers them."""


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
    shared_size: intermediate size of an expert that every token goes to, with a sigmoid gate; 0 for none.
    """

    count: int
    active: int
    intermediate_size: int
    normed: bool
    layers: frozenset[int]
    bias: bool = False
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with a gated delta net, and so with a recurrent state, in the place of attention.

    layers: their numbers in the model.
    key_heads, value_heads: heads of queries and keys, and of values; each of the first serves several of the second.
    key_dim, value_dim: sizes of these heads.
    kernel: tokens that the convolution sees, the own one included.
    """

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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMSNorm, rotary embedding, grouped-query attention and a gated MLP.

    windows: for each layer, how many tokens back (its own included) a token sees, 0 for all.
    local_rope: rope of layers with a window, None where it is the same as that of the others.
    attention_scale: the factor on scores, None for head_dim ** -0.5.
    attention_softcap, logit_softcap: caps of scores and logits by a tanh, 0 for none.
    sinks: whether each head has a score that joins the softmax and has no value.
    activation: one of ACTIVATIONS.
    gate_limit: the limit of clamped_swiglu.
    norm_offset: added to weights of norms.
    post_norms: whether a norm follows the attention and another one the MLP.
    output_gate: whether a sigmoid gates what attention finds, by numbers that q_proj gives after those of each head.
    experts: None for a model without.
    delta_net: None for a model whose layers all attend.
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
    output_gate: bool = False
    experts: MoeConfig | None = None
    delta_net: DeltaNetConfig | None = None
    has_embedding: bool = True
    has_lm_head: bool = True
    vocab_part: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    quantization: Mapping[str, Any] | None = None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV pool stores for one token, over all layers."""
        return 2 * len(self.attention_layers) * self.num_kv_heads * self.head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend and so have KV."""
        others = self.delta_net.layers if self.delta_net is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    @property
    def score_scale(self) -> float:
        """The factor on scores of queries and keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embedding of each layer."""
        local = self.local_rope or self.rope
        return tuple(local if window else self.rope for window in self.windows)
