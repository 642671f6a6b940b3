"""Reads the matrices of a LoRA adapter, and checks that they are those of an adapter for this model."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from tokenyard.base import ConfigError
from tokenyard.executor.lora_config import CONFIG_NAME, PROJECTIONS, WEIGHTS_NAME, read_lora_config
from tokenyard.executor.models.config import DeltaNetConfig, Mamba2Config, ModelConfig, ShortConvConfig
from tokenyard.executor.models.stacked_params import cut_out

HEADER_BYTES = 16 << 20

_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.(?:language_model\.)?layers\.(?P<layer>\d{1,5})\.(?P<path>\w+\.\w+))"
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


@dataclass(frozen=True, slots=True)
class _Part:
    """A projection that is made of rows (int64[outputs]) of a module of the checkpoint."""

    layer: int
    projection: str
    rows: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Module:
    """A linear module of the checkpoint that an adapter can change.

    inputs, outputs: its sizes. parts: what it is for the decoder, which has several projections for some.
    """

    inputs: int
    outputs: int
    parts: list[_Part]


class _RowNumbers:
    """See Weights. Rows hold their own numbers, so that a part of a tensor shows where it is from."""

    name, rows = "", 0

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return int64[rows, 1]."""
        self.name, self.rows = name, shape[0]
        return torch.from_numpy(np.arange(shape[0])).unsqueeze(1)


def projection_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Inputs and outputs of the projections of a layer that adapters can change; experts are none of them."""
    hidden, inter = config.hidden_size, config.intermediate_size
    if config.recurrent is not None and layer in config.recurrent.layers:
        shapes = _mixer_shapes(config)
    else:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = dict(zip(PROJECTIONS[:4], ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden)), strict=True))
        if config.output_gate:
            shapes["q_gate"] = (hidden, q)
    if config.experts is None or layer not in config.experts.layers:
        shapes |= {"gate_proj": (hidden, inter), "up_proj": (hidden, inter), "down_proj": (inter, hidden)}
    return shapes


def _mixer_shapes(config: ModelConfig) -> Shapes:
    """The projections of a layer with a recurrent state."""
    hidden, own = config.hidden_size, config.recurrent
    if isinstance(own, DeltaNetConfig):
        values = own.value_heads * own.value_dim
        outputs = {"qkv": own.channels, "z": values, "b": own.value_heads, "a": own.value_heads}
        return {f"in_proj_{name}": (hidden, size) for name, size in outputs.items()} | {"out_proj": (values, hidden)}
    if isinstance(own, Mamba2Config):
        inner = own.heads * own.head_dim
        return {"in_proj": (hidden, inner + own.channels + own.heads), "out_proj": (inner, hidden)}
    return {"in_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden)}


def _modules(config: ModelConfig) -> dict[str, _Module]:
    """What adapters can change, by the names of the checkpoint."""
    mixers = {DeltaNetConfig: "linear_attn", Mamba2Config: "mamba", ShortConvConfig: "conv"}
    mixer = "" if config.recurrent is None else mixers[type(config.recurrent)]
    places = dict.fromkeys(PROJECTIONS[:4], "self_attn") | dict.fromkeys(PROJECTIONS[4:], "mlp")
    found: dict[str, _Module] = {}
    for layer in range(config.num_layers):
        shapes = projection_shapes(config, layer)
        for name, (inputs, outputs) in shapes.items():
            if name == "q_gate":
                continue
            gated = name == "q_proj" and "q_gate" in shapes
            source = _RowNumbers()
            stored = f"model.layers.{layer}.{places.get(name, mixer)}.{name}.weight"
            rows = cut_out(config, source).get(stored, (2 * outputs if gated else outputs, 1))[:, 0].numpy()
            module = found.setdefault(source.name.removesuffix(".weight"), _Module(inputs, source.rows, []))
            if gated:
                # A checkpoint has the gates of each head after its query.
                both = rows.reshape(config.num_heads, 2, config.head_dim)
                module.parts.append(_Part(layer, "q_gate", both[:, 1].reshape(-1)))
                rows = both[:, 0].reshape(-1)
            module.parts.append(_Part(layer, name, rows))
    return found


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
            modules = _modules(config)
            found = _check_names(list(file.keys()), config, modules, path)
            pairs = {}
            for own, sides in sorted(found.items()):
                module = modules[own]
                rank, names = lora.rank_of(sides["module"]), (sides["A"], sides["B"])
                wanted = ((rank, module.inputs), (module.outputs, rank))
                for name, each in zip(names, wanted, strict=True):
                    _check_shape(path, name, tuple(file.get_slice(name).get_shape()), each, config)
                a, b = (_checked(path, name, file.get_tensor(name)) for name in names)
                for part in module.parts:
                    matrices = LoraMatrices(a, _rows(b, part.rows), lora.scale_of(sides["module"]))
                    pairs[part.layer, part.projection] = matrices
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from error
    return LoraWeights(pairs)


def _max_bytes(config: ModelConfig, rank: int) -> int:
    """Bytes that no file of an adapter up to this rank exceeds: float32 for all projections, and names."""
    shapes = (projection_shapes(config, layer).values() for layer in range(config.num_layers))
    return HEADER_BYTES + 4 * rank * sum(inputs + outputs for each in shapes for inputs, outputs in each)


def _check_names(
    names: list[str], config: ModelConfig, modules: dict[str, _Module], path: Path
) -> dict[str, dict[str, str]]:
    """The tensors by the name of their module in `modules`: its name in the adapter, and the names of sides A and B.
    Raises ConfigError for others.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            served = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ConfigError(f"{path}: {_what_is(name)}; served are {served} of the layers")
        layer, own = int(match["layer"]), match["module"].replace(".language_model", "")
        if layer >= config.num_layers:
            raise ConfigError(
                f"{path}: the adapter changes layer {layer} and this model has {config.num_layers};"
                " it is for another base model"
            )
        if own not in modules:
            what = match["path"].rpartition(".")[2]
            raise ConfigError(f"{path}: this model has no {what} in layer {layer} that an adapter could change")
        sides = found.setdefault(own, {"module": match["module"]})
        if match["side"] in sides:
            raise ConfigError(f"{path}: {own} is there under two names, {sides[match['side']]} and {name}")
        sides[match["side"]] = name
    for own, sides in found.items():
        if len(sides) < 3:
            raise ConfigError(f"{path}: {own} has only one of its two matrices")
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


def _rows(matrix: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return rows of a matrix, copied only if they are not next to each other."""
    if (np.diff(rows) == 1).all():
        return matrix[int(rows[0]) : int(rows[0]) + len(rows)]
    kind, _ = _EXPONENTS[matrix.dtype]
    # By numpy, which starts no threads.
    return torch.from_numpy(matrix.view(kind).numpy()[rows]).view(matrix.dtype)
