"""The small parts by themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.plans import chunk, decode
from tests.executor.tiny_models import greedy, prompt_of
from tokenyard.base import TokenyardError
from tokenyard.executor.attention.reference import PADDING_SHARE, PADDING_TOKENS, group_by_length
from tokenyard.executor.future_map import DelayedSamplingRows, FutureMap
from tokenyard.executor.layers.linear import Linear
from tokenyard.executor.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_a_product(dtype, rows, bias):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    shift = torch.randn(24, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    found = Linear(weight, shift)(x)
    expected = x.double() @ weight.double().T + (shift.double() if bias else 0.0)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_cpu_without_onednn_computes_the_same(make_driver, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.layers.linear.can_prepack", lambda weight: False)
    driver = make_driver("llama-biases")
    prompt = prompt_of(30, seed=1)
    assert driver.generate(driver.start(prompt), 5, chunk=16) == greedy("llama-biases", prompt, 5)


def test_norm_has_a_weight_per_head():
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(24.0).view(3, 8)
    expected = x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x), expected)
    torch.testing.assert_close(RMSNorm(weight[1], 1e-6)(x[:, 1]), expected[:, 1])


def test_future_map_fills_in_what_the_host_does_not_know():
    future = FutureMap(4, torch.device("cpu"))
    future.store(torch.tensor([3, 1]), torch.tensor([30, 10]))
    tokens = future.resolve(torch.tensor([7, -1, -1, 8]), torch.tensor([3, 3, 1, 1]))
    assert tokens.tolist() == [7, 30, 10, 8]


def test_no_step_reads_a_token_that_is_not_sampled_yet(make_driver):
    driver = make_driver("llama")
    first, second = (driver.start(prompt_of(5, seed=seed)) for seed in (1, 2))
    for sequence in (first, second):
        driver.prefill(sequence)
    flying = driver.launch((first, 1), delay=True)
    # Another row may continue.
    driver.step((second, 1))
    with pytest.raises(TokenyardError, match=rf"is launched before step {flying[0].step} was sampled"):
        driver.launch((first, 1))
    driver.executor.sample(flying[2])
    driver.collect(flying)
    first.in_flight, first.planned = 0, len(first.known) - 1
    driver.step((first, 1))


def test_a_restarted_row_does_not_wait_for_a_step_that_was_lost():
    unsampled = DelayedSamplingRows(4)
    unsampled.launch(decode(1, [2], [5], delay_sampling=True))
    unsampled.launch(chunk(2, 2, [7, 8, 9], 0, 3))
    unsampled.launch(decode(3, [2], [3]))


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=50), max_group_tokens=st.integers(1, 300_000))
def test_groups_hold_every_row_once_and_pad_little(lengths, max_group_tokens):
    groups = group_by_length(np.array(lengths), max_group_tokens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        members = [lengths[i] for i in group]
        assert max(members) - min(members) <= max(PADDING_TOKENS, PADDING_SHARE * max(members))
        assert len(members) == 1 or len(members) * max(members) <= max_group_tokens
