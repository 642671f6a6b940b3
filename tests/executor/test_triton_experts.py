"""Products of packed experts, against float64 of what their bytes mean, and whole models against unpacked ones."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.executor.packed_models import MODELS, all_logits, gpt_oss_checkpoint, packed_checkpoint, save_plain
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import DEVICE, prompt_of
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.expert_kernels import FEW, PackedExperts, multiply_groups  # noqa: E402
from tokenyard.executor.distributed import tensor_parallel  # noqa: E402
from tokenyard.executor.formats import cuda_experts  # noqa: E402
from tokenyard.executor.formats.cuda_experts import PackedProduct  # noqa: E402
from tokenyard.executor.formats.weight_format import FORMATS  # noqa: E402
from tokenyard.executor.model_loader import load_executor  # noqa: E402
from tokenyard.executor.models.stacked_params import mxfp4_rows  # noqa: E402
from tokenyard.executor.quantized import mxfp4  # noqa: E402

FP8 = torch.float8_e4m3fn
KINDS = ("mxfp4", "int4 of 32", "int4 of 128", "fp8 of 128", "fp8 of 32", "fp8 of 128, by its bits", "int8 of 128")


def packed(kind, experts, outputs, inputs):
    """Random weights of experts as the kernel takes them, and float64 of what they mean."""
    if kind == "mxfp4":
        return packed_mxfp4(experts, outputs, inputs)
    draw, group = torch.Generator().manual_seed(inputs), 32 if kind.endswith("32") else 128
    groups = inputs // group
    scales = torch.rand(experts, outputs, groups, generator=draw) + 0.5
    spread = scales.double().repeat_interleave(group, 2)
    if not kind.startswith("int4"):
        # All bits but those of NaN.
        numbers = torch.randint(0, 256, (experts, outputs, groups, group), generator=draw, dtype=torch.uint8)
        own = FP8 if kind.startswith("fp8") else torch.int8
        if own is FP8:
            numbers[(numbers & 127) == 127] = 0
        means = numbers.view(own).double().flatten(2) * spread
        return PackedExperts(numbers, scales, None, own, "bits" not in kind), means
    values = torch.randint(0, 16, (experts, outputs, inputs), generator=draw, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (experts, outputs, groups), generator=draw, dtype=torch.uint8)
    halves = values.view(experts, outputs, groups, -1, 2, 16)
    numbers = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(3)
    return PackedExperts(numbers, scales, zeros), (values.double() - zeros.repeat_interleave(group, 2)) * spread


def packed_mxfp4(experts, outputs, inputs):
    draw = torch.Generator().manual_seed(inputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(1, 254, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
    scales[1:] = scales[1:] % 8 + 122
    rows = mxfp4_rows(blocks.flatten(0, 1).numpy(), scales.flatten(0, 1).numpy())
    stored = torch.from_numpy(rows).view(experts, outputs, inputs // 32, FORMATS["MXFP4"].block_bytes)
    assert torch.equal(stored[..., 0], scales)
    return PackedExperts(stored[..., 1:].contiguous(), scales), mxfp4(blocks, scales).double()


def on_device(weights):
    return replace(
        weights,
        numbers=weights.numbers.to(DEVICE),
        scales=weights.scales.to(DEVICE),
        zeros=None if weights.zeros is None else weights.zeros.to(DEVICE),
    )


@pytest.mark.parametrize(
    ("experts", "outputs", "groups", "counts"),
    [(3, 70, 2, (0, 5, 17)), (5, 32, 3, (1, 0, 0, 40, 0)), (4, 16, 1, (0, FEW + 1, 2, 0))],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_multiplied_by_their_experts(experts, outputs, groups, counts, kind, biased):
    inputs = groups * (32 if kind.endswith(("32", "mxfp4")) else 128)
    own, weights = packed(kind, experts, outputs, inputs)
    torch.manual_seed(1)
    x = torch.randn(sum(counts), inputs)
    chosen = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    ends = torch.tensor(counts).cumsum(0).int()
    bias = torch.randn(experts, outputs) if biased else None
    assert own.group * groups == inputs
    bias_there = None if bias is None else bias.to(DEVICE)
    found = multiply_groups(x.to(DEVICE), on_device(own), bias_there, ends.to(DEVICE)).cpu()
    expected = torch.einsum("ri,roi->ro", x.double(), weights[chosen])
    if bias is not None:
        expected += bias[chosen]
    size = torch.einsum("ri,roi->ro", x.double().abs(), weights[chosen].abs()) + 1.0
    assert ((found - expected).abs() / size).max() < 1e-6


def test_every_number_of_fp8_is_taken_apart_as_it_is_converted():
    every = torch.tensor([one for one in range(256) if one & 127 != 127], dtype=torch.uint8)
    numbers = torch.cat((every, every[:2])).view(1, 1, 2, 128).repeat(1, 16, 1, 1)
    weights = PackedExperts(numbers, torch.ones(1, 16, 2), None, FP8, convert=False)
    # Each row of inputs picks one number.
    found = multiply_groups(torch.eye(256), weights, None, torch.tensor([256], dtype=torch.int32))
    assert torch.equal(found[:, 0], numbers[0, 0].flatten().view(FP8).float())


@pytest.fixture
def products(monkeypatch):
    """The products of packed weights that are made."""
    made, init = [], PackedProduct.__init__
    monkeypatch.setattr(PackedProduct, "__init__", lambda self, *given: made.append(given[0]) or init(self, *given))
    return made


def assert_same_logits(folders):
    options = {"device": DEVICE, "dtype": "float32", "model_impl": "torch", "attention_backend": "gather"}
    packed, plain = (load_executor(path, **options, max_total_tokens=128, max_pool_rows=4) for path in folders)
    prompt = prompt_of(20, seed=3)
    found, expected = all_logits(packed, prompt), all_logits(plain, prompt)
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_a_model_with_packed_experts_finds_what_the_unpacked_one_does(tmp_path, products):
    assert_same_logits(gpt_oss_checkpoint(tmp_path))
    # Two of each layer, and none of the model of plain numbers.
    assert [one.kind for one in products] == [None] * 4


@pytest.mark.parametrize(
    ("case", "kind", "groups"),
    [
        ("awq", None, (128, 128)),
        pytest.param("compressed", None, (32, 32), marks=pytest.mark.slow),
        ("fp8", FP8, (128, 128)),
        ("fp8-blocks", FP8, (32, 32)),
        pytest.param("int8", torch.int8, (128, 128), marks=pytest.mark.slow),
        ("gptq-order", None, ()),
    ],
)
def test_experts_of_a_checkpoint_stay_packed(tmp_path, products, case, kind, groups):
    save_plain(MODELS["moe"][0], MODELS["moe"][2] | {"num_hidden_layers": 1}, tmp_path)
    assert_same_logits(packed_checkpoint(tmp_path, tmp_path, case))
    assert [(one.kind, one.group) for one in products] == [(kind, group) for group in groups]
    assert all((one.zeros is not None) == (kind is None) for one in products)


def test_ranks_keep_their_parts_of_experts_packed(tmp_path, products, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "multiplies_packed", lambda weights: True)
    # Ranks are threads, and Triton's interpreter runs one kernel at a time.
    one_at_a_time, call = threading.Lock(), PackedProduct.__call__

    def alone(self, *given):
        with one_at_a_time:
            return call(self, *given)

    monkeypatch.setattr(PackedProduct, "__call__", alone)
    save_plain(MODELS["moe"][0], MODELS["moe"][2] | {"num_hidden_layers": 1}, tmp_path)
    parts, plain = packed_checkpoint(tmp_path, tmp_path, "awq")
    options = {"device": DEVICE, "dtype": "float32", "model_impl": "torch", "attention_backend": "gather"}
    options |= {"max_total_tokens": 128, "max_pool_rows": 4}
    prompt = prompt_of(20, seed=3)
    found, expected = (
        all_logits(executor, prompt)
        for executor in (load_virtual(parts, 2, **options), load_executor(plain, **options))
    )
    assert (found - expected).norm() / expected.norm() < 1e-5
    # Of two ranks, each with half of the numbers of each expert.
    assert [one.numbers.shape[1:3] for one in products] == [(256, 2), (256, 1)] * 2


@pytest.mark.parametrize(("able", "converts"), [((8, 6), False), ((8, 9), True)])
def test_fp8_is_taken_apart_where_the_device_does_not_convert_it(tmp_path, products, monkeypatch, able, converts):
    monkeypatch.setattr(cuda_experts, "interpreted", lambda: False)
    monkeypatch.setattr(cuda_experts, "capability", lambda device: able)
    monkeypatch.setattr(cuda_experts, "why_not", lambda *given: "")
    save_plain(MODELS["moe"][0], MODELS["moe"][2] | {"num_hidden_layers": 1}, tmp_path)
    for case in ("fp8", "int8"):
        (tmp_path / case).mkdir()
        path, _ = packed_checkpoint(tmp_path, tmp_path / case, case)
        options = {"device": "cpu", "dtype": "bfloat16", "model_impl": "torch", "attention_backend": "gather"}
        load_executor(path, **options, max_total_tokens=128, max_pool_rows=4)
    assert [one.convert for one in products] == [converts] * 2 + [True] * 2
