"""Which backends compute a model, and why."""

import logging
from dataclasses import dataclass

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.attention.backend import AttentionBackend
from tokenyard.executor.attention.gather import GatherAttention
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.models.backend import ModelBackend, TorchModel
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.native.attention import NativeAttention
from tokenyard.executor.native.engine import NativeEngine, choose_threads, why_not
from tokenyard.executor.native.library import NoLibraryError, load_library
from tokenyard.executor.native.model import NativeModel
from tokenyard.executor.weights import Weights

logger = logging.getLogger(__name__)

MODEL_IMPLS = ("auto", "torch", "native")
ATTENTION_BACKENDS = ("auto", "gather", "native")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What computes a model. engine: the native kernels, None where nothing asks for them or they cannot serve.
    native_model: whether they run whole steps. native_attention: whether they attend between torch's layers.
    why: in one line, for people.
    """

    engine: NativeEngine | None
    native_model: bool
    native_attention: bool
    why: str


def choose_backends(
    model_impl: str, attention_backend: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, threads: int
) -> BackendChoice:
    """Choose by the settings of the same names; auto takes native kernels where they can serve.

    threads: of the native kernels, 0 to let them choose. Raises ConfigError for an unknown name, and where native
    kernels are asked for by name and cannot serve.
    """
    for name, value, known in (
        ("model_impl", model_impl, MODEL_IMPLS),
        ("attention_backend", attention_backend, ATTENTION_BACKENDS),
    ):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; use {', '.join(known)}")
    if model_impl == "torch" and attention_backend == "gather":
        return BackendChoice(None, False, False, "torch")
    engine, reason = _native_engine(config, dtype, device, threads)
    if engine is None:
        if "native" in (model_impl, attention_backend):
            raise ConfigError(f"native kernels cannot be used: {reason}")
        return BackendChoice(None, False, False, f"torch ({reason})")
    # Whoever names an attention backend wants the layers that ask for one.
    native_model = model_impl == "native" or (model_impl == "auto" and attention_backend == "auto")
    if native_model and attention_backend == "gather":
        raise ConfigError("model_impl native attends by itself; attention_backend gather needs model_impl torch")
    kernels = f"native {engine.name}, {engine.threads} thread{'s' if engine.threads > 1 else ''}"
    if native_model:
        return BackendChoice(engine, True, False, kernels)
    if attention_backend == "gather":
        return BackendChoice(None, False, False, "torch")
    return BackendChoice(engine, False, True, f"torch, attention {kernels}")


def _native_engine(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[NativeEngine | None, str]:
    """Return the native kernels, or None and why they cannot serve."""
    reason = why_not(dtype, config.head_dim, device)
    if reason:
        return None, reason
    try:
        return NativeEngine(load_library(), choose_threads(threads)), ""
    except NoLibraryError as error:
        logger.warning("no native CPU kernels, so steps take up to three times as long: %s", error)
        return None, str(error)


def make_model(
    choice: BackendChoice, config: ModelConfig, weights: Weights, pool: KvPool, pages: PageTable, context_length: int
) -> ModelBackend:
    """Build the model that was chosen, from weights. Raises ConfigError if one is missing or misshapen."""
    if choice.engine is not None and choice.native_model:
        return NativeModel(choice.engine, config, weights, pool, pages, context_length)
    decoder = Decoder(config, weights, pool.tensor.device, context_length)
    attention: AttentionBackend
    if choice.engine is not None and choice.native_attention:
        attention = NativeAttention(choice.engine, pool, pages, config.windows, config.num_heads)
    else:
        attention = GatherAttention(pool, pages, config.windows)
    return TorchModel(decoder, attention)
