"""After the warm-up, serving launches no kernel that Triton would have to compile."""

import random

import pytest
import torch

from tests.executor.tiny_models import prompt_of
from tests.executor.triton_launches import need_compiler, pretended_launches

need_compiler()

from tests.executor.driver import GREEDY, Driver  # noqa: E402
from tokenyard.base import SamplingParams  # noqa: E402
from tokenyard.executor import backend_choice  # noqa: E402
from tokenyard.executor.model_loader import load_executor  # noqa: E402
from tokenyard.executor.warm_up import warm_up  # noqa: E402

SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, logit_bias={5: 2.0}, seed=1),
)


@pytest.fixture
def zeros(monkeypatch):
    """Kernels that do not run leave what they would write as it is: zeros, which are tokens."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(backend_choice, "triton_why_not", lambda *_: "")


def serve(driver, seed):
    """Steps of random rows: prompts in chunks of any length, decodes, several at once, rows that end."""
    draw, rows = random.Random(seed), []
    for step in range(40):
        if len(rows) < 8 and draw.random() < 0.6:
            rows.append(driver.start(prompt_of(draw.randrange(1, 120), seed=step), draw.choice(SAMPLINGS)))
        work = []
        for row in draw.sample(rows, draw.randrange(1, len(rows) + 1)) if rows else ():
            left = row.total - row.planned
            work.append((row, draw.randrange(1, left + 1)))
        if work:
            driver.step(*work)
        if rows and draw.random() < 0.2:
            row = rows.pop(draw.randrange(len(rows)))
            driver.retract(row)


@pytest.mark.parametrize(
    ("case", "page_size"), [("llama", 1), ("qwen3-layers", 16), ("gemma2", 4), ("gpt-oss", 1), ("llama-odd", 4)]
)
def test_serving_compiles_nothing_after_the_warm_up(folder, zeros, case, page_size):
    executor = load_executor(
        folder(case),
        device="cpu",
        dtype="bfloat16",
        model_impl="torch",
        attention_backend="triton",
        page_size=page_size,
        max_total_tokens=2048,
        max_pool_rows=8,
    )
    with pretended_launches() as launches:
        warm_up(executor)
        warm = {name: set(keys) for name, keys in launches.keys.items()}
        assert len(warm["attention_kernel.attend_kernel"]) >= 5
        assert warm["sampling_kernels.draw_kernel"]
        for seed in range(3):
            serve(Driver(executor, seed), seed)
    for name, keys in launches.keys.items():
        new = set(keys) - warm.get(name, set())
        assert not new, f"{name} is compiled {len(new)} more times"
