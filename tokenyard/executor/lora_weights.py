"""Reads the matrices of a LoRA adapter, and checks that they are those of an adapter for this model."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenyard.base import ConfigError
from tokenyard.executor.lora_config import CONFIG_NAME, PROJECTIONS, WEIGHTS_NAME, LoraConfig, read_lora_config
from tokenyard.executor.models.config import ModelConfig

logger = logging.getLogger(__name__)

HEADER_BYTES = 16 << 20

_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>\d{1,5})\.(?:self_attn|mlp)\.(?P<projection>\w+))"
    r"\.lora_(?P<side>[AB])\.weight"
)
_EXPONENTS = {torch.float32: (torch.int32, 0x7F800000), torch.bfloat16: (torch.int16, 0x7F80)} | {
    torch.float16: (torch.int16, 0x7C00)
}
"""The bits of a number's exponent, all of which are set in infinities and NaN."""

Shapes = dict[str, tuple[int, int]]


@dataclass(slots=True)
class LoraMatrices:
    """One projection's change, `scale * b @ a`, both matrices as the file has them.

    a: [rank, inputs].
    b: [outputs, rank].
    scale: from the adapter's config.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(slots=True)
class LoraWeights:
    """All changes of one adapter, by layer and projection."""

    pairs: dict[tuple[int, str], LoraMatrices]


def projection_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Inputs and outputs of the projections of a layer that adapters can change; experts are none of them."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inter), (hidden, inter), (inter, hidden))
    shapes = dict(zip(PROJECTIONS, sizes, strict=True))
    if config.experts is not None and layer in config.experts.layers:
        shapes = {name: shapes[name] for name in PROJECTIONS[:4]}
    return shapes


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> LoraWeights:
    """Read an adapter in peft's form. Sizes and shapes are checked before any matrix is read, so a huge file costs
    nothing.

    Runs no parallel code of torch, because a thread next to the event loop calls it.

    Raises ConfigError, in one line, for an adapter of another kind, for another model, above `max_rank`, or with
    numbers that are not finite.
    """
    lora = read_lora_config(folder)
    if lora.max_rank > max_rank:
        raise ConfigError(
            f"{folder / CONFIG_NAME}: the adapter has rank {lora.max_rank}; this server takes up to {max_rank}"
            " (--max-lora-rank)"
        )
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ConfigError(f"there is no {WEIGHTS_NAME} in {folder}; save the adapter with safe_serialization=True")
    size, most = path.stat().st_size, _max_bytes(config, max_rank)
    if size > most:
        raise ConfigError(f"{path} has {size} bytes; an adapter of rank {max_rank} for this model has at most {most}")
    try:
        with safe_open(path, framework="pt") as file:
            found = _check_names(list(file.keys()), config, path)
            pairs = {}
            for (layer, projection), sides in sorted(found.items()):
                module, shape = sides["module"], projection_shapes(config, layer)[projection]
                rank, names = lora.rank_of(module), (sides["A"], sides["B"])
                wanted = ((rank, shape[0]), (shape[1], rank))
                for name, each in zip(names, wanted, strict=True):
                    _check_shape(path, name, tuple(file.get_slice(name).get_shape()), each, config)
                a, b = (_checked(path, name, file.get_tensor(name)) for name in names)
                pairs[layer, projection] = LoraMatrices(a, b, lora.scale_of(module))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from error
    return LoraWeights(pairs)


def _max_bytes(config: ModelConfig, rank: int) -> int:
    """Bytes that no file of an adapter up to this rank exceeds: float32 for all projections, and names."""
    shapes = (projection_shapes(config, layer).values() for layer in range(config.num_layers))
    return HEADER_BYTES + 4 * rank * sum(inputs + outputs for each in shapes for inputs, outputs in each)


def _check_names(names: list[str], config: ModelConfig, path: Path) -> dict[tuple[int, str], dict[str, str]]:
    """The tensors by layer and projection: module, and the names of sides A and B. Raises ConfigError for others."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{path}: {_what_is(name)}; served are {', '.join(PROJECTIONS)} of the layers")
        layer, projection = int(match["layer"]), match["projection"]
        if layer >= config.num_layers:
            raise ConfigError(
                f"{path}: the adapter changes layer {layer} and this model has {config.num_layers};"
                " it is for another base model"
            )
        if projection not in projection_shapes(config, layer):
            raise ConfigError(f"{path}: this model has no {projection} in layer {layer} that an adapter could change")
        found.setdefault((layer, projection), {"module": match["module"]})[match["side"]] = name
    for (layer, projection), sides in found.items():
        if len(sides) < 3:
            raise ConfigError(f"{path}: {projection} of layer {layer} has only one of its two matrices")
    if not found:
        raise ConfigError(f"{path} holds no matrices of an adapter")
    return found


def _what_is(name: str) -> str:
    """What a tensor that is not served seems to be."""
    for part, what in (
        ("embed_tokens", "the adapter changes the embedding (embed_tokens)"),
        ("lm_head", "the adapter changes the output head (lm_head)"),
        ("lora_magnitude_vector", "this is a DoRA adapter"),
        (".experts.", "the adapter changes experts"),
        ("modules_to_save", "the adapter replaces whole modules (modules_to_save)"),
        (".bias", "the adapter changes biases"),
    ):
        if part in name:
            return what
    return f"the tensor {name[:120]!r} is not one that adapters have here"


def _check_shape(path: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, int], config: ModelConfig) -> None:
    if shape != wanted:
        raise ConfigError(
            f"{path}: {name} has shape {shape}; its rank and this model (hidden size {config.hidden_size})"
            f" mean {wanted}"
        )


def _checked(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if all its numbers are finite: in a product of several adapters, others' rows would meet them."""
    if tensor.dtype not in _EXPONENTS:
        raise ConfigError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}; use float32, 16 or bfloat16")
    kind, bits = _EXPONENTS[tensor.dtype]
    # By numpy, which starts no threads.
    if bool(((tensor.view(kind).numpy() & bits) == bits).any()):
        raise ConfigError(f"{path}: {name} holds numbers that are not finite")
    return tensor


def warn_of_other_base(lora: LoraConfig, model: str, name: str) -> None:
    """Log where an adapter names another base model than the one that is served; paths differ, so it may be right."""
    served, made_for = Path(model).name.lower(), Path(lora.base).name.lower()
    if made_for and made_for != served:
        logger.warning("adapter %s was made for %s, and this is %s; its shapes fit", name, lora.base, model)
