"""Chooses the backends that compute a model."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.attention.backend import AttentionBackend, AttentionSpec, FusedKvWriteAttention
from tokenyard.executor.attention.flashinfer import FlashInferAttention
from tokenyard.executor.attention.flashinfer import why_not as flashinfer_why_not
from tokenyard.executor.attention.hybrid import HybridAttention, HybridFusedKvWriteAttention
from tokenyard.executor.attention.reference import GatherAttention
from tokenyard.executor.attention.triton.available import interpreted
from tokenyard.executor.attention.triton.available import why_not as triton_why_not
from tokenyard.executor.attention.varlen import why_not as varlen_why_not
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.future_map import FutureMap
from tokenyard.executor.kv_pool import KV_BYTES, SCALE_BYTES, KvPool
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.native.attention import NativeAttention
from tokenyard.executor.native.library import NoLibraryError, load_library
from tokenyard.executor.native.model import NativeDecoder, NativeModel
from tokenyard.executor.native.runtime import MAX_HEAD_DIM, NativeRuntime, choose_threads, why_not
from tokenyard.executor.native.sampling import NativeSamplingBackend
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch
from tokenyard.executor.sampling.top_k_top_p import SamplingBackend, likeliest

logger = logging.getLogger(__name__)

MODEL_IMPLS = ("auto", "torch", "native")
ATTENTION_BACKENDS = ("auto", "gather", "native", "triton", "flashinfer")
HOPPER = (9, 0)
"""The compute capability for which auto takes flashinfer where it can."""
BITS_ON_LOAD = {"q4": 4, "q8": 8}
"""Bits of weights in blocks that are made as a model loads."""
PREFILL_BACKENDS = ("auto", "varlen")
QUANTIZATIONS = ("none", "int8", *BITS_ON_LOAD)
E4M3_FROM = (8, 9)
"""The first compute capability whose instructions convert fp8_e4m3."""
MAX_INT8_INPUTS = 1 << 16
"""Sums of more products of bytes could leave 32 bits."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What computes a model.

    engine: the native kernels; None where they are not used.
    native_model: whether the native kernels run whole steps; if False they only serve torch's layers.
    kernels: a description of the kernels for logs and error messages.
    int8: whether the native kernels quantize weights and inputs of products to 8 bits.
    triton: whether Triton kernels sample, compute norms and rotations, and attend unless `flashinfer` is set.
    flashinfer: whether the package flashinfer attends.
    varlen: whether torch's varlen attention serves prompts without a prefix, and Triton all else.
    deterministic: whether a token's result is the same bit for bit under every schedule.
    kv_dtype: of keys and values in the pool, see KvPool.
    """

    engine: NativeRuntime | None
    native_model: bool
    kernels: str
    int8: bool = False
    triton: bool = False
    flashinfer: bool = False
    varlen: bool = False
    deterministic: bool = False
    kv_dtype: torch.dtype = torch.float32

    def for_another_thread(self) -> "BackendChoice":
        """The same for a model that is loaded while steps run: threads of the native kernels take one job at a time."""
        return self if self.engine is None else replace(self, engine=self.engine.another())


def choose_backends(
    model_impl: str,
    attention_backend: str,
    quantization: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    *,
    deterministic: bool = False,
    kv_cache_dtype: str = "auto",
    prefill_attention_backend: str = "auto",
) -> BackendChoice:
    """Choose backends by the settings of the same names. `auto` takes flashinfer on a Hopper device where that can
    serve, Triton on CUDA, else native kernels if they work.

    threads: threads of the native kernels; 0 lets them choose.

    kv_cache_dtype: one of KV_BYTES, or auto for `dtype`.

    prefill_attention_backend: what attends to prompts without a prefix; auto for what attends to all else.

    Raises ConfigError for an unknown name, for a backend that is named but cannot be used, for a quantization or
    `deterministic` without a native model, and for a kv_cache_dtype without that or Triton.
    """
    for name, value, known in (
        ("model_impl", model_impl, MODEL_IMPLS),
        ("attention_backend", attention_backend, ATTENTION_BACKENDS),
        ("quantization", quantization, QUANTIZATIONS),
        ("kv_cache_dtype", kv_cache_dtype, ("auto", *KV_BYTES)),
        ("prefill_attention_backend", prefill_attention_backend, PREFILL_BACKENDS),
    ):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; use {', '.join(known)}")
    kv_dtype = KV_BYTES.get(kv_cache_dtype, dtype)
    choice = _choose(model_impl, attention_backend, config, dtype, device, threads, kv_dtype)
    if deterministic and not choice.native_model:
        raise ConfigError(
            f"deterministic inference needs a native model; this one's steps are computed by {choice.kernels}"
        )
    choice = replace(choice, deterministic=deterministic, kv_dtype=kv_dtype)
    if kv_cache_dtype != "auto":
        if reason := _why_no_kv_bytes(choice, config, device):
            raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype} {reason}")
        choice = replace(choice, kernels=f"{choice.kernels}, KV {kv_cache_dtype}")
    if prefill_attention_backend == "varlen":
        if reason := _why_no_varlen(choice, config, dtype, device):
            raise ConfigError(f"prefill_attention_backend varlen cannot be used: {reason}")
        choice = replace(choice, varlen=True, kernels=f"{choice.kernels}, prompts varlen")
    if quantization == "none":
        return choice
    if not choice.native_model:
        raise ConfigError(
            f"quantization {quantization} needs a native model; this one's steps are computed by {choice.kernels}"
        )
    choice = replace(choice, kernels=f"{quantization} {choice.kernels}")
    if quantization in BITS_ON_LOAD:
        return choice
    if max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim) > MAX_INT8_INPUTS:
        raise ConfigError(f"quantization int8 takes products of at most {MAX_INT8_INPUTS} inputs; this model has more")
    return replace(choice, int8=True)


def _why_no_kv_bytes(choice: BackendChoice, config: ModelConfig, device: torch.device) -> str:
    """Return why the chosen backends cannot keep KV in bytes, "" if they can."""
    if choice.native_model:
        return ""
    if not choice.triton or choice.flashinfer:
        return (
            "needs a native model, or attention by Triton on a GPU; this one's steps are computed by " + choice.kernels
        )
    if choice.kv_dtype == torch.float8_e4m3fn and not interpreted():
        capability = torch.cuda.get_device_capability(device)
        if capability < E4M3_FROM:
            return (
                f"needs compute capability 8.9 or newer, and {device} has {capability[0]}.{capability[1]}; "
                "take fp8_e5m2 or int8"
            )
    if any(config.kv_shape(layer)[1] % SCALE_BYTES for layer in config.kv_layers):
        return f"takes heads of a multiple of {SCALE_BYTES} dimensions on a GPU"
    return ""


def _why_no_varlen(choice: BackendChoice, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return why torch's varlen attention cannot stand next to the chosen backends, "" if it can."""
    if not choice.triton or choice.flashinfer:
        return f"it stands next to attention by Triton, and this model's steps are computed by {choice.kernels}"
    if choice.kv_dtype.itemsize == 1:
        return "it reads no KV of one byte; leave --kv-cache-dtype out"
    return varlen_why_not(device, dtype, config)


def _choose(
    model_impl: str,
    attention_backend: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    kv_dtype: torch.dtype,
) -> BackendChoice:
    if attention_backend == "gather" and model_impl != "native":
        return BackendChoice(None, False, "torch")
    if attention_backend == "flashinfer":
        return _flashinfer(model_impl, config, dtype, device)
    on_cuda = device.type == "cuda" and attention_backend == "auto" and model_impl != "native"
    # flashinfer reads no bytes with a scale for each head.
    flashinfer = on_cuda and kv_dtype.itemsize > 1 and not flashinfer_why_not(device, dtype, config)
    if flashinfer and torch.cuda.get_device_capability(device) == HOPPER:
        return _flashinfer(model_impl, config, dtype, device)
    if attention_backend == "triton" or on_cuda:
        return _triton(model_impl, attention_backend, config, device)
    engine, reason = _native_engine(config, dtype, device, threads)
    if engine is None:
        if "native" in (model_impl, attention_backend):
            raise ConfigError(f"native kernels cannot be used: {reason}")
        return BackendChoice(None, False, f"torch ({reason})")
    # Only torch layers take an attention backend, so naming one selects them.
    native_model = model_impl == "native" or (model_impl == "auto" and attention_backend == "auto")
    if config.torch_layers:
        if model_impl == "native":
            raise ConfigError(f"model_impl native does not compute {config.torch_layers}; model_impl torch does")
        native_model = False
    if native_model and attention_backend == "gather":
        raise ConfigError("model_impl native attends by itself; attention_backend gather needs model_impl torch")
    kernels = f"native {engine.name}, {engine.threads} thread{'s' if engine.threads > 1 else ''}"
    if native_model:
        return BackendChoice(engine, True, kernels)
    experts, sizes = config.experts, (config.kv_shape(layer)[1] for layer in config.kv_layers)
    native = {
        "attention": min(sizes) <= MAX_HEAD_DIM,
        "experts": experts is not None and experts.plain and not experts.beside_mlp,
    }
    parts = " and ".join(part for part, own in native.items() if own)
    return BackendChoice(engine, False, f"torch, {parts} {kernels}" if parts else "torch (heads are too large)")


def _triton(model_impl: str, attention_backend: str, config: ModelConfig, device: torch.device) -> BackendChoice:
    """Torch's layers with Triton kernels where possible, else torch alone. Raises ConfigError if Triton is named."""
    reason = triton_why_not(device, max(config.kv_shape(layer)[1] for layer in config.kv_layers))
    if model_impl == "native":
        reason = "model_impl native attends by itself; attention_backend triton needs model_impl torch"
    if not reason:
        return BackendChoice(None, False, "torch, attention and norms triton", triton=True)
    if attention_backend == "triton":
        raise ConfigError(f"attention_backend triton cannot be used: {reason}")
    logger.warning("no Triton kernels, so torch attends over gathered keys, more slowly: %s", reason)
    return BackendChoice(None, False, f"torch ({reason})")


def _flashinfer(model_impl: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """Torch's layers with attention by the package flashinfer, and Triton's other kernels where they can be used."""
    reason = flashinfer_why_not(device, dtype, config)
    if model_impl == "native":
        reason = "model_impl native attends by itself; attention_backend flashinfer needs model_impl torch"
    if reason:
        raise ConfigError(f"attention_backend flashinfer cannot be used: {reason}")
    triton = not triton_why_not(device, config.head_dim)
    kernels = "torch, attention flashinfer" + (", norms triton" if triton else "")
    return BackendChoice(None, False, kernels, triton=triton, flashinfer=True)


def _native_engine(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[NativeRuntime | None, str]:
    """Return the native kernels and "", or None and why they cannot be used."""
    reason = why_not(dtype, config.head_dim, device)
    if reason:
        return None, reason
    try:
        return NativeRuntime(load_library(), choose_threads(threads)), ""
    except NoLibraryError as error:
        logger.warning("no native CPU kernels, so steps take up to three times as long: %s", error)
        return None, str(error)


def torch_layers(model_impl: str, flag: str) -> str:
    """Return the implementation where `flag` needs torch's layers. Raises ConfigError where `model_impl` demands whole
    steps by native kernels.
    """
    if model_impl == "native":
        raise ConfigError(f"--model-impl native computes whole steps and cannot be used with {flag}; leave it out")
    return "torch"


def make_model(choice: BackendChoice, layers: Decoder | NativeDecoder, pool: KvPool, pages: PageTable) -> ModelBackend:
    """Make the chosen backend over a KV pool and its page table."""
    if isinstance(layers, NativeDecoder):
        return NativeModel(layers, pool, pages, fixed_order=choice.deterministic)
    if choice.triton or choice.flashinfer:
        return _on_a_gpu(choice, layers, pool, pages)

    def attend(pool: KvPool, pages: PageTable, spec: AttentionSpec) -> AttentionBackend:
        if choice.engine is None or pool.tensor.shape[-1] > MAX_HEAD_DIM:
            return GatherAttention(pool, pages, spec)
        return NativeAttention(choice.engine, pool, pages, spec, layers.config.num_heads)

    make = attend if pool.windows is None else partial(HybridAttention, attend)
    return TorchModel(layers, make(pool, pages, layers.attention_spec))


def _on_a_gpu(choice: BackendChoice, layers: Decoder, pool: KvPool, pages: PageTable) -> TorchModel:
    """Torch's layers with Triton's kernels, or flashinfer's, or both."""

    def attend(pool: KvPool, pages: PageTable, spec: AttentionSpec) -> FusedKvWriteAttention:
        if choice.flashinfer:
            return FlashInferAttention(pool, pages, spec, layers.config.num_heads)
        # Imported here because the package triton is optional and slow to import.
        from tokenyard.executor.attention.triton.backend import TritonAttention

        return TritonAttention(pool, pages, spec, layers.config.num_heads, layers.dtype, varlen=choice.varlen)

    make = attend if pool.windows is None else partial(HybridFusedKvWriteAttention, attend)
    attention = make(pool, pages, layers.attention_spec)
    if choice.triton:
        from tokenyard.executor.attention.triton.backend import TritonKernels

        layers.fuse(TritonKernels(attention))
    return TorchModel(layers, attention)


def make_sampling_backend(choice: BackendChoice, config: ModelConfig) -> SamplingBackend | None:
    """Return the sampling kernels of a choice; None where torch samples."""
    if choice.triton:
        from tokenyard.executor.attention.triton.sampling_kernels import TritonSamplingBackend

        return TritonSamplingBackend()
    return NativeSamplingBackend(choice.engine, config.vocab_size) if choice.engine is not None else None


def plan_inputs(
    choice: BackendChoice, pages: PageTable, future: FutureMap, sampling_backend: SamplingBackend | None
) -> PlanInputs:
    """Return how captured steps begin and end by the chosen kernels. sampling_backend: see make_sampling_backend."""
    if choice.triton and sampling_backend is not None:
        from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton

        return PlanInputs(pages, future, sampling_backend.likeliest, prepare_by_triton)
    return PlanInputs(pages, future, likeliest, prepare_by_torch)
