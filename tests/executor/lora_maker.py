"""Makes LoRA adapters in peft's form for the tiny models, and what they come to when merged into the weights."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.executor.tiny_models import judge
from tokenyard.executor.lora_config import PROJECTIONS


def modules_of(case, targets):
    """The linear layers of a tiny model that `targets` name, by name."""
    return {
        name: module
        for name, module in judge(case).named_modules()
        if name.rpartition(".")[2] in targets and "experts" not in name
    }


def save_adapter(folder, case, *, rank=4, seed=0, targets=PROJECTIONS, ranks=None, dtype=torch.float32, **fields):
    """Write an adapter whose changes are about as large as the weights. `ranks`: of single modules, by their names.

    `fields` go into its config.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in modules_of(case, targets).items():
        own = (ranks or {}).get(name, rank)
        shapes = {"A": (own, module.in_features), "B": (module.out_features, own)}
        for side, shape in shapes.items():
            matrix = torch.randn(shape, generator=generator) * 0.15
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = matrix.to(dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    config |= {"rank_pattern": ranks or {}, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def merged(case, folder, scale):
    """The tiny model with `scale(module name, rank) * B @ A` added to its weights."""
    model, tensors = copy.deepcopy(judge(case)), load_file(Path(folder) / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                model.get_submodule(module).weight.add_(scale(module, len(a)) * b.float() @ a.float())
    return model


def logits_of(model, ids):
    """float32[len(ids), vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
