"""Loads the weights in a folder into the layers that compute a model, and writes converted weights."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from tokenyard.base import ConfigError
from tokenyard.base.version import __version__
from tokenyard.executor.backend_choice import BITS_ON_LOAD, BackendChoice, load_layers
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
from tokenyard.executor.load_options import LoadOptions, backends_for, choose_dtype
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.draft_head import draft_head_names
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.models.stacked_params import checkpoint_weights, cut_out
from tokenyard.executor.native.build import library_name
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.weights import DummyWeights, SafetensorsFile, SafetensorsWeights, Weights, read_json

logger = logging.getLogger(__name__)


def read_folder_config(folder: Path) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json. Raises ConfigError."""
    generation = folder / "generation_config.json"
    return read_model_config(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


@torch.inference_mode()
def load_folder(
    choice: BackendChoice,
    config: ModelConfig,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
    part: ModelPartition | None,
    updates: tuple[SafetensorsFile, ...] | None = None,
) -> Decoder | NativeDecoder:
    """Load the weights in `folder`. updates: given for weights that replace those in use; see SafetensorsWeights."""
    if given.load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"load_format {given.load_format!r} is unknown; use auto, safetensors or dummy")
    try:
        unpacked = UnpackedMatrices()
        weights, files = _open_weights(config, folder, given, device, dtype, unpacked, updates)
        if part is not None:
            weights = part.weights(weights, config)
            config = part.config(config)
        tp_comm = part.tp_comm if part is not None else None

        def load(memory: WeightsMemory | None) -> Decoder | NativeDecoder:
            return load_layers(choice, config, weights, device, dtype, context_length, tp_comm, memory)

        # Converted files are made of the checkpoint, not of what replaces it.
        if updates is None:
            layers, mapped = _load_converted(load, choice, folder, given, dtype)
        else:
            layers, mapped = load(None), False
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the weights in {folder} do not fit the free memory of {device}") from error
    # Of a model whose weights are mapped, the matrices of the checkpoint are not read.
    if files is not None and not mapped and (part is None or part.takes_all):
        names = draft_head_names(config)
        files.warn_unused(() if names is None else (names.layer,))
    unpacked.log()
    return layers


def _load_converted(
    load: Callable[[WeightsMemory | None], Decoder | NativeDecoder],
    choice: BackendChoice,
    folder: Path,
    given: LoadOptions,
    dtype: torch.dtype,
) -> tuple[Decoder | NativeDecoder, bool]:
    """Load a model, from its converted file where there is one that fits. Returns whether it was."""
    path = converted_path(folder)
    if not choice.native_model or given.load_format == "dummy" or not path.exists():
        return load(None), False
    try:
        found = load(ConvertedFile(path, _facts(choice, folder, dtype, given.quantization), folder))
    except UnusableFileError as error:
        logger.warning("%s; it is ignored", error.message)
        return load(None), False
    logger.info("weights are mapped from %s", path)
    return found, True


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
    given = LoadOptions(device="cpu", dtype=dtype, quantization=quantization, threads=threads, model_impl="native")
    folder, device = resolve_model_path(model_path), torch.device("cpu")
    config = read_folder_config(folder)
    kind = choose_dtype(dtype, device, config)
    choice = backends_for(given, config, kind, device)
    path = converted_path(folder)
    writer = ConvertedFileWriter(path, _facts(choice, folder, kind, quantization), folder)
    unpacked = UnpackedMatrices()
    try:
        with torch.inference_mode():
            weights, _ = _open_weights(config, folder, given, device, kind, unpacked, None)
            load_layers(choice, config, weights, device, kind, 1, memory=writer)
        size = writer.finish()
    finally:
        writer.discard()
    unpacked.log()
    return path, size


def _facts(choice: BackendChoice, folder: Path, dtype: torch.dtype, quantization: str) -> dict[str, str]:
    """What decides the bytes of a converted file, beside the checkpoint's."""
    assert choice.engine is not None
    return {
        # Python decides bytes too: it reads, reorders and quantizes what the kernels lay out.
        "kernels": f"{library_name()} of {__version__}",
        "instructions": choice.engine.name,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
        "config": hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16).hexdigest(),
    }


def _open_weights(
    config: ModelConfig,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    unpacked: UnpackedMatrices,
    updates: tuple[SafetensorsFile, ...] | None = None,
) -> tuple[Weights, SafetensorsWeights | None]:
    """The tensors of a model, and the files that they come from if those are safetensors."""
    files: SafetensorsWeights | None = None
    weights: Weights
    if given.load_format == "dummy" and updates is None:
        weights = DummyWeights(device, dtype, given.seed)
    elif (folder / LINK).exists():
        if updates:
            raise ConfigError("tensors of a GGUF model cannot be replaced one by one; update it from disk")
        heads = config.num_heads, config.num_kv_heads
        weights = GgufWeights(folder / LINK, device, dtype, *heads, unpacked)
        # Those of Granite 4 have gate and up of an MLP as matrices of their own.
        weights = weights if config.architecture == "GraniteMoeHybridForCausalLM" else cut_out(config, weights)
    else:
        files = SafetensorsWeights(folder, device, dtype, updates or (), finite=updates is not None)
        weights = checkpoint_weights(config, files, unpacked)
    bits = BITS_ON_LOAD.get(given.quantization)
    return (weights if bits is None else QuantizedOnLoad(weights, bits)), files
