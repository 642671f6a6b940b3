"""Whole steps by the native library: how far bfloat16 is from float64, and what a step may not depend on."""

import copy
import functools

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import greedy, judge, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native import library
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library
from tokenyard.executor.native.runtime import MAX_THREADS, choose_threads, pinned_cores, why_not

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)


def exact_logits(case, prompt):
    """Logits of the last position in float64, of a model whose weights are those that bfloat16 can hold."""
    # The judge's experts take no float64.
    model = copy.deepcopy(judge(case)).to(torch.float32 if "moe" in case else torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
        return model(torch.tensor([prompt])).logits[0, -1].double()


def load(folder, case, model_impl, dtype="bfloat16", **options):
    return load_executor(
        folder(case),
        dtype=dtype,
        device="cpu",
        max_total_tokens=1024,
        max_pool_rows=8,
        model_impl=model_impl,
        **options,
    )


def last_logits(executor, prompt, chunk=None):
    driver = Driver(executor)
    sequence = driver.start(prompt)
    while sequence.total - sequence.planned > (chunk or 1 << 30):
        driver.step((sequence, chunk))
    _, _, ticket = driver.launch((sequence, None), delay=True)
    return ticket.logits[0].double()


@pytest.mark.part(16)
@pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
@pytest.mark.parametrize(
    ("case", "chunk"),
    [("llama", 1), ("llama-odd", None), ("qwen2-window", 1), ("qwen3", None)],
    ids=["llama-decode", "llama-odd-prefill", "qwen2-window-decode", "qwen3-prefill"],
)
def test_bfloat16_is_near_float64(folder, monkeypatch, case, level, chunk):
    monkeypatch.setattr(LIBRARY, "level", level)
    prompt = prompt_of(45, seed=3)
    expected = exact_logits(case, prompt)
    own = last_logits(load(folder, case, "native"), prompt, chunk) - expected
    torchs = last_logits(load(folder, case, "torch"), prompt, chunk) - expected
    # Three layers of large random weights turn each rounding into a percent of the logits' spread.
    assert own.abs().max() < 0.3 * expected.std()
    assert own.pow(2).mean().sqrt() < 0.08 * expected.std()
    assert own.pow(2).mean().sqrt() < 1.7 * torchs.pow(2).mean().sqrt()


@pytest.mark.part(3)
@pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
@pytest.mark.parametrize(
    "case",
    [
        "llama-biases",
        "llama-odd",
        "mistral-window",
        "qwen3-layers",
        "qwen3-moe-mixed",
        "gpt-oss",
        "gemma2",
        "phi3-partial-window",
    ],
)
def test_every_instruction_set_computes_float32(folder, monkeypatch, case, level):
    monkeypatch.setattr(LIBRARY, "level", level)
    prompt = prompt_of(45, seed=3)
    with torch.inference_mode():
        expected = judge(case)(torch.tensor([prompt])).logits[0, -1].double()
    found = last_logits(load(folder, case, "native", "float32", threads=2), prompt, 20)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.part(3)
@pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3-layers", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_near_float64(folder, monkeypatch, case, level, dtype):
    monkeypatch.setattr(LIBRARY, "level", level)
    prompt = prompt_of(45, seed=3)
    expected = exact_logits(case, prompt)
    executor = load(folder, case, "native", dtype, quantization="int8")
    assert executor.info.kernels.startswith(f"int8 native {LEVELS[level]}")
    off = last_logits(executor, prompt, 20) - expected
    # Large random weights make of each rounding to a byte (half a percent of a row's largest) a few percent, and more
    # where a token goes to another expert.
    most = 0.3 if "moe" in case else 0.15
    assert 0.005 * expected.std() < off.pow(2).mean().sqrt() < most * expected.std()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe"])
def test_a_decode_is_the_same_bit_for_bit_in_any_batch(folder, case, dtype, quantization):
    driver = Driver(load(folder, case, "native", dtype, quantization=quantization))
    rows = [driver.start(prompt_of(length, seed=length)) for length in (5, 40, 90)]
    twin = driver.start(prompt_of(40, seed=40))
    for row in (*rows, twin):
        driver.prefill(row)
    _, _, alone = driver.launch((twin, 1), delay=True)
    _, sequences, together = driver.launch(*[(row, 1) for row in rows], delay=True)
    assert torch.equal(together.logits[sequences.index(rows[1])], alone.logits[0])


def test_poison_in_free_pages_and_outputs_reaches_no_answer(folder):
    driver = Driver(load(folder, "mistral-window", "native", "float32", page_size=4))
    prompt = prompt_of(60, seed=4)
    expected = driver.generate(driver.start(prompt), 6)
    poisoned = Driver(load(folder, "mistral-window", "native", "float32", page_size=4))
    poisoned.executor.kv_pool.tensor.fill_(float("nan"))
    sequence = poisoned.start(prompt)
    for _ in range(6):
        with torch.inference_mode():
            poisoned.executor.model.logits_buffer.fill_(float("nan"))
        poisoned.step((sequence, None))
    assert sequence.output == expected


def test_a_token_that_is_none_is_an_error(folder):
    driver = Driver(load(folder, "llama", "native", "float32"))
    good = driver.start(prompt_of(9, seed=1))
    driver.prefill(good)
    with pytest.raises(IndexError, match="not in the model's vocabulary"):
        driver.launch((driver.start([5, 10**6, 7]), None))
    assert driver.generate(good, 4) == greedy("llama", prompt_of(9, seed=1), 4)


def test_what_cannot_be_native_says_why(folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"native kernels cannot be used: .*float16"):
        load(folder, "llama", "native", "float16")
    assert load(folder, "llama", "auto", "float16").info.kernels.startswith("torch (native kernels compute in bfloat16")
    with pytest.raises(ConfigError, match="attends by itself"):
        load(folder, "llama", "native", attention_backend="gather")
    with pytest.raises(ConfigError, match=r"needs a native model; .* computed by torch \(native kernels compute"):
        load(folder, "llama", "auto", "float16", quantization="int8")
    with pytest.raises(ConfigError, match=r"int8 needs a native model; .* computed by torch$"):
        load(folder, "llama", "torch", attention_backend="gather", quantization="int8")
    with pytest.raises(ConfigError, match="quantization 'int4' is unknown; use none, int8"):
        load(folder, "llama", "auto", quantization="int4")
    with pytest.raises(ConfigError, match="model_impl 'fast' is unknown; use auto, torch, native"):
        load(folder, "llama", "fast")


@pytest.fixture
def fresh(monkeypatch):
    """Nothing was loaded yet. The library that other tests hold stays the process's."""
    monkeypatch.setattr(library, "load_once", functools.cache(library.load_once.__wrapped__))
    return monkeypatch


def test_without_a_compiler_torch_computes(folder, fresh, tmp_path, caplog):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(library, "PACKAGED", tmp_path)
    fresh.setenv("CXX", "no-such-compiler")
    executor = load(folder, "llama", "auto", "float32")
    assert executor.info.kernels.startswith("torch (the C++ compiler no-such-compiler could not be run")
    assert "\n" not in executor.info.kernels
    with pytest.raises(ConfigError, match="no-such-compiler"):
        load(folder, "llama", "native")


def test_a_failing_compiler_is_one_line(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(library, "PACKAGED", tmp_path)
    fresh.setenv("CXX", "false")
    with pytest.raises(NoLibraryError, match=r"^the C\+\+ compiler false failed: .*$"):
        load_library()
    with pytest.raises(NoLibraryError, match="failed"):
        load_library()


def test_a_library_that_is_none_is_refused(fresh, tmp_path):
    folder = tmp_path / "tokenyard"
    folder.mkdir()
    (folder / library.library_name()).write_bytes(b"not a library")
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(library, "PACKAGED", tmp_path)
    with pytest.raises(NoLibraryError, match="cannot be loaded"):
        load_library()


def test_kernels_of_another_cpu_are_refused(fresh):
    fresh.setenv(library.LEVEL_VARIABLE, "avx9")
    with pytest.raises(NoLibraryError, match="is 'avx9'; on this CPU it can be plain"):
        load_library()


@pytest.mark.parametrize(("given", "expected"), [("1", 1), ("0", None), ("many", None), ("-3", None), ("100000", None)])
def test_odd_numbers_of_threads_do_no_harm(monkeypatch, given, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = choose_threads(0)
    assert 1 <= found <= 4096
    assert expected is None or found == expected
    assert choose_threads(3) == 3
    assert choose_threads(10**9) == MAX_THREADS


def test_threads_that_are_ignored_are_named(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    choose_threads(0)
    assert "OMP_NUM_THREADS is 'many', which is no number of threads" in caplog.text


def test_threads_stay_where_openmp_keeps_them(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5, 9, 12})
    monkeypatch.delenv("OMP_PLACES", raising=False)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    assert pinned_cores(2) == ()
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert pinned_cores(2) == (3, 5)
    assert pinned_cores(5) == ()
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert pinned_cores(2) == ()


@pytest.mark.parametrize(("head_dim", "reason"), [(264, "up to 256"), (33, "even number"), (8, "")])
def test_heads_that_no_kernel_takes_say_why(head_dim, reason):
    found = why_not(torch.float32, head_dim, torch.device("cpu"))
    assert reason in found if reason else not found
