"""Attention of gathered keys, in plain torch: two ways that give the same up to rounding.

Keys and values come head by head, [..., kv heads, keys, head_dim]. `SdpaAttention` calls torch's fused attention and is
for CUDA. `MatmulAttention` takes plain matrix products and is for CPUs: there the fused one took up to 3.5 times as
long and was at best 7% quicker (Zen 5, one thread, torch 2.13; decode of 1 to 32 rows, chunks of 512 tokens, float32
and bfloat16).
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from tokenyard.executor.attention.backend import AttentionSpec


class TorchAttention(Protocol):
    """A way to attend over gathered keys.

    plain_prefix: whether chunks without a mask may have more keys than queries.
    key_multiple: what the number of keys is a multiple of in decodes, and in chunks without a mask.
    """

    plain_prefix: bool
    key_multiple: int

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with one query per row: q [rows, heads, head_dim], k and v [rows, kv heads, keys, head_dim], mask
        [rows, 1, 1, keys] to add. Returns [rows, heads, head_dim].
        """

    def chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with the queries of one row: q [queries, heads, head_dim], k and v [kv heads, keys, head_dim], mask
        [queries, keys] to add. `start`: which key is the first query's own; the others' follow it. Without a mask each
        query sees all keys up to its own. Returns [queries, heads, head_dim].
        """


class SdpaAttention:
    """Attention by torch's fused kernel, as SGLang's torch_native backend has it.

    Query heads that share a key-value head need no copy of keys: in a decode they take the dimension of queries, in a
    chunk they are a batch dimension over which keys are expanded. It has neither soft caps nor sinks.
    """

    plain_prefix = False
    key_multiple = 1

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See TorchAttention."""
        rows, heads, head_dim = q.shape
        queries = q.view(rows, k.shape[1], -1, head_dim)
        found = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=self._scale)
        return found.reshape(rows, heads, head_dim)

    def chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See TorchAttention; without a mask `start` must be 0, with as many keys as queries."""
        queries, heads, head_dim = q.shape
        group = heads // len(k)
        found = F.scaled_dot_product_attention(
            q.reshape(queries, len(k), group, head_dim).permute(2, 1, 0, 3),
            k.expand(group, -1, -1, -1),
            v.expand(group, -1, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return found.permute(2, 1, 0, 3).reshape(queries, heads, head_dim)


class MatmulAttention:
    """Attention by matrix products, with the softmax in float32."""

    plain_prefix = True
    key_multiple = 64
    """Keys attend in whole blocks, so that a step needs few products of a shape that was not there before: for each of
    those oneDNN makes a kernel first, which took a decode of the demo model a fifth of its time."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See TorchAttention."""
        rows, heads, head_dim = q.shape
        queries = (q * self._spec.scale).view(rows, k.shape[1], -1, head_dim)
        scores = self._capped(torch.matmul(queries, k.transpose(2, 3)))
        if mask is not None:
            scores += mask
        weights = self._softmax(layer, scores, (1, k.shape[1], -1, 1)).to(q.dtype)
        return torch.matmul(weights, v).view(rows, heads, head_dim)

    def chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See TorchAttention. The queries whose own keys are in one block attend together."""
        queries, heads, head_dim = q.shape
        kv_heads, keys = k.shape[:2]
        group = heads // kv_heads
        scaled = (q * self._spec.scale).view(queries, kv_heads, group, head_dim)
        width = self.key_multiple
        causal = additive(torch.ones(width, width, device=q.device).tril_().bool(), q.dtype)
        out = torch.empty(queries, heads, head_dim, dtype=q.dtype, device=q.device)
        first = 0
        while first < queries:
            inside = (start + first) % width
            last = min(first + width - inside, queries)
            size, seen = last - first, min(start + first - inside + width, keys)
            block = scaled[first:last].permute(1, 2, 0, 3).reshape(kv_heads, group * size, head_dim)
            scores = self._capped(torch.matmul(block, k[:, :seen].transpose(1, 2))).view(kv_heads, group, size, seen)
            if mask is None:
                scores[..., -width:] += causal[inside : inside + size]
            else:
                scores += mask[first:last, :seen]
            weights = self._softmax(layer, scores, (kv_heads, group, 1, 1)).to(q.dtype)
            found = torch.matmul(weights.view(kv_heads, group * size, seen), v[:, :seen])
            by_head = found.view(kv_heads, group, size, head_dim).permute(2, 0, 1, 3)
            out[first:last] = by_head.reshape(size, heads, head_dim)
            first = last
        return out

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self._spec.softcap
        return scores.div_(cap).tanh_().mul_(cap) if cap else scores

    def _softmax(self, layer: int, scores: torch.Tensor, by_head: tuple[int, int, int, int]) -> torch.Tensor:
        """Softmax over the last of four dimensions, in float32; `by_head` is the shape to which sinks are viewed."""
        if not self._spec.sinks:
            return torch.softmax(scores, dim=-1, dtype=torch.float32)
        sinks = self._spec.sinks[layer].view(by_head).expand(*scores.shape[:-1], 1)
        return torch.cat((scores.float(), sinks), dim=-1).softmax(dim=-1)[..., :-1]


def choose_torch_attention(device: torch.device, spec: AttentionSpec) -> TorchAttention:
    """Return the fastest way on a kind of device that supports the spec."""
    return MatmulAttention(spec) if device.type == "cpu" or spec.softcap or spec.sinks else SdpaAttention(spec)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a bool mask of what is seen into one to add to scores."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
