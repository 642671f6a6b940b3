"""Loads a model by name into an executor."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, ExecutorInfo, StateGroup
from tokenyard.base.protocols import MAX_STATE_SAVES
from tokenyard.executor.backend_choice import make_model, make_sampling_backend, plan_inputs
from tokenyard.executor.cuda_devices import choose_device, prepare_cuda
from tokenyard.executor.cuda_graph_runner import (
    DEFAULT_MAX_CAPTURE_BS,
    CudaGraphCapturer,
    CudaGraphRunner,
    capture_batch_sizes,
    capture_buckets,
)
from tokenyard.executor.cuda_graph_runner import why_not as why_not_captured
from tokenyard.executor.device_memory import device_memory, step_bytes
from tokenyard.executor.distributed.partition import ModelPartition
from tokenyard.executor.draft_loader import (
    DraftLayers,
    draft_config,
    draft_weight_bytes,
    load_draft_layers,
    make_drafter,
)
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.future_map import FutureMap
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.kv_pool import (
    KvPool,
    StateBytes,
    choose_num_pages,
    choose_swa_pool,
    default_cpu_tokens,
    kv_bytes_per_token,
    make_pool,
)
from tokenyard.executor.layer_loader import load_folder, read_folder_config, read_spec
from tokenyard.executor.load_options import LoadOptions, LoadSpec, with_torch_layers
from tokenyard.executor.lora_manager import MIN_KERNEL_TOKENS, LoraManager, LoraMemoryPool, TorchLoraPool
from tokenyard.executor.memory_fit import MemoryNeed, activation_bytes, describe_formats, free_memory, weight_bytes
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.native.lora import NativeLoraPool
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.plan_inputs import PlanInputs
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.sampling.top_k_top_p import SamplingBackend
from tokenyard.executor.state_pool import PagedCheckpoints, StatePool, state_bytes
from tokenyard.executor.warm_up import warm_up
from tokenyard.executor.weight_updates import Checkpoint, LoadedModel, WeightUpdates

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepMemory:
    """What the steps of an executor read and write besides weights, which change over it.

    pool, states: of KV and of recurrent states, None for a model without.
    pages: the page table.
    sampling_backend: see ModelExecutor.
    inputs: how captured steps begin and end.
    """

    pool: KvPool
    states: StatePool | None
    pages: PageTable
    sampling_backend: SamplingBackend | None
    inputs: PlanInputs


def load_executor(
    model_path: str,
    *,
    part: ModelPartition | None = None,
    pool_memory: Callable[[int], torch.Tensor] | None = None,
    make: Callable[..., ModelExecutor] = ModelExecutor,
    **options: Any,
) -> ModelExecutor:
    """Load a Hugging Face model folder (or repository, by name) and get its KV pool ready.

    part: the part of the model to load, None for all; pool_memory: see KvPool; make: makes the executor (see
    `distributed.distributed_loader`); options: see LoadOptions.

    Raises ConfigError, in one line, for options or models that do not fit.
    """
    given = with_torch_layers(LoadOptions(**options), part)
    device, sharing = _prepare_device(given, part)
    spec = _resolve(model_path, given, device, part, sharing)
    if device.type == "cpu" and part is None and given.load_format != "dummy":
        need, free = _memory_need(spec), free_memory()
        logger.info("memory: %s", need.describe(free))
        need.check(free)
    layers = load_folder(spec)
    adapters = _make_adapters(spec, layers)
    # The pool takes what the weights of both leave free.
    drafts = None if spec.draft is None else load_draft_layers(spec, layers)
    info = _size_pools(model_path, spec, adapters)
    if part is not None:
        info = part.agree(info)
    memory = _make_memory(spec, info, pool_memory)
    model = _make_model(spec, layers, adapters, memory)
    drafter = make_drafter(drafts, spec, model, info, memory.pages)
    executor = make(
        *(model, memory.pool, memory.pages, info, device, drafter, memory.sampling_backend, adapters, memory.states)
    )
    if part is not None and isinstance(model, TorchModel):
        executor.capture = partial(_capture_later, executor, spec, model, adapters, memory)
    if drafts is None or drafts.head is None:
        rank, ranks = (part.rank, part.size) if part is not None and part.within_rank else (0, 1)
        load = partial(_load_again, spec, drafts, memory, executor)
        executor.weight_updates = WeightUpdates(spec.folder, load, rank=rank, ranks=ranks)
    if device.type == "cuda" and part is None:
        warm_up(executor)
    return executor


def memory_need(model_path: str, **options: Any) -> tuple[MemoryNeed, str]:
    """Return what a model takes on a CPU, by its config and the headers of its files, and what multiplies its matrices
    (see describe_formats). Downloads it if it is not here.

    options: see LoadOptions. Raises ConfigError; see load_executor.
    """
    given = with_torch_layers(LoadOptions(**options), None)
    spec = _resolve(model_path, given, torch.device("cpu"), None, given.ranks)
    native = spec.choice.engine if spec.choice.native_model else None
    instructions = native.library.packed_instructions() if native else ""
    return _memory_need(spec), describe_formats(spec.folder, instructions, given.quantization)


def _resolve(
    model_path: str, given: LoadOptions, device: torch.device, part: ModelPartition | None, sharing: int
) -> LoadSpec:
    """See LoadSpec."""
    spec = read_spec(resolve_model_path(model_path), given, device, part, sharing)
    return replace(spec, draft=draft_config(spec))


def _make_model(
    spec: LoadSpec, layers: Decoder | NativeDecoder, adapters: LoraManager | None, memory: _StepMemory
) -> ModelBackend:
    """The backend of a model, with captured steps where it is whole; ranks capture once they are connected."""
    model = make_model(spec.choice, layers, memory.pool, memory.pages)
    return _captured(spec, model, adapters, memory) if isinstance(model, TorchModel) and spec.part is None else model


def _capture_later(
    executor: ModelExecutor, spec: LoadSpec, model: TorchModel, adapters: LoraManager | None, memory: _StepMemory
) -> None:
    """See ModelExecutor.capture."""
    executor.model = _captured(spec, model, adapters, memory)


def _load_again(
    spec: LoadSpec, drafts: DraftLayers | None, memory: _StepMemory, executor: ModelExecutor, checkpoint: Checkpoint
) -> LoadedModel:
    """Load other weights of a model over the same memory; see WeightUpdates. Raises ConfigError."""
    _check_same_model(spec.whole, checkpoint.folder)
    spec = spec.again(checkpoint.folder)
    if spec.device.type == "cpu":
        _check_room(spec)
    # Memory that is resumed gets the weights of the start, from a converted file or at random as then.
    layers = load_folder(spec, checkpoint.updates if checkpoint.digest else None)
    adapters = _make_adapters(spec, layers)
    draft_model = None if checkpoint.draft is None else _load_draft_again(drafts, executor, checkpoint.draft)
    return LoadedModel(_make_model(spec, layers, adapters, memory), adapters, draft_model)


def _load_draft_again(drafts: DraftLayers | None, executor: ModelExecutor, folder: Path) -> ModelBackend:
    """Load other weights of the draft model over its KV pool. Raises ConfigError."""
    drafter = executor.drafter
    if drafts is None or not isinstance(drafter, ModelDrafter):
        raise ConfigError(
            "there is no draft model whose weights draft_model_path could change; leave it out, or start with"
            " --speculative-algorithm STANDALONE"
        )
    _check_same_model(drafts.spec.whole, folder)
    spec = drafts.spec.again(folder)
    return make_model(spec.choice, load_folder(spec, ()), drafter.pool, executor.pages)


def _check_same_model(now: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if a checkpoint is of another model than the one that runs."""
    then = read_folder_config(folder)
    for field in fields(now):
        ours, theirs = getattr(now, field.name), getattr(then, field.name)
        # Trainers often save no generation_config.json, which has further tokens that end an answer.
        if ours != theirs and field.name not in ("eos_token_ids", "dtype"):
            raise ConfigError(f"{folder} is another model: its config.json means {field.name} {theirs}, not {ours}")


def _check_room(spec: LoadSpec) -> None:
    """Raise ConfigError if a checkpoint does not fit next to the weights in use."""
    size, free = _weight_bytes(spec), free_memory()
    if size > free:
        raise ConfigError(
            f"the new weights take {size / 1e9:.2f} GB next to those in use, and {free / 1e9:.2f} GB are free"
        )


def _weight_bytes(spec: LoadSpec, *, tied: bool = False) -> int:
    """See weight_bytes."""
    native = spec.choice.native_model
    quantization = spec.given.quantization if native else "none"
    return weight_bytes(spec.folder, spec.dtype.itemsize, native=native, quantization=quantization, tied=tied)


def _memory_need(spec: LoadSpec) -> MemoryNeed:
    """What a model takes on a CPU."""
    config, given = spec.config, spec.given
    states = _state_bytes(spec) or StateBytes(0, 0.0)
    per_token = kv_bytes_per_token(config, spec.choice.kv_dtype) + _draft_bytes_per_token(spec)
    per_token = int(per_token * (1 + states.ratio))
    return MemoryNeed(
        _weight_bytes(spec, tied=config.tied_embeddings)
        + draft_weight_bytes(given, spec.dtype.itemsize, native=spec.choice.native_model),
        per_token * (given.max_total_tokens or default_cpu_tokens(per_token, spec.sharing)) + states.fixed_bytes,
        activation_bytes(config.hidden_size, config.intermediate_size, config.vocab_size, given.max_pool_rows),
    )


def _draft_bytes_per_token(spec: LoadSpec) -> int:
    """Bytes that a token takes in the pool of the layers that draft."""
    return 0 if spec.draft is None else kv_bytes_per_token(spec.draft, spec.choice.kv_dtype)


def _size_pools(model_path: str, spec: LoadSpec, adapters: LoraManager | None) -> ExecutorInfo:
    """Choose how many pages and states the free memory holds, now that the weights are there."""
    given, config, kv_dtype = spec.given, spec.config, spec.choice.kv_dtype
    parted = spec.part is None and spec.draft is None and 0 < max(config.windows) < spec.context_length
    ratio = given.swa_full_tokens_ratio if parted else 0.0
    num_pages = choose_num_pages(
        config,
        page_size=given.page_size,
        dtype=kv_dtype,
        device=spec.device,
        max_total_tokens=given.max_total_tokens,
        mem_fraction_static=given.mem_fraction_static,
        sharing=spec.sharing,
        window_ratio=ratio,
        draft_bytes_per_token=_draft_bytes_per_token(spec),
        states=_state_bytes(spec),
        reserved_bytes=_reserved_bytes(spec),
    )
    num_pages, states = _choose_states(spec, num_pages)
    return ExecutorInfo(
        model=model_path,
        device=str(spec.device),
        dtype=str(spec.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        context_length=spec.context_length,
        eos_token_ids=config.eos_token_ids,
        page_size=given.page_size,
        num_pages=num_pages,
        max_pool_rows=given.max_pool_rows,
        kv_bytes_per_token=kv_bytes_per_token(spec.whole, kv_dtype),
        kernels=spec.choice.kernels,
        adapter_bytes=adapters.slots.slot_bytes if adapters is not None else 0,
        windows=choose_swa_pool(config, num_pages, given.page_size, ratio),
        states=states,
    )


def _make_memory(spec: LoadSpec, info: ExecutorInfo, pool_memory: Callable[[int], torch.Tensor] | None) -> _StepMemory:
    """Make what `info` counts. Raises ConfigError where the memory does not suffice."""
    pool = make_pool(spec.config, info, spec.device, spec.choice.kv_dtype, pool_memory)
    windows = info.windows is not None
    pages = PageTable(info.max_pool_rows, info.context_length, info.page_size, spec.device, windows=windows)
    sampling_backend = make_sampling_backend(spec.choice, spec.config)
    inputs = plan_inputs(spec.choice, pages, FutureMap(info.max_pool_rows, spec.device), sampling_backend)
    return _StepMemory(pool, _make_states(spec, info, pool), pages, sampling_backend, inputs)


def _state_bytes(spec: LoadSpec) -> StateBytes | None:
    """What recurrent states take of the memory; None for a model without."""
    given, recurrent = spec.given, spec.config.recurrent
    if recurrent is None:
        return None
    sized = given.max_mamba_cache_size
    slots = given.max_pool_rows if sized is None or not given.mamba_full_memory_ratio else sized
    return StateBytes(
        # One more for rows that fill up a captured step.
        (slots + 1) * state_bytes(recurrent, spec.dtype),
        given.mamba_full_memory_ratio if sized is None else 0.0,
    )


def _choose_states(spec: LoadSpec, num_pages: int) -> tuple[int, StateGroup | None]:
    """The pages of the KV pool, and the recurrent states of the model, for a pool that has `num_pages` for KV."""
    given, recurrent = spec.given, spec.config.recurrent
    if recurrent is None:
        return num_pages, None
    slot_bytes = state_bytes(recurrent, spec.dtype)
    page_bytes = given.page_size * kv_bytes_per_token(spec.config, spec.choice.kv_dtype)
    ratio, interval = given.mamba_full_memory_ratio, given.mamba_track_interval
    if given.mamba_shared_memory and ratio:
        together = int(num_pages * (1 + ratio))
        shared = StateGroup.sharing(slot_bytes, page_bytes, together, interval)
        if shared is not None:
            logger.info(
                "recurrent states: checkpoints of %.1f MiB share a pool of %d tokens with KV; %d working slots",
                *(slot_bytes / 2**20, together * given.page_size, given.max_pool_rows),
            )
            return together, shared
    states = StateGroup.fitting(
        slot_bytes,
        num_pages * page_bytes,
        given.max_pool_rows,
        max_slots=given.max_mamba_cache_size,
        ratio=ratio,
        track_interval=interval,
    )
    logger.info(
        "recurrent states: %d checkpoints and %d working slots of %.1f MiB",
        *(states.num_slots, given.max_pool_rows, slot_bytes / 2**20),
    )
    return num_pages, states


def _make_states(spec: LoadSpec, info: ExecutorInfo, pool: KvPool) -> StatePool | None:
    recurrent, device = spec.config.recurrent, spec.device
    if recurrent is None or info.states is None:
        return None
    paged = PagedCheckpoints(pool.tensor, info.page_size) if info.states.slot_pages else None
    slots = info.max_pool_rows + (MAX_STATE_SAVES if paged is not None else info.states.num_slots)
    try:
        return StatePool(recurrent, slots, device, spec.dtype, paged)
    except RuntimeError as error:  # on a GPU an OutOfMemoryError; CPUs have no special error for it
        raise ConfigError(
            f"{slots} recurrent states take {slots * info.states.slot_bytes / 2**30:.1f} GiB, more than {device} has "
            "free; lower max_running_requests or mamba_full_memory_ratio"
        ) from error


def _reserved_bytes(spec: LoadSpec) -> int:
    """Bytes of a CUDA device that are neither weights nor KV; 0 on a CPU."""
    if spec.device.type != "cuda":
        return 0
    given = spec.given
    sizes: list[int] = []
    buckets: list[int] = []
    if not given.disable_cuda_graph and not _why_not_captured(spec):
        sizes = capture_batch_sizes(_max_capture_bs(spec))
        buckets = [own.tokens for own in capture_buckets(_max_capture_tokens(spec))]
        # With adapters each size is captured twice.
        sizes, buckets = ([*own, *own] if given.lora_slots else own for own in (sizes, buckets))
    need = device_memory(
        spec.config,
        spec.dtype,
        max_step_tokens=given.max_step_tokens,
        max_pool_rows=given.max_pool_rows,
        context_length=spec.context_length,
        page_size=given.page_size,
        captured=tuple(sizes),
        buckets=tuple(buckets),
        divided=spec.part is not None,
        draft_tokens=given.draft_tokens,
        flashinfer=spec.choice.flashinfer,
        varlen=spec.choice.varlen,
    )
    # A draft model's steps run between those of the model, whose memory torch's allocator gives them.
    drafting = 0 if spec.draft is None else step_bytes(spec.draft, given.max_pool_rows, given.max_pool_rows, 2)
    logger.info(
        "device memory besides weights and KV: %.2f GiB for steps of %d tokens, %.2f for graphs, %.2f for page tables, "
        "%.2f for libraries",
        *(max(need.steps, drafting) / 2**30, given.max_step_tokens, need.graphs / 2**30),
        *(need.page_table / 2**30, need.libraries / 2**30),
    )
    return need.total + max(0, drafting - need.steps)


def _prepare_device(given: LoadOptions, part: ModelPartition | None) -> tuple[torch.device, int]:
    """The device, ready for use, and how many ranks share its memory."""
    target, sharing = device_of_rank(given.device, given.rank, given.ranks, part, given.nodes)
    if target.type == "cuda":
        prepare_cuda(target)
    if given.threads:
        torch.set_num_threads(given.threads)
    if min(given.page_size, given.max_pool_rows) < 1:
        raise ConfigError(f"page_size {given.page_size} and max_pool_rows {given.max_pool_rows} must be at least 1")
    return target, sharing


@torch.inference_mode()
def _captured(spec: LoadSpec, model: TorchModel, adapters: LoraManager | None, memory: _StepMemory) -> ModelBackend:
    """Return the model with captured steps, or the model itself where they are off or cannot be captured.

    Raises ConfigError without memory.
    """
    if spec.device.type != "cuda" or spec.given.disable_cuda_graph:
        return model
    if reason := _why_not_captured(spec):
        logger.info("no CUDA graphs: %s", reason)
        return model
    slots = None if adapters is None else adapters.slots
    assert slots is None or isinstance(slots, TorchLoraPool)
    return CudaGraphRunner(
        *(model, spec.config, _max_capture_bs(spec), spec.device, CudaGraphCapturer(spec.device), slots),
        *(memory.inputs if spec.part is None else None, _max_capture_tokens(spec), memory.states),
        divided=spec.part is not None,
    )


def _why_not_captured(spec: LoadSpec) -> str:
    """See `cuda_graph_runner.why_not`. Ranks that are told to capture do so together."""
    part, choice = spec.part, spec.choice
    together = part is None or (part.captures and spec.given.enable_tp_cuda_graph)
    return why_not_captured(
        *(spec.config, spec.device, spec.dtype),
        capturable=choice.triton or choice.flashinfer,
        divided=not together,
        adapters=spec.given.lora_slots > 0 and not choice.triton,
    )


def _max_capture_bs(spec: LoadSpec) -> int:
    """The most rows of a captured decode."""
    return min(spec.given.max_pool_rows, spec.given.cuda_graph_max_bs or DEFAULT_MAX_CAPTURE_BS)


def _max_capture_tokens(spec: LoadSpec) -> int:
    """The most tokens of a captured step with chunks or drafts. flashinfer would plan it for one number of rows, and
    recurrent states are computed row by row.
    """
    given, choice = spec.given, spec.choice
    if not choice.triton or choice.flashinfer or spec.config.recurrent is not None:
        return 0
    # No step has more.
    most = given.max_step_tokens + given.max_pool_rows * (1 + given.draft_tokens)
    return min(given.cuda_graph_max_tokens, most)


def device_of_rank(
    name: str, rank: int, ranks: int, part: ModelPartition | None, nodes: int = 1
) -> tuple[torch.device, int]:
    """The device of a rank, and how many ranks share its memory. Ranks take CUDA devices in turn if none is named, and
    so do the ranks of one model on one of its nodes.
    """
    target = choose_device(name)
    if part is not None and target.type == "cuda":
        if part.within_rank:
            here = part.size // nodes
            rank, ranks = rank * here + part.rank % here, ranks * here
        if ranks > torch.cuda.device_count():
            raise ConfigError(
                f"{part.flag} and --dp-size ask for {ranks} CUDA devices, but torch sees {torch.cuda.device_count()}"
            )
    if target.type != "cuda" or name not in ("auto", "cuda"):
        return target, ranks
    devices = torch.cuda.device_count()
    return torch.device("cuda", rank % devices), len(range(rank % devices, ranks, devices))


def _make_adapters(spec: LoadSpec, layers: Decoder | NativeDecoder) -> LoraManager | None:
    """Make the slots of LoRA adapters; None if LoRA is off."""
    given, config = spec.given, spec.config
    if not given.lora_slots:
        return None
    slots: LoraMemoryPool
    if isinstance(layers, NativeDecoder):
        slots = NativeLoraPool(layers, given.lora_slots, given.lora_rank)
    else:
        kernel_tokens = max(MIN_KERNEL_TOKENS, given.max_pool_rows) if spec.choice.triton else 0
        slots = TorchLoraPool(layers, config, given.lora_slots, given.lora_rank, spec.device, spec.dtype, kernel_tokens)
    return LoraManager(config, slots, given.lora_slots, given.lora_rank, given.max_pool_rows)
