"""Products of packed weights as on a CUDA device: by torch's kernels for CPUs where it has them, else shapes and
layouts by its checks on tensors without data, and numbers by an emulation."""

import logging

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.executor.packed_models import MODELS, all_logits, load, packed_checkpoint, save_plain
from tests.executor.test_quantized import KINDS, quantize
from tests.executor.thread_ranks import load_virtual
from tests.executor.tiny_models import prompt_of
from tokenyard.executor.distributed.tensor_parallel import shard_weights
from tokenyard.executor.formats import cuda_products
from tokenyard.executor.formats.cuda_products import (
    BLOCK,
    FP8,
    Fp8BlocksLinear,
    Fp8RowsLinear,
    ScaledRows,
    cuda_product,
    quantize_rows,
)
from tokenyard.executor.quantized import QuantizedWeights
from tokenyard.executor.weights import SafetensorsWeights

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture
def device(monkeypatch):
    """As if the CPU were a CUDA device of this capability."""

    def of(capability, cuda=(13, 0)):
        monkeypatch.setattr(cuda_products, "capability", lambda device: capability)
        monkeypatch.setattr(cuda_products, "cuda_version", lambda: cuda)

    monkeypatch.setattr(cuda_products, "quantizer", lambda: quantize_rows)
    return of


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(scales, rows, columns):
    """Scales of blocks for each number."""
    return scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def exact(x, weight, block):
    """The product of inputs as they are rounded to fp8 and a weight, float64."""
    numbers, scales = quantize_rows(x, block)
    return ((numbers.double() * spread(scales, 1, block)) @ weight.T)[: len(x)]


class Emulated:
    """torch's scaled product with blocks, which it has for CUDA alone: its own checks of layouts, then float64."""

    def __init__(self):
        self.calls = 0
        self.real = F.scaled_mm

    def __call__(self, a, b, scale_a, kind_a, scale_b, kind_b, **options):
        self.calls += 1
        given = (a, b, scale_a, scale_b)
        meta = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
        self.real(meta[0], meta[1], meta[2], kind_a, meta[3], kind_b, **options)
        inputs = len(b)
        left = a.double() * spread(scale_a, 1, BLOCK)
        right = b.double() * spread(scale_b[: inputs // BLOCK], BLOCK, BLOCK)
        return (left @ right).to(options["output_dtype"])


@pytest.mark.parametrize("rows", [0, 1, 16, 37])
@pytest.mark.parametrize("biased", [False, True])
def test_fp8_with_a_scale_for_each_row(rows, biased):
    weight, scales = random(48, 256, seed=1).to(FP8), torch.rand(48) * 0.1 + 0.01
    bias = random(48, seed=2).bfloat16() if biased else None
    x = random(rows, 256, seed=3).bfloat16() * 5
    found = Fp8RowsLinear(ScaledRows(weight, scales), bias)(x)
    expected = exact(x, weight.double() * scales[:, None], 256) + (bias.double() if biased else 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 384), (128, 128), (384, 1024)])
def test_fp8_with_a_scale_for_each_block(monkeypatch, device, outputs, inputs):
    device(HOPPER)
    emulated = Emulated()
    monkeypatch.setattr(F, "scaled_mm", emulated)
    weight, scales = random(outputs, inputs, seed=1).to(FP8), torch.rand(outputs // BLOCK, inputs // BLOCK) + 0.1
    product = Fp8BlocksLinear(ScaledRows(weight, scales), random(outputs, seed=4).bfloat16())
    whole = weight.double() * spread(scales, BLOCK, BLOCK)
    for rows in (1, 16, 37):
        x = random(rows, inputs, seed=3).bfloat16()
        expected = exact(x, whole, BLOCK) + random(outputs, seed=4).bfloat16().double()
        torch.testing.assert_close(product(x).double(), expected, rtol=1e-2, atol=5e-2)
    assert emulated.calls == 3


def test_a_row_of_zeros_and_large_numbers_stay_finite():
    x = torch.zeros(3, 256)
    x[1], x[2, 7] = 3e38, 1e-30
    numbers, scales = quantize_rows(x.bfloat16(), 256)
    found = numbers.float() * scales
    assert found.isfinite().all()
    torch.testing.assert_close(found[:3], x.bfloat16().float(), rtol=0.07, atol=1e-20)


class Source:
    """A checkpoint of fp8."""

    like = torch.empty(0, dtype=torch.bfloat16)

    def __init__(self, scales):
        self._scales = scales

    def get(self, name, shape):
        raise AssertionError("unpacked")

    def scaled(self, name, shape):
        return ScaledRows(torch.zeros(shape).to(FP8), self._scales(*shape))


def test_what_a_device_cannot_multiply_is_unpacked(device):
    by_row = Source(lambda outputs, inputs: torch.ones(outputs))
    by_block = Source(lambda outputs, inputs: torch.ones(-(-outputs // BLOCK), -(-inputs // BLOCK)))
    names = {"q": 256, "k": 128}
    for source, capability, cuda, inputs, expected in (
        (by_row, (8, 9), (12, 8), 256, Fp8RowsLinear),
        (by_row, HOPPER, (13, 0), 250, None),
        (by_row, AMPERE, (13, 0), 256, None),
        (by_block, HOPPER, (13, 0), 256, Fp8BlocksLinear),
        (by_block, HOPPER, (12, 8), 256, None),
        (by_block, (10, 0), (13, 0), 256, None),
        (by_block, HOPPER, (13, 0), 192, None),
    ):
        device(capability, cuda)
        found = cuda_product(source, names, inputs, None)
        assert type(found) is (expected or type(None)), (capability, cuda, inputs)
    device((0, 0))
    assert cuda_product(by_row, names, 256, None) is None


def both(path, plain, caplog):
    """Logits of a checkpoint, and of the numbers that it means; nothing of it may be unpacked."""
    with caplog.at_level(logging.INFO):
        packed = load(path, "torch", "bfloat16", attention_backend="gather")
    assert "is unpacked" not in caplog.text
    prompt = prompt_of(20, seed=3)
    found, expected = all_logits(packed, prompt), all_logits(load(plain, "torch", attention_backend="gather"), prompt)
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("case", ["awq", "gptq", "gptq-order", "compressed"])
def test_models_of_four_bits(tmp_path, device, caplog, case):
    device(AMPERE)
    config_type, _, fields = MODELS["llama"]
    save_plain(config_type, fields, tmp_path)
    # Rounding the scales to bfloat16 costs as much as bfloat16 itself.
    assert both(*packed_checkpoint(tmp_path, tmp_path, case), caplog) < 0.03


def test_as_many_blocks_as_rows_are_not_scales_of_rows(tmp_path):
    """As in DeepSeek V3, where 128 blocks in a row of 16384 inputs make one for each output."""
    shape, scales = (256, 16384), torch.rand(2, 128)
    tensors = {"a.weight": torch.zeros(shape).to(FP8), "a.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsWeights(tmp_path, torch.device("cpu"), torch.bfloat16)
    found = QuantizedWeights(files, {"quant_method": "fp8", "weight_block_size": [128, 128]}).scaled("a.weight", shape)
    assert torch.equal(found.scales, scales)


@pytest.mark.parametrize("kind", ["fp8", "float-quantized"])
def test_models_of_fp8(tmp_path, device, caplog, kind):
    device(HOPPER)
    config_type, _, fields = MODELS["llama"]
    save_plain(config_type, fields, tmp_path)
    assert kind in KINDS
    assert both(*quantize(tmp_path, tmp_path, kind), caplog) < 0.1


@pytest.mark.parametrize(
    ("case", "capability", "unpacked"),
    [
        ("awq", AMPERE, ""),
        ("compressed", AMPERE, ""),
        ("gptq-order", AMPERE, "gptq is unpacked: 6 "),
        ("fp8", HOPPER, ""),
    ],
)
def test_ranks_keep_their_parts_packed(tmp_path, device, caplog, case, capability, unpacked):
    """Groups have up to 128 of 256 and 512 inputs. Parts by inputs of shuffled ones are unpacked."""
    device(capability)
    config_type, _, fields = MODELS["llama"]
    save_plain(config_type, fields, tmp_path)
    packed, plain = packed_checkpoint(tmp_path, tmp_path, case)
    options = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "gather", "max_total_tokens": 1024}
    with caplog.at_level(logging.INFO):
        ranks = load_virtual(packed, 2, **options)
    assert ("is unpacked" in caplog.text) == bool(unpacked)
    assert unpacked in caplog.text
    prompt = prompt_of(20, seed=3)
    expected = all_logits(load(plain, "torch", attention_backend="gather"), prompt)
    found = all_logits(ranks, prompt)
    assert (found - expected).norm() / expected.norm() < (0.1 if case == "fp8" else 0.03)


def test_parts_of_blocks_of_fp8_are_whole_blocks(device):
    device(HOPPER)

    class Blocks(Source):
        def scaled(self, name, shape):
            numbers = torch.arange(shape[0] * shape[1]).view(shape) % 13
            scales = torch.arange((shape[0] // BLOCK) * (shape[1] // BLOCK)).view(-1, shape[1] // BLOCK).float()
            return ScaledRows(numbers.float().to(FP8), scales)

    def whole(found):
        return found.weight.double() * spread(found.scales, BLOCK, BLOCK)

    for axis, name in enumerate(("q_proj", "o_proj")):
        part = tuple(size // 2 if at == axis else size for at, size in enumerate((512, 512)))
        source = Blocks(None)
        expected = whole(source.scaled(name, (512, 512))).narrow(axis, part[axis], part[axis])
        own = shard_weights(source, 1, 2, {})
        assert torch.equal(whole(own.scaled(f"a.{name}.weight", part)), expected)
    assert shard_weights(source, 1, 2, {}).scaled("a.q_proj.weight", (192, 512)) is None
