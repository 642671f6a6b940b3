"""How a model is loaded: the options, and what they mean for a model and a device."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.backend_choice import BackendChoice, choose_backends, torch_layers
from tokenyard.executor.cuda_graph_runner import DEFAULT_MAX_CAPTURE_TOKENS
from tokenyard.executor.distributed.partition import ModelPartition
from tokenyard.executor.models.config import ModelConfig

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded.

    device: auto (CUDA where there is one), cpu, cuda or cuda:N.
    dtype: auto, bfloat16, float16 or float32.
    page_size: tokens of a page of the KV pool.
    max_pool_rows: the most rows that run at once.
    max_total_tokens, mem_fraction_static: size of the KV pool; see choose_num_pages.
    context_length: a context shorter than the model's; None for the model's.
    load_format: safetensors (auto is the same), or dummy for random weights that need only a config.
    threads: threads on a CPU; 0 lets torch and the native kernels choose.
    seed: seed of dummy weights.
    model_impl, attention_backend, prefill_attention_backend, quantization, kv_cache_dtype, deterministic: see
        choose_backends.
    disable_cuda_graph: turns the capture of steps off.
    cuda_graph_max_bs: the largest batch size to capture; None for DEFAULT_MAX_CAPTURE_BS.
    cuda_graph_max_tokens: the most tokens of a captured step with chunks or drafts; 0 captures none.
    enable_tp_cuda_graph: whether tensor-parallel ranks capture steps too, their exchanges by NCCL included.
    enable_torch_symm_mem: whether tensor-parallel ranks make small sums in torch's symmetric memory; see SymmetricSums.
    swa_full_tokens_ratio: see choose_swa_pool; divided models keep all tokens in all layers.
    max_step_tokens: the most prompt tokens of a step, for which a CUDA device keeps memory.
    max_mamba_cache_size, mamba_full_memory_ratio, mamba_track_interval: of recurrent states; see StateGroup.fitting.
    mamba_shared_memory: KV and checkpoints of recurrent states share the memory of both; see StateGroup.sharing.
    draft_tokens: the most drafts of a row in one step; 0 for none.
    draft_model: the model that drafts, or the EAGLE head; "" for prompt lookup and NEXTN.
    draft_head: NEXTN for the head that the checkpoint brings (MTP), EAGLE or EAGLE3; "" for none.
    lora_slots: the most LoRA adapters in a step; 0 for none.
    lora_rank: the largest rank of an adapter.
    rank, ranks: the data-parallel rank and how many ranks this machine has. Ranks take CUDA devices in turn where
        `device` names none, and ranks on one device share its memory.
    nodes: machines over which the ranks of a divided model are spread.
    """

    device: str = "auto"
    dtype: str = "auto"
    page_size: int = 1
    max_pool_rows: int = 256
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.88
    context_length: int | None = None
    load_format: str = "auto"
    threads: int = 0
    seed: int = 0
    model_impl: str = "auto"
    attention_backend: str = "auto"
    prefill_attention_backend: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    cuda_graph_max_tokens: int = DEFAULT_MAX_CAPTURE_TOKENS
    enable_tp_cuda_graph: bool = False
    enable_torch_symm_mem: bool = False
    swa_full_tokens_ratio: float = 0.0
    max_step_tokens: int = 16384
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float = 0.9
    mamba_track_interval: int = 256
    mamba_shared_memory: bool = False
    draft_tokens: int = 0
    draft_model: str = ""
    draft_head: str = ""
    lora_slots: int = 0
    lora_rank: int = 16
    rank: int = 0
    ranks: int = 1
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What is known of a load before it reads weights.

    folder: the checkpoint.
    given: the options.
    part: which part of the model is loaded, None for all.
    whole: the config of the whole model.
    config: of the part.
    device: computes it.
    dtype: of weights and activations.
    context_length: the most tokens of a row.
    choice: the backends.
    sharing: how many ranks share the device's memory.
    draft: the config of the layers that draft, None without.
    """

    folder: Path
    given: LoadOptions
    part: ModelPartition | None
    whole: ModelConfig
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    context_length: int
    choice: BackendChoice
    sharing: int = 1
    draft: ModelConfig | None = None

    def again(self, folder: Path) -> "LoadSpec":
        """The same model from another checkpoint, loaded while steps run."""
        return replace(self, folder=folder, choice=self.choice.for_another_thread())


def with_torch_layers(given: LoadOptions, part: ModelPartition | None) -> LoadOptions:
    """Return the options, with torch's layers where whole native steps do not serve: ranks exchange tensors within a
    step, and a draft head reads hidden states, and the embedding and the head of the model.

    Raises ConfigError where `model_impl` demands native steps.
    """
    flag = part.flag if part is not None else ""
    if given.draft_tokens and given.draft_head:
        flag = f"--speculative-algorithm {given.draft_head}"
    return replace(given, model_impl=torch_layers(given.model_impl, flag)) if flag else given


def backends_for(given: LoadOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """Choose the backends of a model by the options; see choose_backends."""
    return choose_backends(
        *(given.model_impl, given.attention_backend, given.quantization, config, dtype, device, given.threads),
        deterministic=given.deterministic,
        kv_cache_dtype=given.kv_cache_dtype,
        prefill_attention_backend=given.prefill_attention_backend,
    )


def choose_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Turn a dtype's name into a dtype; "auto" is the fastest one that serves the device.

    On CUDA that is the checkpoint's if it is a half one, else bfloat16; on a CPU bfloat16 if it has instructions for
    it, else float32. Raises ConfigError for an unknown name.
    """
    if name == "auto" and device.type == "cuda":
        name = config.dtype if config.dtype == "float16" else "bfloat16"
    elif name == "auto":
        name = "bfloat16" if cpu_has_bfloat16() else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, bfloat16, float16 or float32")
    return DTYPES[name]


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512_BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_context_length(wanted: int | None, config: ModelConfig) -> int:
    """Return the most tokens of a row: the model's context unless a shorter one is wanted. Raises ConfigError."""
    if wanted is None:
        return config.context_length
    if not 1 <= wanted <= config.context_length:
        raise ConfigError(f"context_length is {wanted}; this model's is {config.context_length}, choose at most that")
    return wanted


def refuse_unsupported(config: ModelConfig, given: LoadOptions, part: ModelPartition | None) -> None:
    """Raise ConfigError for what does not work with the layers of some families."""
    if part is not None and config.special_layers:
        raise ConfigError(
            f"models with {config.special_layers} do not support --tp-size, --pp-size and --enable-dp-attention; start"
            " without them"
        )
    if given.lora_slots and (config.latent is not None or config.kv_sources):
        raise ConfigError(
            f"models with {config.special_layers} do not support LoRA adapters; start without --enable-lora"
        )
