"""After the warm-up, serving launches no kernel that Triton would have to compile."""

import random
from pathlib import Path

import pytest
import torch

from tests.executor.tiny_models import prompt_of
from tests.executor.triton_launches import need_compiler, pretended_launches

need_compiler()

from tests.executor.driver import GREEDY, Driver  # noqa: E402
from tests.executor.fake_varlen import pretend_varlen  # noqa: E402
from tests.executor.packed_models import MODELS, gpt_oss_checkpoint, packed_checkpoint, save_plain  # noqa: E402
from tokenyard.base import SamplingParams  # noqa: E402
from tokenyard.executor import backend_choice  # noqa: E402
from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from tokenyard.executor.formats import cuda_experts  # noqa: E402
from tokenyard.executor.layer_loader import read_folder_config  # noqa: E402
from tokenyard.executor.model_loader import load_executor  # noqa: E402
from tokenyard.executor.plan_inputs import PlanInputs  # noqa: E402
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
    for module, name in ((backend_choice, "triton_why_not"), (cuda_experts, "why_not")):
        monkeypatch.setattr(module, name, lambda *_: "")


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


@torch.inference_mode()
def record_steps(executor, config):
    """Replay decodes of up to 4 rows and other steps of up to 64 tokens; larger ones are launched as they come."""
    inputs = PlanInputs(executor.pages, executor.future, executor.sampler.likeliest, prepare_by_triton)
    record, cpu = (lambda work: work() or work), torch.device("cpu")
    executor.model = CudaGraphRunner(executor.model, config, 4, cpu, record, plans=inputs, max_tokens=64)


@pytest.mark.parametrize(
    ("case", "page_size", "recorded"),
    [
        ("llama", 1, False),
        ("qwen3-layers", 16, True),
        ("gemma2", 4, True),
        ("gpt-oss", 1, False),
        ("packed gpt-oss", 1, True),
        ("packed moe", 1, True),
        ("llama-odd", 4, False),
        ("varlen qwen3-layers", 4, True),
    ],
)
def test_serving_compiles_nothing_after_the_warm_up(folder, tmp_path, zeros, monkeypatch, case, page_size, recorded):
    varlen = case.startswith("varlen")
    if varlen:
        case = case.removeprefix("varlen ")
        monkeypatch.setattr(backend_choice, "varlen_why_not", lambda *_: "")
        prompts = pretend_varlen(monkeypatch)
    if case == "packed moe":
        save_plain(*MODELS["moe"][::2], tmp_path)
        path = packed_checkpoint(tmp_path, tmp_path, "fp8-blocks")[0]
    else:
        path = gpt_oss_checkpoint(tmp_path)[0] if case.startswith("packed") else folder(case)
    executor = load_executor(
        path,
        device="cpu",
        dtype="bfloat16",
        model_impl="torch",
        attention_backend="triton",
        prefill_attention_backend="varlen" if varlen else "auto",
        page_size=page_size,
        max_total_tokens=2048,
        max_pool_rows=8,
    )
    with pretended_launches() as launches:
        if recorded:
            record_steps(executor, read_folder_config(Path(path)))
        warm_up(executor)
        warm = {name: set(keys) for name, keys in launches.keys.items()}
        assert len(warm["attention_kernel.attend_kernel"]) >= 4
        assert warm["sampling_kernels.draw_kernel"]
        assert len(warm.get("expert_kernels.multiply_kernel", ())) >= 2 * case.startswith("packed")
        for seed in range(3):
            serve(Driver(executor, seed), seed)
    assert not varlen or len(prompts) > 10
    for name, keys in launches.keys.items():
        new = set(keys) - warm.get(name, set())
        assert not new, f"{name} is compiled {len(new)} more times"
