"""Tiny models whose matrices are packed, each with a folder of the numbers that they mean."""

import functools
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from tests.executor.driver import Driver
from tests.executor.gguf_maker import write_gguf
from tests.executor.test_quantized import words
from tests.executor.tiny_models import FAMILY_CASES, SMALL, prompt_of
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.quantized import AWQ_ORDER, mxfp4


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WIDE = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "initializer_range": 0.05}
MODELS = {
    "llama": (LlamaConfig, "llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "moe": (
        Qwen3MoeConfig,
        "qwen3moe",
        {"moe_intermediate_size": 256, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "windows": (Gemma2Config, "gemma2", {"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 32}),
}


def mixed(name):
    """As Q4_K_M has them."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or "token_embd" in name else "Q4_K"


def partly(name):
    """One of three matrices is of a kind that has no format."""
    return "TQ2_0" if "attn_q" in name else "Q8_0"


GGUF_FORMATS = [name for name in FORMATS if not name.startswith(("INT", "FP8"))]
KINDS = {
    **{name: name for name in GGUF_FORMATS},
    "Q4_K_M": mixed,
    "partly": partly,
}


def save_plain(config_type, fields, folder):
    """Write a model of random numbers."""
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config_type(**(WIDE | fields))).float().save_pretrained(folder)


def save_gguf(source, case, kind):
    """Write a model as one GGUF file; returns its path and a folder of the numbers that the file's mean."""
    config_type, architecture, fields = MODELS[case]
    save_plain(config_type, fields, source)
    path, plain = source / "there.gguf", source / "plain"
    whole = write_gguf(source, path, KINDS[kind], architecture)
    plain.mkdir()
    (plain / "config.json").write_text((source / "config.json").read_text())
    save_file({name: torch.tensor(values) for name, values in whole.items()}, plain / "model.safetensors")
    return str(path), str(plain)


def packed_saver(tmp_path_factory):
    """Return a function from a model and a kind, of GGUF or of CHECKPOINTS, to what save_gguf returns; saved once."""

    @functools.cache
    def get(case, kind):
        folder = tmp_path_factory.mktemp(f"{case}-{kind}")
        if kind in KINDS:
            return save_gguf(folder, case, kind)
        save_plain(MODELS[case][0], MODELS[case][2], folder)
        return packed_checkpoint(folder, folder, kind)

    return get


def load(path, model_impl="native", dtype="float32", **options):
    return load_executor(
        path, device="cpu", dtype=dtype, max_total_tokens=1024, max_pool_rows=8, model_impl=model_impl, **options
    )


def all_logits(executor, prompt):
    """Of every token of a prompt, float64."""
    driver = Driver(executor)
    driver.launch((driver.start(prompt), None), delay=True)
    return executor.model.logits(0, len(prompt)).double()


def gpt_oss_checkpoint(folder):
    """Write a gpt-oss with experts of mxfp4 and one of the numbers that these mean; returns the path of each."""
    fields = FAMILY_CASES["gpt-oss"][1] | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**(SMALL | fields))).float()
    config, found, whole = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}, {}, {}
    for name, tensor in model.state_dict().items():
        found[name] = whole[name] = tensor
        if "experts" in name and not name.endswith("_bias"):
            experts, inputs, outputs = tensor.shape
            rng = torch.Generator().manual_seed(len(name))
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng, dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=rng, dtype=torch.uint8)
            del found[name]
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole[name] = mxfp4(blocks, scales).transpose(1, 2)
    for part, tensors, extra in (("q", found, {"quantization_config": {"quant_method": "mxfp4"}}), ("w", whole, {})):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config | extra))
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / part / "model.safetensors")
    return str(folder / "q"), str(folder / "w")


def make_adapter(folder):
    """An adapter of rank 4 for some of the llama's projections."""
    shapes = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (256, 64), "mlp.up_proj": (256, 512)}
    shapes["mlp.down_proj"] = (512, 256)
    tensors = {}
    for layer in range(3):
        for seed, (name, (inputs, outputs)) in enumerate(shapes.items()):
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors |= {f"{prefix}A.weight": random(4, inputs, seed=seed) * 0.1}
            tensors |= {f"{prefix}B.weight": random(outputs, 4, seed=seed + 10) * 0.1}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def packed_checkpoint(source, target, case):
    """A tiny model whose projections are those of CHECKPOINTS, and one of the numbers that they mean."""
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    quantization, make, options = CHECKPOINTS[case]
    rng, quantized, whole = torch.Generator().manual_seed(5), {}, {}
    order = torch.arange(512)[torch.randperm(512, generator=rng)]
    for name, tensor in sorted(tensors.items()):
        quantized[name] = whole[name] = tensor
        if "_proj.weight" in name:
            del quantized[name]
            parts, whole[name] = make(rng, *tensor.shape, order, **options)
            quantized |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    for folder, found, extra in (
        (target / "q", quantized, {"quantization_config": quantization}),
        (target / "w", whole, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | extra))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    return str(target / "q"), str(target / "w")


def as_int4(rng, outputs, inputs, order, *, form, group, shuffled=False):
    """Parts of a matrix of four bits, and its numbers."""
    values = torch.randint(0, 16, (outputs, inputs), generator=rng)
    zeros = torch.randint(0, 15, (outputs, inputs // group), generator=rng)
    scales = (torch.rand(outputs, inputs // group, generator=rng) * 0.01 + 0.001).half()
    groups = torch.arange(inputs) // group
    if shuffled:
        groups = groups[order[order < inputs]]
    whole = (values - zeros[:, groups]).float() * scales[:, groups].float()
    if form == "awq":
        parts = {"qweight": words(values.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    elif form == "gptq":
        parts = {"qweight": words(values, 4).T, "qzeros": words((zeros.T - 1) % 16, 4), "scales": scales.T}
        parts["g_idx"] = groups.int()
        whole = (values - ((zeros - 1) % 16 + 1)[:, groups]).float() * scales[:, groups].float()
    else:
        parts = {"weight_packed": words(values, 4), "weight_scale": scales.bfloat16()}
        parts["weight_zero_point"] = words(zeros.T, 4).T
        whole = (values - zeros[:, groups]).float() * scales.bfloat16()[:, groups].float()
    return parts, whole


def as_bytes(rng, outputs, inputs, order, *, kind, block=None):
    """Parts of a matrix of fp8 or int8 with a scale for each output or block, and its numbers."""
    raw = torch.randn(outputs, inputs, generator=rng)
    weight = raw.to(torch.float8_e4m3fn) if kind == "fp8" else (raw * 40).round().clamp(-128, 127).to(torch.int8)
    rows, columns = block or (1, inputs)
    scale = torch.rand(-(-outputs // rows), -(-inputs // columns), generator=rng) * 0.05 + 0.01
    scale = scale if kind == "fp8" else scale / 40
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    return {"weight": weight, "weight_scale_inv" if block else "weight_scale": scale}, weight.float() * spread


def whole_bytes(form):
    """The configuration of a compressed-tensors checkpoint of eight bits."""
    weights = {"g": {"weights": {"num_bits": 8}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": weights}


PACK_QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4}}},
}
CHECKPOINTS = {
    "awq": ({"quant_method": "awq", "bits": 4}, as_int4, {"form": "awq", "group": 128}),
    "gptq": ({"quant_method": "gptq", "bits": 4}, as_int4, {"form": "gptq", "group": 64}),
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        as_int4,
        {"form": "gptq", "group": 128, "shuffled": True},
    ),
    "compressed": (PACK_QUANTIZED, as_int4, {"form": "compressed", "group": 32}),
    "int8": (whole_bytes("int-quantized"), as_bytes, {"kind": "int8"}),
    "fp8": (whole_bytes("float-quantized"), as_bytes, {"kind": "fp8"}),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        as_bytes,
        {"kind": "fp8", "block": (16, 32)},
    ),
}


def adapter_shifts(folders, adapter):
    """What an adapter adds to the logits of each model."""
    prompt, moved = prompt_of(20, seed=3), []
    for folder in folders:
        executor = load(folder, lora_slots=1, lora_rank=4)
        without = all_logits(executor, prompt)
        executor.load_adapter("own", adapter)
        driver = Driver(executor)
        driver.launch((driver.start(prompt, adapter=("own", 1)), None), delay=True)
        moved.append(executor.model.logits(0, len(prompt)).double() - without)
    return moved
