"""Triton's kernels of LoRA: against torch in float64, and rows of several adapters in recorded steps."""

from pathlib import Path

import pytest
import torch

from tests.executor.test_lora import close, lora_driver  # noqa: F401
from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tests.executor.triton_available import need_triton

need_triton()

from tests.executor.lora_maker import logits_of  # noqa: E402
from tokenyard.executor.attention.triton.lora_kernels import add_lora, output_tiles  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from tokenyard.executor.layer_loader import read_folder_config  # noqa: E402

TRITON = {"model_impl": "torch", "attention_backend": "triton"}


@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"), [(48, (48, 24, 24), 8), (300, (130,), 3), (1100, (5, 257), 16), (64, (64, 64), 64)]
)
def test_each_token_gets_the_change_of_its_slot(inputs, outputs, rank):
    torch.manual_seed(rank)
    count, slots = 5, torch.tensor([0, 2, 3, 0, 1], device=DEVICE)
    wide = torch.randn(count, inputs + 16, device=DEVICE)
    x, before = wide[:, :inputs], torch.randn(count, sum(outputs), device=DEVICE)
    a = torch.randn(3, len(outputs), rank, inputs, device=DEVICE) * inputs**-0.5
    b = torch.randn(3, rank, sum(outputs), device=DEVICE)
    # An adapter that no token has must not be read into another one's sum.
    a, b = (torch.cat((side, torch.full_like(side[:1], float("nan")))) for side in (a, b))
    found = before.clone()
    add_lora(found, x, a, b, slots, output_tiles(outputs, torch.device(DEVICE)))
    expected = before.double()
    for token, slot in enumerate(slots.tolist()):
        if slot:
            inner = a[slot - 1].double() @ x[token].double()
            parts = zip(inner, b[slot - 1].double().split(outputs, dim=1), strict=True)
            expected[token] += torch.cat([own @ side for own, side in parts])
    assert torch.equal(found[[0, 3]], before[[0, 3]])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_several_adapters_in_recorded_steps(lora_driver, folder):  # noqa: F811
    driver, models = lora_driver(page_size=4, **TRITON)
    executor, sizes = driver.executor, []

    def record(work):
        work()
        number = len(sizes)
        sizes.append(0)

        def play():
            sizes[number] += 1
            work()

        return play

    adapters = executor.adapters.slots
    with torch.inference_mode():
        config = read_folder_config(Path(folder("llama")))
        executor.model = CudaGraphRunner(executor.model, config, 4, torch.device(DEVICE), record, adapters)
    prompts = {0: prompt_of(7, seed=1), 1: prompt_of(12, seed=2), 2: prompt_of(5, seed=3)}
    slots = {0: 0, 1: 4, 2: 1}
    rows = {
        number: driver.start(prompt, adapter=(f"a{number}" if number else "", slots[number]))
        for number, prompt in prompts.items()
    }
    for number, row in rows.items():
        driver.step((row, len(prompts[number]) - 1))
    plan, order, ticket = driver.launch(*((row, None) for row in rows.values()), delay=True)
    assert plan.decode_rows == 3
    # Recorded from large to small, each size without adapters and with them.
    assert sizes == [0, 1, 0, 0, 0, 0]
    for place, row in enumerate(order):
        number = next(number for number, own in rows.items() if own is row)
        if number:
            close(ticket.logits[place], logits_of(models[number], prompts[number])[-1])
    executor.sample(ticket)
    driver.collect((plan, order, ticket))
    assert rows[0].output == greedy("llama", prompts[0], 1)
    # Of a row without an adapter alone the plain step is played, and nothing is left in the slots of tokens.
    driver.step((rows[0], 1))
    assert sizes == [0, 1, 0, 0, 1, 0]
    assert rows[0].output == greedy("llama", prompts[0], 2)
