"""What torch's `varlen_attn_out` computes, in the dtype of its queries, where there is no Flash Attention."""

import inspect
from itertools import pairwise

import torch
from torch.nn.attention import varlen

REAL = inspect.signature(varlen.varlen_attn_out)


def pretend_varlen(monkeypatch):
    """Put it in the place of torch's; returns the list that calls are added to, as (rows, longest, window)."""
    calls = []

    def fake(*given, **named):
        bound = REAL.bind(*given, **named)
        bound.apply_defaults()
        own = bound.arguments
        assert own["cu_seq_q"].dtype == own["cu_seq_k"].dtype == torch.int32
        assert own["enable_gqa"]
        assert own["num_splits"] == 1
        assert {own[name] for name in ("seqused_k", "block_table", "return_aux")} == {None}
        ends = own["cu_seq_q"].tolist()
        assert own["max_q"] == own["max_k"] == max(b - a for a, b in pairwise(ends))
        assert len(own["query"]) == len(own["key"]) == len(own["value"]) == ends[-1]
        calls.append((len(ends) - 1, own["max_q"], own["window_size"]))
        left, right = own["window_size"]
        group = own["query"].shape[1] // own["key"].shape[1]
        for first, end in pairwise(ends):
            q, k, v = (own[name][first:end].transpose(0, 1) for name in ("query", "key", "value"))
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            ahead = torch.arange(end - first)[None, :] - torch.arange(end - first)[:, None]
            seen = (ahead <= right) & (ahead >= -left) if left >= 0 else ahead <= right
            scores = (q @ k.transpose(1, 2) * own["scale"]).masked_fill(~seen, -torch.inf)
            own["out"][first:end] = (scores.softmax(-1) @ v).transpose(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn_out", fake)
    return calls
