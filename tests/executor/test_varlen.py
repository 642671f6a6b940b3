"""Prompts by torch's varlen attention: which rows it is given, what it is called with, and when it is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from tests.executor.fake_varlen import pretend_varlen
from tests.executor.meta_device import GPU, Watch, pretend_driver
from tokenyard.base import ConfigError
from tokenyard.executor import backend_choice
from tokenyard.executor.attention.backend import AttentionSpec
from tokenyard.executor.attention.triton import available
from tokenyard.executor.attention.varlen import attend_prompts, prompt_runs, why_not
from tokenyard.executor.layer_loader import read_folder_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
COUNTS = np.array([30, 4, 17, 40, 9, 21])
FRESH = np.array([True, False, True, True, False, True])
FIRSTS = np.cumsum(COUNTS) - COUNTS


def test_rows_without_a_prefix_are_attended_to_in_runs():
    runs = prompt_runs(FIRSTS, COUNTS, FRESH, CPU)
    assert [(run.first, run.end, run.offsets.tolist(), run.longest) for run in runs] == [
        (0, 30, [0, 30], 30),
        (34, 91, [0, 17, 57], 40),
        (100, 121, [0, 21], 21),
    ]
    assert prompt_runs(FIRSTS, COUNTS, FRESH & False, CPU) == []


@pytest.mark.parametrize("window", [0, 12])
def test_prompts_attend_as_they_do_one_by_one(monkeypatch, window):
    calls = pretend_varlen(monkeypatch)
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim = int(COUNTS.sum()), 6, 2, 16
    # Parts of one product, of which the last dimension alone is whole; and a pool whose other slots are no numbers.
    q = torch.randn(tokens, heads + 4, head_dim)[:, :heads]
    slots = torch.randperm(3 * tokens)[:tokens]
    keys, values = torch.full((2, 3 * tokens, kv_heads, head_dim), float("nan")).unbind()
    keys[slots], values[slots] = torch.randn(2, tokens, kv_heads, head_dim).unbind()
    out, spec = torch.full((tokens, heads, head_dim), 7.0), AttentionSpec((0, window), 0.3)
    runs = prompt_runs(FIRSTS, COUNTS, FRESH, CPU)
    for run in runs:
        attend_prompts(run, q, keys, values, slots, 1, spec, out)
    for first, count, fresh in zip(FIRSTS, COUNTS, FRESH, strict=True):
        own = slice(first, first + count)
        if not fresh:
            assert (out[own] == 7.0).all()
            continue
        k, v = (side[slots[own]].double().repeat_interleave(3, 1).transpose(0, 1) for side in (keys, values))
        ahead = torch.arange(count)[None, :] - torch.arange(count)[:, None]
        seen = (ahead <= 0) & (ahead > -window) if window else ahead <= 0
        scores = (q[own].double().transpose(0, 1) @ k.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(out[own].double(), (scores.softmax(-1) @ v).transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert calls == [(len(run.offsets) - 1, run.longest, (window - 1 if window else -1, 0)) for run in runs]


def test_torch_takes_the_call_and_nothing_waits(folder, monkeypatch):
    """The installed torch's own function, on tensors without data: its operation is called as it says."""
    pretend_driver(monkeypatch, read_folder_config(Path(folder("llama"))), 1)
    q = torch.empty(121, 6, 64, dtype=torch.bfloat16, device=GPU)
    keys = torch.empty(2, 300, 2, 64, dtype=torch.bfloat16, device=GPU)
    slots, out = torch.empty(121, dtype=torch.int64, device=GPU), torch.empty_like(q)
    with torch.inference_mode(), Watch():
        for run in prompt_runs(FIRSTS, COUNTS, FRESH, GPU):
            attend_prompts(run, q, keys[0], keys[1], slots, 0, AttentionSpec((12,), 0.3), out)


def test_what_it_cannot_serve_is_said(folder, monkeypatch):
    config, half = replace(read_folder_config(Path(folder("llama"))), head_dim=64), torch.bfloat16
    assert why_not(CUDA, half, config) == ""
    assert "needs a CUDA device, not cpu" in why_not(CPU, half, config)
    assert "not float32" in why_not(CUDA, torch.float32, config)
    assert "no attention sinks and no cap" in why_not(CUDA, half, replace(config, sinks=True))
    assert "no attention sinks and no cap" in why_not(CUDA, half, replace(config, attention_softcap=50.0))
    assert "up to 256 dimensions" in why_not(CUDA, half, replace(config, head_dim=264))

    def older(out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        raise AssertionError

    monkeypatch.setattr(torch_varlen, "varlen_attn_out", older)
    assert "no varlen_attn_out with enable_gqa, num_splits" in why_not(CUDA, half, config)
    monkeypatch.delattr(torch_varlen, "varlen_attn_out")
    assert "no varlen_attn_out" in why_not(CUDA, half, config)


def test_it_is_chosen_by_name_alone(folder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(available, "installed", lambda: True)
    config = replace(read_folder_config(Path(folder("llama"))), head_dim=64)

    def choose(prefill, attention="triton", kv="auto", device=CUDA):
        return backend_choice.choose_backends(
            *("torch", attention, "none", config, torch.bfloat16, device, 1),
            kv_cache_dtype=kv,
            prefill_attention_backend=prefill,
        )

    assert not choose("auto").varlen
    assert choose("varlen").varlen
    assert choose("varlen").kernels.endswith("prompts varlen")
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        choose("flash")
    with pytest.raises(ConfigError, match="next to attention by Triton, and this model's steps are computed by torch"):
        choose("varlen", attention="gather")
    with pytest.raises(ConfigError, match="KV of one byte"):
        choose("varlen", kv="int8")
