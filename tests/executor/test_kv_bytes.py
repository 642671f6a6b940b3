"""Keys and values of one byte: how far they are from numbers, and that schedules, copies and features change none."""

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.packed_models import all_logits
from tests.executor.test_packed_features import crowded
from tests.executor.test_pieces import assert_copies_serve
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.kv_pool import KV_BYTES, SCALE_BYTES
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
DTYPE = pytest.mark.parametrize("kv", KV_BYTES)
MOST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
CASES = ["llama", "qwen3", "gemma2", "gpt-oss", "llama-odd"]


def load(path, kv="auto", dtype="float32", **options):
    options = {"max_total_tokens": 1024, "max_pool_rows": 8, "model_impl": "native", **options}
    return load_executor(path, device="cpu", dtype=dtype, kv_cache_dtype=kv, threads=1, **options)


def pool_after(executor, prompt):
    """Keys and values of a prompt, [layers, 2, tokens, heads, ...]."""
    driver = Driver(executor)
    sequence = driver.start(prompt)
    driver.prefill(sequence)
    return executor.kv_pool.tensor[:, :, sequence.pages[: len(prompt)]]


@DTYPE
@KERNELS
def test_bytes_are_those_that_torch_rounds_to(folder, monkeypatch, kv, level):
    """In the first layer, whose keys and values no rounding has reached yet."""
    monkeypatch.setattr(LIBRARY, "level", level)
    prompt = prompt_of(60, seed=3)
    exact = pool_after(load(folder("llama")), prompt)[0]
    found = pool_after(load(folder("llama"), kv), prompt)[0]
    scales = found[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    numbers = found[..., :-SCALE_BYTES].contiguous().view(KV_BYTES[kv]).float()
    top = exact.abs().amax(-1, keepdim=True)
    assert torch.allclose(scales, top / MOST[kv], rtol=1e-5)
    scaled = exact / scales
    expected = scaled.round() if kv == "int8" else scaled.clamp(-MOST[kv], MOST[kv]).to(KV_BYTES[kv]).float()
    # A number in the middle of two may become either, as instruction sets round what comes before differently.
    assert (numbers != expected).float().mean() < 0.002
    step = 1.0 if kv == "int8" else expected.abs() * (0.13 if kv == "fp8_e4m3" else 0.26) + 0.02
    assert ((numbers - expected).abs() <= step).all()


BOUNDS = {"int8": 1.6, "fp8_e4m3": 8.0, "fp8_e5m2": 15.0}
"""Errors of logits, in those of the same model in bfloat16."""


def distance(found, exact):
    return float((found - exact).square().mean().sqrt())


@DTYPE
@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_near(folder, monkeypatch, kv, level, dtype, case):
    """A prompt of many tokens attends to keys that are laid out for products, single tokens to bytes as they lie."""
    monkeypatch.setattr(LIBRARY, "level", level)
    prompt = prompt_of(90, seed=3)
    exact, executor = all_logits(load(folder(case)), prompt), load(folder(case), kv, dtype)
    of_bfloat16 = distance(all_logits(load(folder(case), dtype="bfloat16"), prompt), exact)
    whole = all_logits(executor, prompt)
    assert 0.0 < distance(whole, exact) < BOUNDS[kv] * of_bfloat16
    driver = Driver(executor)
    sequence = driver.start(prompt)
    driver.step((sequence, 80))
    for _ in range(9):
        driver.step((sequence, 1))
    _, _, ticket = driver.launch((sequence, 1), delay=True)
    assert distance(ticket.logits[0].double(), whole[-1]) < 0.2 * of_bfloat16


@DTYPE
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama", {}),
        ("qwen2-window", {"swa_full_tokens_ratio": 0.6, "max_total_tokens": 400}),
        ("qwen3-moe", {"draft_tokens": 4, "max_total_tokens": 400}),
    ],
    ids=["schedule", "windows", "drafts"],
)
def test_answers_do_not_depend_on_the_schedule(folder, kv, case, options):
    """Chunked, cached, retracted and drafted, bit for bit."""
    crowded(folder(case), every={"kv_cache_dtype": kv}, **options)


@DTYPE
def test_a_packed_model_and_a_draft_model_take_them(models, tmp_path, monkeypatch, kv):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, _ = models("llama", "Q4_K_M")
    counters = crowded(path, every={"kv_cache_dtype": kv}, draft_tokens=3, draft_model=path, max_total_tokens=400)
    assert counters.accepted_draft_tokens > 0


@DTYPE
@pytest.mark.parametrize("page_size", [1, 4])
def test_copies_of_pages_serve(folder, kv, page_size):
    """What the disk tier and PD move is the bytes with their scales."""
    executor = load(folder("llama"), kv, page_size=page_size, deterministic=True)
    assert_copies_serve(executor)
    heads, dim = 2, 12
    assert executor.info.kv_bytes_per_token == 3 * 2 * heads * (dim + SCALE_BYTES)
    assert executor.info.kernels.endswith(f", KV {kv}")


@pytest.mark.parametrize("options", [{"model_impl": "torch"}, {"model_impl": "auto", "attention_backend": "gather"}])
def test_torch_refuses_them(folder, options):
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs a native model"):
        load(folder("llama"), "int8", **options)


@DTYPE
def test_odd_numbers_are_not_hidden(folder, kv):
    """A value that is none stays none."""
    executor = load(folder("llama"), kv)
    driver = Driver(executor)
    sequence = driver.start(prompt_of(20, seed=3))
    driver.prefill(sequence)
    scale = torch.tensor([float("nan")]).view(torch.uint8)
    executor.kv_pool.tensor[0, 1, sequence.pages[5], :, -SCALE_BYTES:] = scale
    _, _, ticket = driver.launch((sequence, 1), delay=True)
    assert ticket.logits.isnan().all()
