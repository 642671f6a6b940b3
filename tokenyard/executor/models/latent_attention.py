"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434), absorbed: all heads attend over latents."""

import torch

from tokenyard.executor.attention.backend import AttentionBackend
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.rotary import rotate
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.parts import fused
from tokenyard.executor.weights import Weights

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of others."""


class LatentAttention:
    """Attention of one layer as that of one KV head: a token's key is its latent and what all heads rotate, its value
    is the latent.

    The product from latents to keys is applied to queries, and the one to values to what attention finds. So prefixes
    are never expanded, and the KV pool has one vector for both.
    """

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix, latent = f"model.layers.{index}.self_attn", config.latent
        assert latent is not None
        self._latent, self._heads, self._rotated = latent, config.num_heads, config.head_dim
        self._place = config.kv_layers.index(index)
        self._query = _Queries(config, weights, prefix)
        inputs, bias, hidden = latent.kv_rank + config.head_dim, config.qkv_bias, config.hidden_size
        self._input = fused(weights, {f"{prefix}.kv_a_proj_with_mqa": inputs}, hidden, bias)
        self._norm = RMSNorm(weights.get(f"{prefix}.kv_a_layernorm.weight", (latent.kv_rank,)), LATENT_EPS)
        rows = config.num_heads * (latent.plain_dim + latent.value_dim)
        expand = weights.get(f"{prefix}.kv_b_proj.weight", (rows, latent.kv_rank))
        expand = expand.view(config.num_heads, -1, latent.kv_rank)
        self._to_keys = expand[:, : latent.plain_dim].contiguous()
        self._to_values = expand[:, latent.plain_dim :].mT.contiguous()
        values = config.num_heads * latent.value_dim
        self._output = fused(weights, {f"{prefix}.o_proj": hidden}, values, config.output_bias)

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        plain, rotated = torch.split(self._query(x), [self._latent.plain_dim, self._rotated], dim=-1)
        absorbed = torch.matmul(plain.transpose(0, 1), self._to_keys).transpose(0, 1)
        q = torch.cat((absorbed, self._rotate(rotated, cos_sin)), dim=-1)
        kept, rotated = torch.split(self._input(x), [self._latent.kv_rank, self._rotated], dim=-1)
        kv = torch.cat((self._norm(kept).unsqueeze(1), self._rotate(rotated.unsqueeze(1), cos_sin)), dim=-1)
        found = attention.forward(self._place, q, kv, kv, batch).view(len(x), self._heads, -1)
        found = torch.matmul(found[..., : self._latent.kv_rank].transpose(0, 1), self._to_values).transpose(0, 1)
        return self._output(found.flatten(1))

    def _rotate(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotate [tokens, heads, rotated]. Pairs are moved into halves: scores do not depend on the order."""
        if self._latent.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(x, cos_sin)


class _Queries:
    """The product, or the two with a norm between them, that make queries: [tokens, heads, plain and rotated]."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        latent = config.latent
        assert latent is not None
        self._heads, rows = config.num_heads, config.num_heads * (latent.plain_dim + config.head_dim)
        self._first: Product | None = None
        if not latent.q_rank:
            self._last = fused(weights, {f"{prefix}.q_proj": rows}, config.hidden_size, False)
            return
        self._first = fused(weights, {f"{prefix}.q_a_proj": latent.q_rank}, config.hidden_size, config.qkv_bias)
        self._norm = RMSNorm(weights.get(f"{prefix}.q_a_layernorm.weight", (latent.q_rank,)), LATENT_EPS)
        self._last = fused(weights, {f"{prefix}.q_b_proj": rows}, latent.q_rank, False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._first is not None:
            x = self._norm(self._first(x))
        return self._last(x).view(len(x), self._heads, -1)
