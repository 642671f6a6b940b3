"""Quantized checkpoints load as the values they encode, according to a reader that decodes one number at a time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import Driver
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.quantized import AWQ_ORDER, QuantizedWeights
from tokenyard.executor.weights import SafetensorsWeights

GROUP = 16


def words(numbers, bits, order=None):
    """Pack rows of numbers from 0 up into int32 words, the lowest bits first, one word at a time."""
    each = 32 // bits
    packed = []
    for row in numbers.tolist():
        line = []
        for first in range(0, len(row), each):
            word = 0
            for place, at in enumerate(order or range(each)):
                word |= int(row[first + at]) << (bits * place) if first + at < len(row) else 0
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def draw(rng, *shape, most):
    return torch.randint(0, most, shape, generator=rng)


def scales_of(rng, *shape):
    return (torch.rand(shape, generator=rng) * 0.02 + 0.001).half()


def multiplied(values, zeros, scales, groups):
    """Numbers [outputs, inputs] of values [inputs, outputs], zeros and scales [groups, outputs], one at a time."""
    values, zeros, scales, groups = (each.tolist() for each in (values, zeros, scales, groups))
    return torch.tensor(
        [
            [scales[group][o] * (row[o] - zeros[group][o]) for group, row in zip(groups, values, strict=True)]
            for o in range(len(scales[0]))
        ]
    )


def as_gptq(rng, outputs, inputs, bits=4, shuffled=False, v2=False):
    values, zeros = (
        draw(rng, inputs, outputs, most=1 << bits),
        draw(rng, inputs // GROUP, outputs, most=(1 << bits) - 1),
    )
    scales = scales_of(rng, inputs // GROUP, outputs)
    groups = torch.arange(inputs) // GROUP
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=rng)]
    parts = {"qweight": words(values.T, bits).T.contiguous(), "qzeros": words(zeros, bits), "scales": scales}
    parts["g_idx"] = groups.int()
    return parts, multiplied(values, zeros if v2 else zeros + 1, scales, groups)


def as_awq(rng, outputs, inputs):
    values, zeros = draw(rng, inputs, outputs, most=16), draw(rng, inputs // GROUP, outputs, most=16)
    scales = scales_of(rng, inputs // GROUP, outputs)
    parts = {"qweight": words(values, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales}
    return parts, multiplied(values, zeros, scales, torch.arange(inputs) // GROUP)


def as_fp8_blocks(rng, outputs, inputs, block=(16, 32)):
    weight = torch.randn(outputs, inputs, generator=rng).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), generator=rng) * 0.1 + 0.01
    scales = scale.tolist()
    whole = [
        [number * scales[o // block[0]][i // block[1]] for i, number in enumerate(row)]
        for o, row in enumerate(weight.float().tolist())
    ]
    return {"weight": weight, "weight_scale_inv": scale}, torch.tensor(whole)


def as_scaled(rng, outputs, inputs, kind):
    raw = torch.randn(outputs, inputs, generator=rng) * 40
    weight = raw.to(torch.float8_e4m3fn) if kind == "fp8" else raw.round().clamp(-127, 127).to(torch.int8)
    scale = torch.rand(1 if kind == "fp8" else outputs, generator=rng) * 0.002 + 0.0005
    scales, numbers = scale.tolist(), weight.float().tolist()
    whole = [[number * scales[o % len(scales)] for number in row] for o, row in enumerate(numbers)]
    return {"weight": weight, "weight_scale": scale if kind == "fp8" else scale[:, None]}, torch.tensor(whole)


def as_packed(rng, outputs, inputs, bits=4, zero_points=False):
    values, half = draw(rng, outputs, inputs, most=1 << bits), 1 << bits - 1
    scale = scales_of(rng, outputs, inputs // GROUP)
    parts = {
        "weight_packed": words(values, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    zeros = torch.full((outputs, inputs // GROUP), half)
    if zero_points:
        zeros = draw(rng, outputs, inputs // GROUP, most=1 << bits)
        parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return parts, multiplied(values.T, zeros.T, scale.T, torch.arange(inputs) // GROUP)


def compressed(form, bits):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"g": {"weights": {"num_bits": bits}}},
    }


KINDS = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, as_gptq, {}),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, as_gptq, {"bits": 8}),
    "gptq-2-v2": (
        {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"},
        as_gptq,
        {"bits": 2, "v2": True},
    ),
    "gptq-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, as_gptq, {"shuffled": True}),
    "awq": ({"quant_method": "awq", "bits": 4}, as_awq, {}),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, as_fp8_blocks, {}),
    "fp8": ({"quant_method": "fp8"}, as_scaled, {"kind": "fp8"}),
    "float-quantized": (compressed("float-quantized", 8), as_scaled, {"kind": "fp8"}),
    "int-quantized": (compressed("int-quantized", 8), as_scaled, {"kind": "int8"}),
    "pack-quantized": (compressed("pack-quantized", 4), as_packed, {}),
    "pack-quantized-zeros": (compressed("pack-quantized", 4), as_packed, {"zero_points": True}),
    "pack-quantized-8": (compressed("pack-quantized", 8), as_packed, {"bits": 8}),
}


def quantize(source, target, kind):
    """Write a tiny model twice: quantized with random numbers, and in float32 with what those numbers mean."""
    quantization, make, options = KINDS[kind]
    config, tensors = (
        json.loads((Path(source) / "config.json").read_text()),
        load_file(Path(source) / "model.safetensors"),
    )
    rng, quantized, whole = torch.Generator().manual_seed(5), {}, {}
    for name, tensor in sorted(tensors.items()):
        quantized[name] = whole[name] = tensor
        if "_proj.weight" in name:
            del quantized[name]
            parts, whole[name] = make(rng, *tensor.shape, **options)
            quantized |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    for folder, found, extra in (
        (target / "q", quantized, {"quantization_config": quantization}),
        (target / "w", whole, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | extra))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    return str(target / "q"), str(target / "w")


@pytest.mark.part(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_computes_what_its_numbers_mean(tmp_path, folder, kind):
    prompt, found = prompt_of(12, seed=1), []
    for path in quantize(folder("qwen3"), tmp_path, kind):
        executor = load_executor(path, device="cpu", dtype="float32", max_total_tokens=64, model_impl="torch")
        driver = Driver(executor)
        _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
        found.append(ticket.logits[0].clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert found[0].abs().max() > 0.01


def test_parts_that_do_not_fit_are_named(tmp_path, folder):
    path, _ = quantize(folder("qwen3"), tmp_path, "gptq")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj."
    save_file(tensors | {name + "scales": tensors[name + "scales"][:, :-8].contiguous()}, file)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight.*cannot be made of.*qweight"):
        load_executor(path, device="cpu", dtype="float32")
    del tensors[name + "qweight"], tensors[name + "scales"], tensors[name + "qzeros"], tensors[name + "g_idx"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="has no tensor"):
        load_executor(path, device="cpu", dtype="float32")


@pytest.mark.parametrize("scales", [torch.ones(64), torch.ones(1, 2), torch.ones(3, 64)])
def test_scales_of_fp8_that_do_not_fit_are_named(tmp_path, scales):
    tensors = {"a.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn), "a.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsWeights(tmp_path, torch.device("cpu"), torch.float32)
    weights = QuantizedWeights(files, {"quant_method": "fp8", "weight_block_size": [16, 32]})
    for read in (lambda: weights.packed("a.weight", (64, 64)).read(), lambda: weights.get("a.weight", (64, 64))):
        with pytest.raises(ConfigError, match=r"a\.weight.*cannot be made of weight .*weight_scale_inv"):
            read()


@pytest.mark.parametrize("block", [128, [128], [0, 128], "many", [1.5, 2]])
def test_a_block_that_makes_no_sense_is_refused(tmp_path, block):
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    files = SafetensorsWeights(tmp_path, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"weight_block_size is .* it must be two positive numbers"):
        QuantizedWeights(files, {"quant_method": "fp8", "weight_block_size": block})
