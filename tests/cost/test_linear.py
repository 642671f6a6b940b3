import json

import pytest

from tokenyard.base import ConfigError, StepWork
from tokenyard.cost import (
    LinearCost,
    LinearTerms,
    Link,
    find_profile,
    get_profile,
    load_profile,
    profile_names,
    save_profile,
    unloaded_prefill_s,
)

TERMS = {
    "step_ms": 1.0,
    "floor_ms": 5.6,
    "dense_ms": 2.88,
    "token_ms": 0.02021,
    "context_ms": 4.9e-5,
    "area_ms": 1.3e-6,
}


def h100() -> LinearCost:
    return get_profile("h100", "llama-3-8b").cost()


def test_decode_step_stands_on_the_floor_until_tokens_outweigh_it():
    small = StepWork(tokens=8, rows=8, decode_rows=8, decode_context=8000)
    large = StepWork(tokens=1000, rows=1000, decode_rows=1000, decode_context=0)
    assert h100().step(small) == pytest.approx((1.0 + 5.6 + 8000 * 4.9e-5) / 1000)
    assert h100().step(large) == pytest.approx((1.0 + 2.88 + 20.21) / 1000)


def test_unloaded_prefill_of_85000_tokens_takes_6_46_seconds():
    assert unloaded_prefill_s(h100(), 85_000) == pytest.approx(6.46, abs=0.005)


def test_unloaded_prefill_of_a_prompt_of_nothing_is_zero():
    assert unloaded_prefill_s(h100(), 0) == 0.0


def test_chunk_tokens_is_the_largest_chunk_within_the_budget():
    terms = h100().terms
    for prefix in (0, 100, 50_000):
        for budget_ms in (0.5, 7.0, 120.0):
            tokens = terms.chunk_tokens(prefix, budget_ms)
            assert terms.chunk_ms(prefix, tokens) <= budget_ms + 1e-9
            assert terms.chunk_ms(prefix, tokens + 1) > budget_ms - 1e-9
    assert terms.chunk_tokens(0, -1.0) == 0


def test_chunk_tokens_without_attention_cost():
    terms = LinearTerms(1.0, 0.0, 0.0, 0.5, 0.0, 0.0)
    assert terms.chunk_tokens(1000, 10.0) == 20


def test_tensor_parallel_terms_add_per_step_and_per_token():
    plain = LinearTerms(1.0, 2.0, 3.0, 0.1, 0.0, 0.0)
    parallel = LinearTerms(1.0, 2.0, 3.0, 0.1, 0.0, 0.0, tp_step_ms=0.7, tp_token_ms=0.01)
    work = StepWork(tokens=100, rows=1)
    assert parallel.step(work) - plain.step(work) == pytest.approx(0.7 + 1.0)


def test_copy_takes_latency_and_bytes_and_refuses_unknown_links():
    cost = LinearCost(h100().terms, {"host": Link(bytes_per_s=1e9, latency_s=0.5)})
    assert cost.copy(2_000_000_000, "host") == pytest.approx(2.5)
    with pytest.raises(ConfigError, match="no link 'moon'"):
        cost.copy(1, "moon")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "5", True])
def test_bad_terms_are_refused(bad):
    with pytest.raises(ConfigError, match="area_ms"):
        LinearTerms.from_mapping({**TERMS, "area_ms": bad}, "profile.json")


def test_missing_and_unknown_terms_are_named():
    with pytest.raises(ConfigError, match=r"profile\.json.*lacks area_ms"):
        LinearTerms.from_mapping({key: value for key, value in TERMS.items() if key != "area_ms"}, "profile.json")
    with pytest.raises(ConfigError, match="unknown terms aera_ms"):
        LinearTerms.from_mapping({**TERMS, "aera_ms": 1.0}, "profile.json")


def test_a_device_without_any_cost_is_refused():
    with pytest.raises(ConfigError, match="no time"):
        LinearTerms(0.0, 0.0, 0.0, 0.0, 1.0, 1.0)


def test_the_reference_profile_has_the_reference_numbers():
    profile = get_profile("H100", "Llama-3-8B")
    assert profile.terms == LinearTerms(**TERMS)
    assert (profile.kv_pool_tokens, profile.page_size) == (427_000, 16)


def test_h200_reads_memory_faster_and_computes_alike():
    h100_terms, h200_terms = get_profile("h100", "llama-3-8b").terms, get_profile("h200", "llama-3-8b").terms
    assert h200_terms.floor_ms == pytest.approx(0.7 * h100_terms.floor_ms)
    assert h200_terms.token_ms == h100_terms.token_ms


def test_every_built_in_profile_answers_and_says_where_it_is_from():
    for name in profile_names():
        device, model = name.split("/")
        profile = get_profile(device, model)
        assert profile.source
        assert profile.cost().step(StepWork(tokens=1, rows=1)) > 0.0


def test_an_unknown_profile_lists_the_known_ones():
    with pytest.raises(ConfigError, match="h100/llama-3-8b"):
        get_profile("h100", "gpt-5")


def test_a_profile_survives_its_file(tmp_path):
    profile = get_profile("h100", "llama-3-70b")
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    assert find_profile(str(tmp_path / "profile.json")) == profile
    assert find_profile("h100/llama-3-70b") == profile


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not a cost profile"),
        ('{"version": 9}', "version 1"),
        ('{"version": 1, "device": "x"}', "lacks terms"),
        (json.dumps({"version": 1, "device": "x", "terms": TERMS}), "expected fields"),
    ],
)
def test_a_broken_profile_file_is_one_clear_line(tmp_path, text, complaint):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_profile(path)
    assert "\n" not in caught.value.message
