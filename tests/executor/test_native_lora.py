"""Adapters in native steps: every instruction set against merged weights, and rows that do not see each other."""

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.lora_maker import merged, save_adapter
from tests.executor.tiny_models import prompt_of
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
RANKS = {1: 3, 2: 20, 3: 16}
"""Rank of each adapter: none is a whole number of vectors of every instruction set, and one is more than a vector."""


def load(folder, case, dtype, **options):
    return load_executor(
        folder(case),
        dtype=dtype,
        device="cpu",
        max_total_tokens=1024,
        max_pool_rows=12,
        model_impl="native",
        lora_slots=len(RANKS),
        lora_rank=max(RANKS.values()),
        **options,
    )


@pytest.fixture
def adapters(tmp_path):
    """Make adapters for a tiny model; returns their folders by number."""

    def make(case):
        # Single modules of other ranks, so that parts of one product differ.
        ranks = {"model.layers.0.self_attn.k_proj": 1, "model.layers.1.mlp.up_proj": 2}
        return {
            number: save_adapter(tmp_path / case / str(number), case, rank=rank, seed=number, ranks=ranks)
            for number, rank in RANKS.items()
        }

    return make


def driver_of(executor, folders):
    for number, path in folders.items():
        executor.load_adapter(f"a{number}", path)
    return Driver(executor)


def start(driver, prompt, number):
    return driver.start(prompt, adapter=(f"a{number}" if number else "", number))


def logits_of_all(driver, rows):
    """Logits of a step that computes all that is left of rows, in their order."""
    _, order, ticket = driver.launch(*((row, None) for row in rows), delay=True)
    logits = ticket.logits.clone()
    driver.executor.sample(ticket)
    return [logits[order.index(row)] for row in rows]


def exact(case, folder, number, prompt, dtype):
    """Logits of the last position of the merged model in float64, of base weights that `dtype` can hold."""
    base = merged(case, folder, lambda module, rank: 0.0).double().state_dict()
    # The scale is alpha over the module's own rank.
    model = merged(case, folder, lambda module, rank: 2.0 * RANKS[number] / rank).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(base[name].to(dtype).double() - base[name])
        return model(torch.tensor([prompt])).logits[0, -1]


@pytest.mark.part(6)
@KERNELS
@pytest.mark.parametrize("case", ["llama-odd", "llama-biases", "qwen3"])
def test_every_instruction_set_computes_adapters(folder, monkeypatch, adapters, case, level):
    monkeypatch.setattr(LIBRARY, "level", level)
    folders = adapters(case)
    driver = driver_of(load(folder, case, "float32", threads=2), folders)
    prompts = {number: prompt_of(40 + 3 * number, seed=number) for number in RANKS}
    rows = [start(driver, prompts[number], number) for number in RANKS]
    for row in rows[:2]:
        driver.step((row, 38))
    for number, found in zip(RANKS, logits_of_all(driver, rows), strict=True):
        expected = exact(case, folders[number], number, prompts[number], torch.float32)
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bfloat16_and_int8_with_adapters_are_near_float64(folder, monkeypatch, adapters, level, quantization):
    monkeypatch.setattr(LIBRARY, "level", level)
    folders, prompt = adapters("qwen3"), prompt_of(45, seed=3)
    driver = driver_of(load(folder, "qwen3", "bfloat16", quantization=quantization), folders)
    for number in RANKS:
        expected = exact("qwen3", folders[number], number, prompt, torch.bfloat16)
        (found,) = logits_of_all(driver, [start(driver, prompt, number)])
        off = (found.double() - expected).pow(2).mean().sqrt()
        assert off < (0.08 if quantization == "none" else 0.15) * expected.std()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_bit_for_bit_with_other_adapters(folder, adapters, dtype, quantization):
    driver = driver_of(load(folder, "llama-odd", dtype, quantization=quantization), adapters("llama-odd"))
    # Slots of rows side by side: runs of one adapter, of none, and singles.
    numbers = [1, 1, 1, 1, 1, 0, 2, 3, 0, 2]
    lengths = [7, 40, 3, 25, 9, 11, 30, 6, 41, 5]
    prompts = [prompt_of(length, seed=length) for length in lengths]
    rows = [start(driver, prompt, number) for prompt, number in zip(prompts, numbers, strict=True)]
    together = logits_of_all(driver, rows)
    decoded = logits_of_all(driver, rows)
    for row in rows:
        driver.retract(row)
    for prompt, number, both in zip(prompts, numbers, zip(together, decoded, strict=True), strict=True):
        row = start(driver, prompt, number)
        for found in both:
            assert torch.equal(logits_of_all(driver, [row])[0], found)
        driver.retract(row)
