"""Products of packed experts, against float64 of what their bytes mean, and whole models against unpacked ones."""

import pytest
import torch

from tests.executor.packed_models import all_logits, gpt_oss_checkpoint
from tests.executor.tiny_models import DEVICE, prompt_of
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.expert_kernels import FEW, multiply_groups  # noqa: E402
from tokenyard.executor.formats.cuda_experts import Mxfp4Product  # noqa: E402
from tokenyard.executor.formats.weight_format import FORMATS  # noqa: E402
from tokenyard.executor.model_loader import load_executor  # noqa: E402
from tokenyard.executor.models.stacked_params import mxfp4_rows  # noqa: E402
from tokenyard.executor.quantized import mxfp4  # noqa: E402


def packed(experts, outputs, inputs):
    """Random bytes of experts as the kernel takes them, and float64 of what they mean."""
    draw = torch.Generator().manual_seed(inputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(1, 254, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
    scales[1:] = scales[1:] % 8 + 122
    rows = mxfp4_rows(blocks.flatten(0, 1).numpy(), scales.flatten(0, 1).numpy())
    stored = torch.from_numpy(rows).view(experts, outputs, inputs // 32, FORMATS["MXFP4"].block_bytes)
    assert torch.equal(stored[..., 0], scales)
    return stored[..., 1:].contiguous(), scales, mxfp4(blocks, scales).double()


@pytest.mark.parametrize(
    ("experts", "outputs", "inputs", "counts"),
    [(3, 70, 64, (0, 5, 17)), (5, 32, 96, (1, 0, 0, 40, 0)), (4, 16, 32, (0, FEW + 1, 2, 0))],
)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_multiplied_by_their_experts(experts, outputs, inputs, counts, biased):
    numbers, scales, weights = packed(experts, outputs, inputs)
    torch.manual_seed(1)
    x = torch.randn(sum(counts), inputs)
    chosen = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    ends = torch.tensor(counts).cumsum(0).int()
    bias = torch.randn(experts, outputs) if biased else None
    given = [None if one is None else one.to(DEVICE) for one in (x, numbers, scales, bias, ends)]
    found = multiply_groups(*given).cpu()
    expected = torch.einsum("ri,roi->ro", x.double(), weights[chosen])
    if bias is not None:
        expected += bias[chosen]
    size = torch.einsum("ri,roi->ro", x.double().abs(), weights[chosen].abs()) + 1.0
    assert ((found - expected).abs() / size).max() < 1e-6


def test_a_model_with_packed_experts_finds_what_the_unpacked_one_does(tmp_path, monkeypatch):
    products, init = [], Mxfp4Product.__init__
    monkeypatch.setattr(Mxfp4Product, "__init__", lambda self, *given: products.append(self) or init(self, *given))
    options = {"device": DEVICE, "dtype": "float32", "model_impl": "torch", "attention_backend": "gather"}
    packed, plain = (
        load_executor(path, **options, max_total_tokens=128, max_pool_rows=4) for path in gpt_oss_checkpoint(tmp_path)
    )
    # Two of each layer, and none of the model of plain numbers.
    assert len(products) == 4
    prompt = prompt_of(20, seed=3)
    found, expected = all_logits(packed, prompt), all_logits(plain, prompt)
    assert (found - expected).norm() / expected.norm() < 1e-5
