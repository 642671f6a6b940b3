"""Rows with LoRA adapters give what the model with the merged weights gives, whatever other rows are in the step."""

import copy
import math

import numpy as np
import pytest
import torch

from tests.executor.lora_maker import logits_of, merged, modules_of, save_adapter
from tests.executor.tiny_models import judge, logits, prompt_of
from tokenyard.base import TokenyardError
from tokenyard.executor.lora_config import PROJECTIONS

SLOTS = 4
BACKENDS = ("gather", "attention", "native")


def close(found, expected):
    """Within 1e-5 of the largest logit."""
    found = found.cpu()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


def plain(module, rank):
    return 2.0


def last_logits(driver, sequence, chunk=None):
    """Logits behind the prompt, computed in chunks."""
    while chunk is not None and sequence.planned + chunk < len(sequence.known):
        driver.step((sequence, chunk))
    launched = driver.launch((sequence, None), delay=True)
    logits = launched[2].logits[-1]
    driver.executor.sample(launched[2])
    driver.collect(launched)
    return logits


@pytest.fixture
def lora_driver(make_driver, tmp_path):
    """A driver over a model with adapters 1 to 3 loaded, and their merged models."""

    def make(case="llama", *, rank=8, **options):
        driver = make_driver(case, lora_slots=SLOTS, lora_rank=rank, **options)
        models = {}
        for number, own in ((1, 8), (2, 3), (3, 5)):
            folder = save_adapter(tmp_path / str(number), case, rank=own, seed=number)
            driver.executor.load_adapter(f"a{number}", folder)
            models[number] = merged(case, folder, plain)
        return driver, models

    return make


@pytest.mark.part(4)
@pytest.mark.parametrize("case", ["llama", "llama-biases", "qwen3-layers", "mistral-window"])
def test_logits_are_those_of_merged_weights(lora_driver, backend, case):
    driver, models = lora_driver(case, page_size=4, **backend)
    prompt = prompt_of(41, seed=2)
    for number, chunk in ((1, None), (2, 16), (3, 1)):
        expected = logits_of(models[number], prompt)[-1]
        close(last_logits(driver, driver.start(prompt, adapter=(f"a{number}", number)), chunk), expected)
        assert not torch.allclose(expected, logits(case, prompt)[-1], atol=0.1)
    close(last_logits(driver, driver.start(prompt)), logits(case, prompt)[-1])


@pytest.mark.parametrize("long", [5, 90])
def test_rows_with_several_adapters_and_none_do_not_see_each_other(lora_driver, backend, long):
    # Chunks and decodes of four kinds in each step; with long chunks each adapter's tokens are a separate product.
    driver, models = lora_driver(**backend)
    wanted = {0: (None, 7), 1: (models[1], long), 2: (models[2], 4), 3: (models[3], long + 2)}
    prompts = {number: prompt_of(length, seed=number) for number, (_, length) in wanted.items()}
    # Slots in another order than adapters, one of them left out.
    slots = {1: 4, 2: 1, 3: 2}
    rows = {
        number: driver.start(prompt, adapter=(f"a{number}" if number else "", slots.get(number, 0)))
        for number, prompt in prompts.items()
    }
    for number in (2, 0):
        driver.step((rows[number], len(prompts[number]) - 1))
    plan, order, ticket = driver.launch(*((row, None) for row in rows.values()), delay=True)
    assert plan.decode_rows == 2
    for place, sequence in enumerate(order):
        number = next(number for number, row in rows.items() if row is sequence)
        model = wanted[number][0]
        expected = logits("llama", prompts[number]) if model is None else logits_of(model, prompts[number])
        close(ticket.logits[place], expected[-1])


def test_a_slot_takes_another_adapter_for_the_rows_that_start_then(lora_driver, backend):
    driver, models = lora_driver(**backend)
    prompt = prompt_of(20, seed=4)
    for number in (1, 2, 3, 1):
        sequence = driver.start(prompt, adapter=(f"a{number}", 1))
        close(last_logits(driver, sequence), logits_of(models[number], prompt)[-1])
        driver.retract(sequence)
    with pytest.raises(TokenyardError, match="not loaded"):
        driver.step((driver.start(prompt, adapter=("unknown", 1)), None))


def test_rows_sample_at_several_positions(lora_driver, backend):
    driver, models = lora_driver(**backend)
    prompt = prompt_of(30, seed=5)
    sequence = driver.start(prompt, adapter=("a2", 3))
    driver.step((sequence, 26))
    plan = driver.plan([(sequence, 4)])
    plan.samples, plan.delay_sampling = np.array([4], dtype=np.int32), True
    close(driver.executor.launch(plan).logits, logits_of(models[2], prompt)[-4:])


@pytest.mark.parametrize("root", [False, True])
def test_scales_and_ranks_of_single_modules(make_driver, tmp_path, backend, root):
    case, ranks = "llama", {"model.layers.1.mlp.down_proj": 7, "model.layers.0.self_attn.q_proj": 2}
    fields = {"use_rslora": root, "alpha_pattern": {"o_proj": 3, "layers.2.mlp.up_proj": 20}}
    folder = save_adapter(tmp_path / "a", case, rank=4, ranks=ranks, lora_alpha=6, **fields)
    alphas = {
        name: 3 if name.endswith("o_proj") else 20 if name.endswith("2.mlp.up_proj") else 6
        for name in modules_of(case, ["o_proj", "up_proj", "q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"])
    }

    def scale(module, rank):
        return alphas[module] / (math.sqrt(rank) if root else rank)

    driver = make_driver(case, lora_slots=1, lora_rank=7, **backend)
    driver.executor.load_adapter("a", folder)
    prompt = prompt_of(33, seed=6)
    found = last_logits(driver, driver.start(prompt, adapter=("a", 1)))
    close(found, logits_of(merged(case, folder, scale), prompt)[-1])


def test_an_alpha_of_zero_switches_an_adapter_off(make_driver, tmp_path, backend):
    driver = make_driver("llama", lora_slots=1, lora_rank=4, **backend)
    driver.executor.load_adapter("a", save_adapter(tmp_path / "a", "llama", lora_alpha=0))
    prompt = prompt_of(12, seed=6)
    close(last_logits(driver, driver.start(prompt, adapter=("a", 1))), logits("llama", prompt)[-1])


@pytest.mark.parametrize(("case", "model_impl"), [("qwen3-moe", "auto"), ("llama", "torch"), ("llama", "auto")])
def test_an_adapter_of_some_modules_alone_leaves_the_others(make_driver, tmp_path, case, model_impl):
    driver = make_driver(case, lora_slots=2, lora_rank=4, model_impl=model_impl, attention_backend="auto")
    # What the slot held before changed all modules.
    for number, targets in enumerate((PROJECTIONS[:4] if case == "qwen3-moe" else PROJECTIONS, ("k_proj", "o_proj"))):
        folder = save_adapter(tmp_path / str(number), case, targets=targets, seed=number)
        driver.executor.load_adapter(f"a{number}", folder)
        prompt = prompt_of(30, seed=7)
        found = last_logits(driver, driver.start(prompt, adapter=(f"a{number}", 2)))
        close(found, logits_of(merged(case, folder, plain), prompt)[-1])


LINEAR = {
    **dict.fromkeys(("qwen3.5", "qwen3.5-moe"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "lfm2": ("in_proj", "out_proj", "w1", "w2", "w3"),
    "granite-hybrid": ("in_proj", "out_proj", "input_linear", "output_linear"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "granite": (),
}
"""The names that families have for linear modules besides Llama's."""


@pytest.mark.parametrize("case", LINEAR)
def test_every_linear_module_of_other_families_takes_adapters(make_driver, tmp_path, case):
    """As peft's `all-linear` has them, in chunks, in rows with and without."""
    driver = make_driver(case, lora_slots=2, lora_rank=4, attention_backend="auto", model_impl="torch", page_size=4)
    targets = (*PROJECTIONS[: 4 if case in ("qwen3.5-moe", "qwen3-next") else 7], *LINEAR[case])
    folder = save_adapter(tmp_path / "a", case, targets=targets)
    changed = {name.rpartition(".")[2] for name in modules_of(case, targets)}
    assert changed >= set(LINEAR[case])
    driver.executor.load_adapter("a", folder)
    prompt = prompt_of(41, seed=3)
    row, plainly = driver.start(prompt, adapter=("a", 1)), driver.start(prompt)
    driver.step((row, 17), (plainly, 3))
    _, _, ticket = driver.launch((row, None), (plainly, None), delay=True)
    expected = logits_of(merged(case, folder, plain), prompt)[-1]
    torch.testing.assert_close(ticket.logits[0].cpu(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ticket.logits[1].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, logits(case, prompt)[-1], atol=0.1)


def test_an_overflow_of_one_adapter_stays_in_its_own_rows(make_driver, tmp_path, backend):
    driver = make_driver("llama", lora_slots=2, lora_rank=4, **backend)
    wild = save_adapter(tmp_path / "wild", "llama", lora_alpha=3e38)
    tame = save_adapter(tmp_path / "tame", "llama", seed=1)
    driver.executor.load_adapter("wild", wild)
    driver.executor.load_adapter("tame", tame)
    prompt = prompt_of(6, seed=8)
    rows = [driver.start(prompt, adapter=("tame", 2)), driver.start(prompt), driver.start(prompt, adapter=("wild", 1))]
    _, _, ticket = driver.launch(*((row, None) for row in rows), delay=True)
    close(ticket.logits[0], logits_of(merged("llama", tame, plain), prompt)[-1])
    close(ticket.logits[1], logits("llama", prompt)[-1])


PATTERNS = {"alpha_pattern": {"up_proj": 5}, "rank_pattern": {"o_proj": 2}}


@pytest.mark.world
@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, **PATTERNS}])
def test_logits_are_those_of_pefts_own_model(make_driver, tmp_path, fields):
    peft = pytest.importorskip("peft", reason="needs peft 0.21.2 and accelerate 1.15.0 on PYTHONPATH")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], **fields)
    model = peft.get_peft_model(copy.deepcopy(judge("qwen3")), config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(tmp_path)
    driver = make_driver("qwen3", lora_slots=2, lora_rank=8)
    driver.executor.load_adapter("a", str(tmp_path))
    prompt = prompt_of(50, seed=9)
    close(last_logits(driver, driver.start(prompt, adapter=("a", 2)), chunk=16), logits_of(model, prompt)[-1])
