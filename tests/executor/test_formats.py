"""Products of packed weights by every instruction set, and whole models whose weights stay packed."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.executor.driver import Driver
from tests.executor.gguf_maker import quantized_rows
from tests.executor.packed_models import (
    CHECKPOINTS,
    KINDS,
    MODELS,
    WIDE,
    adapter_shifts,
    all_logits,
    gpt_oss_checkpoint,
    load,
    make_adapter,
    packed_checkpoint,
    random,
)
from tests.executor.tiny_models import prompt_of
from tokenyard.executor.formats.byte_groups import byte_rows
from tokenyard.executor.formats.int4_groups import int4_rows
from tokenyard.executor.formats.on_load import q4_0, q8_0
from tokenyard.executor.formats.weight_format import FORMATS, STORED
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, int32s

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
FORMAT = pytest.mark.parametrize("name", FORMATS)
ROUNDED_FORMATS = [name for name in FORMATS if not name.startswith("FP8")]
"""Whose products take inputs as bytes."""
ROUNDING = 2.0**-24
BLOCK = 32


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def int4(rows, inputs, seed, form):
    """Rows in groups with a scale and a zero point, and what they mean, by NumPy."""
    rng = np.random.default_rng(seed)
    blocks = inputs // form.inputs
    scales = (rng.random((rows, blocks)) * 0.02 + 0.001).astype(np.float16).astype(np.float32)
    zeros, values = rng.integers(0, 17, (rows, blocks)), rng.integers(0, 16, (rows, inputs))
    given = (torch.from_numpy(part) for part in (values, zeros, scales))
    whole = (values.reshape(rows, blocks, -1) - zeros[..., None]) * scales[..., None].astype(np.float64)
    return int4_rows(*given, form), torch.from_numpy(whole.reshape(rows, inputs))


def whole_bytes(rows, inputs, seed, form):
    """Rows of fp8 or int8 in groups with a scale, and what they mean."""
    scales = (
        torch.from_numpy(np.random.default_rng(seed).random((rows, inputs // form.inputs), np.float32)) * 0.02 + 0.001
    )
    values = random(rows, inputs, seed=seed)
    values = (
        values.to(torch.float8_e4m3fn) if form.name.startswith("FP8") else (values * 60).clamp(-128, 127).to(torch.int8)
    )
    return byte_rows(values, scales, form), (values.float() * scales.repeat_interleave(form.inputs, 1)).double()


def matrix(name, rows, inputs, seed=1):
    """A matrix in a format, and its numbers in float64 as the gguf package reads them."""
    if name.startswith("INT4"):
        return int4(rows, inputs, seed, FORMATS[name])
    if name.partition("_")[0] in ("INT8", "FP8"):
        return whole_bytes(rows, inputs, seed, FORMATS[name])
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(seed).standard_normal((rows, inputs), dtype=np.float32)
    data = np.ascontiguousarray(quantized_rows(values, kind))
    return data, torch.from_numpy(gguf.dequantize(data, kind)).double()


@dataclass
class Product:
    """A product by the library."""

    on: NativeRuntime
    dtype: torch.dtype
    inputs: int
    parts: list
    bias: torch.Tensor | None = None
    gated: bool = False

    def __call__(self, x):
        functions = self.on.functions
        sizes = [len(data) for _, data in self.parts]
        formats, outputs = (
            int32s(tuple(number for number, _ in self.parts)),
            (ctypes.c_int64 * len(sizes))(*sizes),
        )
        active = self.on.active_dtype(self.dtype)
        given, total = x.to(active).contiguous(), sum(sizes)
        out = torch.full(
            (len(x), total // 2 if self.gated else total), float("nan"), dtype=active if self.gated else torch.float32
        )
        linear = functions.ty_linear_new(
            *(self.on.pool, self.on.level, DTYPES[self.dtype], self.inputs, self.gated, len(sizes), formats, outputs)
        )
        assert linear, "parts do not fit"
        first = 0
        for number, (_, data) in enumerate(self.parts):
            own = None if self.bias is None else self.bias[first:].contiguous()
            where = address(data) if isinstance(data, torch.Tensor) else data.ctypes.data
            functions.ty_linear_set(linear, number, where, None if own is None else address(own))
            first += sizes[number]
        assert not functions.ty_linear_run(linear, address(given), len(x), address(out))
        functions.ty_linear_free(linear)
        return out


def rounded(x, name=""):
    """Rows as products take them, in float64: 32 inputs at a time become bytes with one scale; not for fp8."""
    if name.startswith("FP8"):
        return x.double()
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(dim=-1, keepdim=True)
    up = torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)
    return ((blocks * up).round().double() * (top / 127).double()).flatten(-2)


@FORMAT
def test_rows_are_those_of_the_gguf_package_bit_for_bit(name):
    data, whole = matrix(name, 9, 512)
    ids = torch.tensor([8, 0, 3, 3, 7])
    found = torch.empty(len(ids), 512)
    LIBRARY.functions.ty_unpack_rows(
        FORMATS[name].number, data.ctypes.data, address(ids), len(ids), 512, address(found)
    )
    assert torch.equal(found.double(), whole[ids])


@KERNELS
@FORMAT
def test_products_take_the_same_numbers(name, level):
    """A single input in a row shows the weights one by one."""
    data, whole = matrix(name, 50, 256)
    on = NativeRuntime(LIBRARY, 2, level)
    found = Product(on, torch.float32, 256, [(FORMATS[name].number, data)])(torch.eye(256) * 127)
    expected = whole.T * 127
    assert ((found - expected).abs() <= 4 * ROUNDING * (expected.abs() + whole.abs().max() * 127)).all()


CODES = {"Q4_1": slice(4, None), "Q5_1": slice(4, None), "Q4_K": slice(16, None), "Q5_K": slice(16, None)}
CODES |= {"Q6_K": slice(0, 192), "IQ4_XS": slice(8, None), "MXFP4": slice(1, None)}
CODES |= {"INT4_32": slice(5, None), "INT4_128": slice(5, None), "INT8_32": slice(4, None), "INT8_128": slice(4, None)}
"""Where a block's numbers lie, without its scales; behind a float16 in other formats."""


@KERNELS
@pytest.mark.parametrize("name", ROUNDED_FORMATS)
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_the_largest_numbers_are_whole(name, level, rows):
    """Sums of bytes that some instructions keep in 16 bits do not end at their limit."""
    form, outputs, inputs = FORMATS[name], 16, 256
    blocks = matrix(name, outputs, inputs)[0].reshape(-1, form.block_bytes)
    on = NativeRuntime(LIBRARY, 1, level)
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        blocks[:, CODES.get(name, slice(2, None))] = byte
        data = blocks.reshape(outputs, -1)
        whole = torch.empty(outputs, inputs)
        ids = torch.arange(outputs)
        LIBRARY.functions.ty_unpack_rows(form.number, data.ctypes.data, address(ids), outputs, inputs, address(whole))
        for sign in (1, -1):
            x = torch.full((rows, inputs), 127.0 * sign)
            x[:, 1::2] *= sign
            found = Product(on, torch.float32, inputs, [(form.number, data)])(x)
            size = x.abs().double() @ whole.double().abs().T
            assert ((found - x.double() @ whole.double().T).abs() <= 64 * ROUNDING * (size + 1)).all()


SIZES = [(1, 256, 1), (1, 512, 67), (3, 256, 16), (9, 768, 130), (13, 256, 33), (49, 256, 47), (100, 512, 96)]


@pytest.mark.part(4)
@KERNELS
@DTYPE
@FORMAT
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_products(level, dtype, name, rows, inputs, outputs):
    data, whole = matrix(name, outputs, inputs)
    x, bias = random(rows, inputs, seed=1, dtype=dtype), random(outputs, seed=3)
    x[0, :BLOCK] = 0.0
    on = NativeRuntime(LIBRARY, 2, level)
    found = Product(on, dtype, inputs, [(FORMATS[name].number, data)], bias)(x)
    expected = rounded(x, name) @ whole.T + bias.double()
    magnitude = rounded(x, name).abs() @ whole.abs().T + bias.abs().double() + 1e-3
    assert ((found - expected).abs() <= 64 * ROUNDING * magnitude).all()


@KERNELS
@DTYPE
@FORMAT
def test_a_row_does_not_depend_on_the_others(level, dtype, name):
    data, _ = matrix(name, 70, 256)
    product = Product(NativeRuntime(LIBRARY, 2, level), dtype, 256, [(FORMATS[name].number, data)])
    x = random(61, 256, seed=7, dtype=dtype)
    whole = product(x)
    for rows in (1, 2, 5, 8, 9, 48, 60):
        assert torch.equal(product(x[:rows]), whole[:rows])


@KERNELS
@FORMAT
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_an_odd_number_is_not_hidden_by_rounding(level, name, odd):
    data, _ = matrix(name, 20, 256)
    product = Product(NativeRuntime(LIBRARY, 2, level), torch.bfloat16, 256, [(FORMATS[name].number, data)])
    x = random(3, 256, seed=11, dtype=torch.bfloat16)
    whole = product(x)
    x[1, 35] = odd
    found = product(x)
    assert (found[1].isnan() if name in ROUNDED_FORMATS else ~found[1].isfinite()).all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@KERNELS
@DTYPE
def test_parts_of_several_formats(level, dtype):
    on, inputs = NativeRuntime(LIBRARY, 2, level), 256
    multiple = on.functions.ty_part_multiple(level)
    packed = [matrix(name, 2 * multiple, inputs, seed) for seed, name in enumerate(FORMATS)]
    stored = random(multiple, inputs, seed=9, dtype=dtype)
    last, last_whole = matrix("Q4_0", 19, inputs)
    parts = [(FORMATS[name].number, data) for name, (data, _) in zip(FORMATS, packed, strict=True)]
    bias = random(len(FORMATS) * 2 * multiple + multiple + 19, seed=4)
    x = random(11, inputs, seed=5, dtype=dtype)
    found = Product(on, dtype, inputs, [*parts, (STORED, stored), (FORMATS["Q4_0"].number, last)], bias)(x)
    of_packed = [rounded(x, name) @ whole.T for name, (_, whole) in zip(FORMATS, packed, strict=True)]
    exact = torch.cat([*of_packed, x.double() @ stored.double().T, rounded(x) @ last_whole.T], dim=1) + bias.double()
    assert ((found - exact).abs() <= 1e-4 * exact.abs().max()).all()


@KERNELS
@DTYPE
@FORMAT
def test_gated_products(level, dtype, name):
    on, half = NativeRuntime(LIBRARY, 2, level), 33
    data, whole = matrix(name, 2 * half, 256)
    data, whole = data.copy(), whole / whole.std() * 0.05
    x = random(7, 256, seed=5, dtype=dtype)
    found = Product(on, dtype, 256, [(FORMATS[name].number, data)], gated=True)(x)
    both = Product(on, dtype, 256, [(FORMATS[name].number, data)])(x).double()
    expected = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    of_result = 2.0**-9 if found.dtype == torch.bfloat16 else ROUNDING
    bound = 64 * ROUNDING * (expected.abs() + 1.0) + 2 * of_result * expected.abs()
    assert ((found.double() - expected).abs() <= bound).all()


# ---- whole models ----


@pytest.mark.part(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["llama", "moe"])
def test_a_model_computes_what_its_numbers_mean(models, monkeypatch, case, kind):
    path, plain = models(case, kind)
    prompt = prompt_of(40, seed=3)
    exact = all_logits(load(plain), prompt)
    for level in LIBRARY.levels():
        monkeypatch.setattr(LIBRARY, "level", level)
        off = all_logits(load(path), prompt) - exact
        # The rounding of activations to bytes; a token that goes to another expert moves more.
        bound = (0.05 if case == "llama" else 0.2) * exact.std()
        assert 1e-4 * exact.std() < off.pow(2).mean().sqrt() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_rounded_but_activations(models, kind):
    """The error is as large as that of transformers in float64 with the inputs of products rounded as ours are.

    It is another error: a number near the middle of two bytes becomes either, and so do others in the layers after it.
    """
    path, plain = models("llama", kind)
    prompt = prompt_of(40, seed=3)
    judge = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, attn_implementation="eager")

    def logits(activations):
        hooks = [
            module.register_forward_pre_hook(lambda _, given: (activations(given[0]),))
            for name, module in judge.named_modules()
            if isinstance(module, torch.nn.Linear) and not (kind == "partly" and "q_proj" in name)
        ]
        with torch.inference_mode():
            found = judge(torch.tensor([prompt])).logits[0].double()
        for hook in hooks:
            hook.remove()
        return found

    exact = logits(lambda x: x)
    by_bytes, own = logits(rounded) - exact, all_logits(load(path), prompt) - exact
    assert 0.8 < own.std() / by_bytes.std() < 1.25
    assert own.abs().max() < 1.5 * by_bytes.abs().max()


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "kind"), [("llama", "Q4_0"), ("llama", "Q4_K_M"), ("moe", "Q8_0"), ("moe", "Q4_K_M")])
def test_logits_are_the_same_bit_for_bit_under_every_schedule(models, case, kind, dtype):
    """With a fixed order of attention, chunks do not change a row; without it, other rows do not."""
    path, _ = models(case, kind)
    prompt = prompt_of(40, seed=3)
    whole, fixed = load(path, dtype=dtype), load(path, dtype=dtype, deterministic=True)
    expected = all_logits(fixed, prompt)[-1]
    for chunk in (1, 7, 8, 20, 40):
        driver = Driver(fixed)
        sequence, others = driver.start(prompt), [driver.start(prompt_of(5 + 9 * i, seed=i)) for i in range(3)]
        while sequence.total - sequence.planned > chunk:
            driver.step((sequence, chunk), *((one, None) for one in others))
        _, order, ticket = driver.launch((sequence, None), *((one, None) for one in others), delay=True)
        assert torch.equal(ticket.logits[order.index(sequence)].double(), expected)
    driver = Driver(whole)
    alone = driver.start(prompt)
    driver.step((alone, 39))
    _, _, ticket = driver.launch((alone, 1), delay=True)
    first = ticket.logits[0].clone()
    driver = Driver(whole)
    sequences = [driver.start(prompt), *(driver.start(prompt_of(5 + 9 * i, seed=i)) for i in range(5))]
    driver.step((sequences[0], 39), *((one, len(one.known) - 1) for one in sequences[1:]))
    _, order, ticket = driver.launch(*((one, 1) for one in sequences), delay=True)
    assert torch.equal(ticket.logits[order.index(sequences[0])], first)


def test_what_is_unpacked_is_said(models, caplog):
    path, _ = models("llama", "partly")
    with caplog.at_level("INFO"):
        load(path)
    lines = [record.getMessage() for record in caplog.records if "is unpacked" in record.getMessage()]
    # Three matrices of 256 x 256, 66 bytes for 256 numbers, become float32.
    assert lines == ["TQ2_0 is unpacked: 3 matrices (blk.0.attn_q.weight, ...) take 1 MB, 0 MB in the checkpoint"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M"])
def test_adapters_over_packed_weights(models, tmp_path, kind):
    """An adapter adds what it adds to the model of the numbers that the file's mean."""
    packed, exact = adapter_shifts(models("llama", kind), make_adapter(tmp_path / "adapter"))
    assert exact.std() > 0.1
    assert (packed - exact).std() < 0.1 * exact.std()


# ---- other checkpoints ----


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a model whose rows are whole blocks."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(LlamaConfig(**WIDE)).float().save_pretrained(folder)
    return folder


@pytest.mark.part(4)
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_awq_and_gptq_stay_packed(wide, tmp_path, case, caplog):
    quantized, whole = packed_checkpoint(wide, tmp_path, case)
    prompt = prompt_of(40, seed=3)
    exact = all_logits(load(whole), prompt)
    with caplog.at_level("INFO"):
        off = all_logits(load(quantized), prompt) - exact
    assert "is unpacked" not in caplog.text
    # Activations are rounded to bytes for integer weights, and to nothing for fp8.
    least = 0.0 if case.startswith("fp8") else 1e-4
    assert least * exact.std() < off.std() < 0.05 * exact.std()


def test_inputs_in_different_orders_are_unpacked(wide, tmp_path, caplog):
    quantized, _ = packed_checkpoint(wide, tmp_path, "gptq-order")
    file = Path(quantized, "model.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj."
    tensors[name + "g_idx"] = torch.arange(256).int() // 128
    save_file(tensors, file)
    with caplog.at_level("INFO"):
        load(quantized)
    # q, k and v of the layer; o_proj and the MLP are packed.
    assert "gptq is unpacked: 3 matrices" in caplog.text


def test_gpt_oss_experts_stay_packed(tmp_path, caplog):
    packed, plain = gpt_oss_checkpoint(tmp_path)
    prompt = prompt_of(20, seed=3)
    exact = all_logits(load(plain), prompt)
    off = all_logits(load(packed), prompt) - exact
    assert 1e-4 * exact.std() < off.std() < 0.3 * exact.std()


@pytest.mark.parametrize(("quantization", "bound"), [("q8", 0.06), ("q4", 0.5)])
@pytest.mark.parametrize("case", ["llama", "moe"])
def test_a_model_is_quantized_as_it_loads(wide, tmp_path, quantization, bound, case):
    source = wide
    if case == "moe":
        source = tmp_path
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(WIDE | MODELS["moe"][2]))).float().save_pretrained(source)
        bound = max(0.3, bound)
    prompt = prompt_of(40, seed=3)
    exact, executor = all_logits(load(str(source)), prompt), load(str(source), quantization=quantization)
    assert executor.info.kernels.startswith(f"{quantization} native ")
    off = all_logits(executor, prompt) - exact
    assert 1e-3 * exact.std() < off.std() < bound * exact.std()


def test_numbers_quantized_on_load_are_near():
    weight = random(8, 256, seed=1)
    weight[0, :BLOCK] = 0.0
    for quantize, name, most in ((q8_0, "Q8_0", 0.006), (q4_0, "Q4_0", 0.088)):
        whole = torch.from_numpy(gguf.dequantize(quantize(weight), gguf.GGMLQuantizationType[name]))
        assert (whole - weight).square().mean().sqrt() < most
        assert not whole[0, :BLOCK].any()
