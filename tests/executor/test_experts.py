"""Mixtures of experts: what transformers computes, under chunks, prefix hits and retraction too."""

from pathlib import Path

import pytest
import torch

from tests.executor.meta_device import Watch, pretend_driver
from tests.executor.small_pool import serve_with_small_pool
from tests.executor.tiny_models import DEVICE, EXPERT_CASES, logits, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.layers.grouped_experts import GroupedExperts, StackedProduct
from tokenyard.executor.layers.linear import Linear
from tokenyard.executor.layers.mlp import ExpertLoop, GatedMlp, SparseMoe, TopK, silu
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.models.stacked_params import GraniteMlps

TOKENS = 10


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_logits_are_those_of_transformers(make_driver, case, backend):
    driver = make_driver(case, page_size=4, **backend)
    assert driver.executor.info.kernels.startswith("native" if backend["model_impl"] == "native" else "torch")
    prompt = prompt_of(30, seed=1)
    _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
    torch.testing.assert_close(ticket.logits[0].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.part(3)
@pytest.mark.parametrize("case", EXPERT_CASES)
def test_greedy_tokens_do_not_depend_on_the_schedule(folder, case, backend):
    torch.set_num_threads(1)
    executor = load_executor(
        folder(case),
        device=DEVICE,
        dtype="float32",
        page_size=4,
        max_total_tokens=120,
        max_pool_rows=9,
        **backend,
    )
    serve_with_small_pool(executor, case)


@pytest.fixture
def grouped(monkeypatch):
    """Experts as on a GPU with products of groups."""
    for module in ("tokenyard.executor.models.parts", "tokenyard.executor.models.shared_kv"):
        monkeypatch.setattr(f"{module}.why_not_grouped", lambda *_: "")
    made = []
    init = GroupedExperts.__init__
    monkeypatch.setattr(GroupedExperts, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
    return made


@pytest.mark.parametrize("case", [*EXPERT_CASES, "gemma4-moe", "deepseek-v3"])
def test_products_of_groups_find_what_transformers_does(make_driver, case, grouped):
    driver = make_driver(case, page_size=4, model_impl="torch", attention_backend="gather")
    assert grouped
    prompts = [prompt_of(length, seed=length) for length in (30, 7)]
    tickets = [driver.launch((driver.start(prompt), None), delay=True)[2] for prompt in prompts]
    for ticket, prompt in zip(tickets, prompts, strict=True):
        torch.testing.assert_close(ticket.logits[0].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


def test_products_of_groups_of_no_tokens():
    product = StackedProduct(torch.ones(4, 8, 8))
    nothing, none = torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.int64)
    assert GroupedExperts(product, product, silu)(nothing, torch.zeros(0, 2), none).shape == (0, 8)


def test_products_of_groups_wait_for_nothing(folder, monkeypatch, grouped):
    driver = pretend_driver(monkeypatch, read_folder_config(Path(folder("qwen3-moe"))), 4)
    rows = [driver.start(prompt_of(length, seed=length)) for length in (3, 60)]
    with Watch():
        driver.launch(*[(row, None) for row in rows])
        driver.launch(*[(row, 1) for row in rows])


def test_an_expert_that_no_token_chose_is_not_computed():
    def broken(x):
        raise AssertionError("computed")

    down, gate_up = Linear(torch.eye(4)), Linear(torch.ones(8, 4))
    router = Linear(torch.tensor([[1.0] * 4, [0.0] * 4]))
    experts = SparseMoe(router, ExpertLoop([GatedMlp(gate_up, down), broken]), TopK(1, True))
    x = torch.full((3, 4), 0.5)
    torch.testing.assert_close(experts(x), GatedMlp(gate_up, down)(x))
    assert experts(x[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"num_experts": None, "num_local_experts": None}, "num_local_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "every 0 layers"),
    ],
)
def test_odd_configs_are_refused(changes, says):
    config_type, fields = EXPERT_CASES["qwen3-moe"]
    raw = config_type(**fields).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8} | changes
    with pytest.raises(ConfigError, match=says):
        read_model_config(raw)


def test_experts_of_one_tensor_are_read_once_and_share_its_memory():
    raw = {"architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 50, "hidden_size": 8, "intermediate_size": 6}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "num_local_experts": 3}
    raw |= {"mamba_n_heads": 4, "shared_intermediate_size": 5, "layer_types": ["mamba", "attention"]}
    reads = []

    class Source:
        def get(self, name, shape):
            reads.append(name)
            return torch.randn(shape)

    weights, downs = GraniteMlps(read_model_config(raw), Source()), []
    for layer in range(2):
        for prefix in (*(f"experts.{expert}." for expert in range(3)), "shared_expert."):
            inter, name = 5 if prefix == "shared_expert." else 6, f"model.layers.{layer}.mlp.{prefix}"
            downs.append(weights.get(f"{name}down_proj.weight", (8, inter)))
            for part in ("gate", "up"):
                assert weights.get(f"{name}{part}_proj.weight", (inter, 8)).shape == (inter, 8)
    assert len(reads) == len(set(reads)) == 8
    assert len({down.untyped_storage().data_ptr() for down in downs}) == 4
