"""Loads the weights in a folder into the layers that compute a model, and writes converted weights."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tokenyard.base import ConfigError
from tokenyard.base.version import __version__
from tokenyard.executor.backend_choice import BITS_ON_LOAD
from tokenyard.executor.distributed.partition import ModelPartition
from tokenyard.executor.formats.converted import (
    BESIDE,
    ConvertedFile,
    ConvertedFileWriter,
    UnusableFileError,
    WeightsMemory,
)
from tokenyard.executor.formats.on_load import QuantizedOnLoad
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.gguf_file.folder import LINK
from tokenyard.executor.gguf_file.weights import GgufWeights
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.layers.parallel import TensorParallelComm
from tokenyard.executor.load_options import (
    LoadOptions,
    LoadSpec,
    backends_for,
    choose_context_length,
    choose_dtype,
    refuse_unsupported,
)
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.draft_head import draft_head_names
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.models.stacked_params import checkpoint_weights, cut_out
from tokenyard.executor.native.build import library_name
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.native.moe import NativeMoe
from tokenyard.executor.weights import DummyWeights, SafetensorsFile, SafetensorsWeights, Weights, read_json

logger = logging.getLogger(__name__)


def read_folder_config(folder: Path) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json. Raises ConfigError."""
    generation = folder / "generation_config.json"
    return read_model_config(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


def read_spec(
    folder: Path, given: LoadOptions, device: torch.device, part: ModelPartition | None = None, sharing: int = 1
) -> LoadSpec:
    """Read the config of the model in `folder` and choose what the options leave open; see LoadSpec.

    Raises ConfigError for options and models that do not fit.
    """
    whole = read_folder_config(folder)
    refuse_unsupported(whole, given, part)
    config = whole if part is None else part.config(whole)
    dtype = choose_dtype(given.dtype, device, config)
    length = choose_context_length(given.context_length, config)
    choice = backends_for(given, config, dtype, device)
    return LoadSpec(folder, given, part, whole, config, device, dtype, length, choice, sharing)


@torch.inference_mode()
def load_folder(spec: LoadSpec, updates: tuple[SafetensorsFile, ...] | None = None) -> Decoder | NativeDecoder:
    """Load a model's weights into layers.

    updates: given for weights that replace those in use; see SafetensorsWeights. Raises ConfigError.
    """
    part, load_format = spec.part, spec.given.load_format
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"load_format {load_format!r} is unknown; use auto, safetensors or dummy")
    try:
        unpacked = UnpackedMatrices()
        weights, files = _open_weights(spec, unpacked, updates)
        if part is not None:
            weights = part.weights(weights, spec.whole)
        load = partial(load_layers, spec, weights, None if part is None else part.tp_comm)
        # Converted files hold the checkpoint, not what replaces it.
        layers = _load_converted(load, spec) if updates is None else None
        if not (mapped := layers is not None):
            layers = load()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the weights in {spec.folder} do not fit the free memory of {spec.device}") from error
    # Of a model whose weights are mapped, the matrices of the checkpoint are not read.
    if files is not None and not mapped and (part is None or part.takes_all):
        names = draft_head_names(spec.config)
        files.warn_unused(() if names is None else (names.layer,))
    unpacked.log()
    return layers


def load_layers(
    spec: LoadSpec, weights: Weights, tp_comm: TensorParallelComm | None = None, memory: WeightsMemory | None = None
) -> Decoder | NativeDecoder:
    """Load a model's weights into the layers of the chosen backend. tp_comm: see Decoder; memory: see NativeDecoder.

    Raises ConfigError if a tensor is missing or has the wrong shape.
    """
    choice, config, dtype, length = spec.choice, spec.config, spec.dtype, spec.context_length
    if choice.engine is not None and choice.native_model:
        return NativeDecoder(
            *(choice.engine, config, weights, dtype, length), int8=choice.int8, kv_dtype=choice.kv_dtype, memory=memory
        )
    experts = None if choice.engine is None else partial(NativeMoe, choice.engine, dtype)
    return Decoder(config, weights, spec.device, length, tp_comm, experts)


def _load_converted(load: Callable[..., Decoder | NativeDecoder], spec: LoadSpec) -> Decoder | NativeDecoder | None:
    """Load a model from its converted file; None where there is none that fits."""
    path = converted_path(spec.folder)
    if not spec.choice.native_model or spec.given.load_format == "dummy" or not path.exists():
        return None
    try:
        found = load(memory=ConvertedFile(path, _facts(spec), spec.folder))
    except UnusableFileError as error:
        logger.warning("%s; it is ignored", error.message)
        return None
    logger.info("weights are mapped from %s", path)
    return found


def converted_path(folder: Path) -> Path:
    """Return where `convert_weights` puts its file: next to the GGUF file, or in the folder."""
    link = folder / LINK
    file = link.resolve() if link.exists() else folder / "model"
    return file.with_name(file.name + BESIDE)


def convert_weights(model_path: str, dtype: str, quantization: str, threads: int = 0) -> tuple[Path, int]:
    """Write a model's weights as native products on this machine take them, to be mapped at later starts.

    dtype, quantization, threads: see LoadOptions. Memory is bounded, as the file is mapped while it is written. Returns
    its path and bytes. Raises ConfigError, in one line.
    """
    given = LoadOptions(dtype=dtype, quantization=quantization, threads=threads, model_impl="native", context_length=1)
    spec = read_spec(resolve_model_path(model_path), given, torch.device("cpu"))
    path = converted_path(spec.folder)
    writer = ConvertedFileWriter(path, _facts(spec), spec.folder)
    unpacked = UnpackedMatrices()
    try:
        with torch.inference_mode():
            weights, _ = _open_weights(spec, unpacked)
            load_layers(spec, weights, memory=writer)
        size = writer.finish()
    finally:
        writer.discard()
    unpacked.log()
    return path, size


def _facts(spec: LoadSpec) -> dict[str, str]:
    """What the bytes of a converted file depend on besides those of the checkpoint."""
    assert spec.choice.engine is not None
    return {
        # Python decides bytes too: it reads, reorders and quantizes what the kernels lay out.
        "kernels": f"{library_name()} of {__version__}",
        "instructions": spec.choice.engine.name,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.given.quantization,
        "config": hashlib.blake2b((spec.folder / "config.json").read_bytes(), digest_size=16).hexdigest(),
    }


def _open_weights(
    spec: LoadSpec, unpacked: UnpackedMatrices, updates: tuple[SafetensorsFile, ...] | None = None
) -> tuple[Weights, SafetensorsWeights | None]:
    """The tensors of a model, and the files that they come from if those are safetensors."""
    folder, config, device, dtype = spec.folder, spec.whole, spec.device, spec.dtype
    files: SafetensorsWeights | None = None
    weights: Weights
    if spec.given.load_format == "dummy" and updates is None:
        weights = DummyWeights(device, dtype, spec.given.seed)
    elif (folder / LINK).exists():
        if updates:
            raise ConfigError("tensors of a GGUF model cannot be replaced one by one; update it from disk")
        heads = config.num_heads, config.num_kv_heads
        weights = GgufWeights(folder / LINK, device, dtype, *heads, unpacked)
        # Files of Granite 4 have separate matrices for gate and up of an MLP.
        weights = weights if config.architecture == "GraniteMoeHybridForCausalLM" else cut_out(config, weights)
    else:
        files = SafetensorsWeights(folder, device, dtype, updates or (), finite=updates is not None)
        weights = checkpoint_weights(config, files, unpacked)
    bits = BITS_ON_LOAD.get(spec.given.quantization)
    return (weights if bits is None else QuantizedOnLoad(weights, bits)), files
