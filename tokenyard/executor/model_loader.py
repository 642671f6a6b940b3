"""Loads a model by name into an executor."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, ExecutorInfo, StateGroup
from tokenyard.base.protocols import MAX_STATE_SAVES
from tokenyard.executor.backend_choice import BackendChoice, make_model, make_sampling_backend, plan_inputs
from tokenyard.executor.cuda_devices import choose_device, prepare_cuda
from tokenyard.executor.cuda_graph_runner import (
    DEFAULT_MAX_CAPTURE_BS,
    capture_batch_sizes,
    capture_buckets,
    capture_graphs,
)
from tokenyard.executor.cuda_graph_runner import why_not as why_not_record
from tokenyard.executor.device_memory import device_memory, step_bytes
from tokenyard.executor.distributed.partition import ModelPartition
from tokenyard.executor.draft_loader import draft_config, draft_weight_bytes, load_draft_layers, make_drafter
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
from tokenyard.executor.layer_loader import load_folder, read_folder_config
from tokenyard.executor.load_options import LoadOptions, backends_for, choose_dtype, with_torch_layers
from tokenyard.executor.lora_manager import MIN_KERNEL_TOKENS, LoraManager, LoraMemoryPool, TorchLoraPool
from tokenyard.executor.memory_fit import MemoryNeed, activation_bytes, describe_formats, free_memory, weight_bytes
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.native.lora import NativeLoraPool
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.plan_inputs import PlanInputs
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.state_pool import PagedCheckpoints, StatePool, state_bytes
from tokenyard.executor.warm_up import warm_up
from tokenyard.executor.weight_updates import Checkpoint, LoadedModel, WeightUpdates

logger = logging.getLogger(__name__)


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
    target, sharing = _prepare_device(given, part)
    folder = resolve_model_path(model_path)
    config = whole = read_folder_config(folder)
    refuse_unsupported(whole, given, part)
    if part is not None:
        config = part.config(whole)
    kind = choose_dtype(given.dtype, target, config)
    length = _context_length(given.context_length, config)
    choice = backends_for(given, config, kind, target)
    drafts_from = draft_config(given, folder, config, length)
    if target.type == "cpu" and part is None and given.load_format != "dummy":
        need = _memory_need(folder, config, kind, choice, given, sharing, drafts_from)
        free = free_memory()
        logger.info("memory: %s", need.describe(free))
        need.check(free)

    layers = load_folder(choice, whole, folder, given, target, kind, length, part)
    adapters = _make_adapters(layers, config, given, target, kind, choice)
    drafts = None
    if drafts_from is not None:
        # The pool takes what the weights of both leave free.
        drafts = load_draft_layers(drafts_from, layers, folder, given, target, kind, length)
    parted = part is None and drafts_from is None and 0 < max(config.windows) < length
    ratio = given.swa_full_tokens_ratio if parted else 0.0
    num_pages = choose_num_pages(
        config,
        draft_bytes_per_token=0 if drafts_from is None else kv_bytes_per_token(drafts_from, choice.kv_dtype),
        page_size=given.page_size,
        dtype=choice.kv_dtype,
        device=target,
        max_total_tokens=given.max_total_tokens,
        mem_fraction_static=given.mem_fraction_static,
        sharing=sharing,
        window_ratio=ratio,
        states=_state_bytes(config, given, kind),
        reserved_bytes=_reserved_bytes(config, choice, given, target, kind, length, part, drafts_from),
    )
    num_pages, states = _choose_states(config, given, kind, choice.kv_dtype, num_pages)
    info = ExecutorInfo(
        model=model_path,
        device=str(target),
        dtype=str(kind).removeprefix("torch."),
        vocab_size=config.vocab_size,
        context_length=length,
        eos_token_ids=config.eos_token_ids,
        page_size=given.page_size,
        num_pages=num_pages,
        max_pool_rows=given.max_pool_rows,
        kv_bytes_per_token=kv_bytes_per_token(whole, choice.kv_dtype),
        kernels=choice.kernels,
        adapter_bytes=adapters.slots.slot_bytes if adapters is not None else 0,
        windows=choose_swa_pool(config, num_pages, given.page_size, ratio),
        states=states,
    )
    if part is not None:
        info = part.agree(info)
    pool = make_pool(config, info, target, choice.kv_dtype, pool_memory)
    pages = PageTable(given.max_pool_rows, length, given.page_size, target, windows=info.windows is not None)
    sampling_backend = make_sampling_backend(choice, config)
    inputs = plan_inputs(choice, pages, FutureMap(given.max_pool_rows, target), sampling_backend)
    state_pool = _make_states(config, info, target, kind, pool)
    recordable = target.type == "cuda" and not given.disable_cuda_graph

    def backend_of(
        choice: BackendChoice, layers: Decoder | NativeDecoder, adapters: LoraManager | None
    ) -> ModelBackend:
        model = make_model(choice, layers, pool, pages)
        # Ranks of a divided model capture once they are connected.
        if isinstance(model, TorchModel) and recordable and part is None:
            return _recorded(model, config, choice, given, target, kind, adapters, inputs, state_pool, part)
        return model

    def load_again(checkpoint: Checkpoint) -> LoadedModel:
        """Load other weights of the model, over the same KV pool."""
        _check_same_model(whole, read_folder_config(checkpoint.folder), checkpoint.folder)
        if target.type == "cpu":
            _check_room(checkpoint.folder, kind, choice, given)
        own = choice.for_another_thread()
        # Memory that is resumed gets the weights of the start, from a converted file or at random as then.
        updates = checkpoint.updates if checkpoint.digest else None
        layers = load_folder(own, whole, checkpoint.folder, given, target, kind, length, part, updates)
        adapters = _make_adapters(layers, config, given, target, kind, own)
        draft_model = None if checkpoint.draft is None else load_draft_model_again(checkpoint.draft)
        return LoadedModel(backend_of(own, layers, adapters), adapters, draft_model)

    def load_draft_model_again(folder: Path) -> ModelBackend:
        """Load other weights of the draft model, over its KV pool."""
        if drafts is None or not isinstance(drafter := executor.drafter, ModelDrafter):
            raise ConfigError(
                "there is no draft model whose weights draft_model_path could change; leave it out, or start with"
                " --speculative-algorithm STANDALONE"
            )
        _check_same_model(drafts.config, read_folder_config(folder), folder)
        own, plain = drafts.choice.for_another_thread(), replace(given, quantization="none", deterministic=False)
        layers = load_folder(own, drafts.config, folder, plain, target, kind, length, None, ())
        return make_model(own, layers, drafter.pool, pages)

    model = backend_of(choice, layers, adapters)
    drafter = make_drafter(drafts, given, model, info, pages, target, choice.kv_dtype)
    executor = make(
        *(model, pool, pages, info, target, drafter, sampling_backend, adapters),
        state_pool,
    )
    if part is not None and isinstance(model, TorchModel) and recordable:
        divided = model

        def capture() -> None:
            executor.model = _recorded(divided, config, choice, given, target, kind, adapters, inputs, state_pool, part)

        executor.capture = capture
    if drafts is None or drafts.head is None:
        own_rank = (part.rank, part.size) if part is not None and part.within_rank else (0, 1)
        executor.weight_updates = WeightUpdates(folder, load_again, rank=own_rank[0], ranks=own_rank[1])
    if target.type == "cuda" and part is None:
        warm_up(executor)
    return executor


def _check_same_model(now: ModelConfig, then: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if a checkpoint is of another model than the one that runs."""
    for field in fields(now):
        ours, theirs = getattr(now, field.name), getattr(then, field.name)
        # Trainers often save no generation_config.json, which has further tokens that end an answer.
        if ours != theirs and field.name not in ("eos_token_ids", "dtype"):
            raise ConfigError(f"{folder} is another model: its config.json means {field.name} {theirs}, not {ours}")


def _check_room(folder: Path, dtype: torch.dtype, choice: BackendChoice, given: LoadOptions) -> None:
    """Raise ConfigError if a checkpoint does not fit next to the weights in use."""
    quantization = given.quantization if choice.native_model else "none"
    size, free = (
        weight_bytes(folder, dtype.itemsize, native=choice.native_model, quantization=quantization),
        free_memory(),
    )
    if size > free:
        raise ConfigError(
            f"the new weights take {size / 1e9:.2f} GB next to those in use, and {free / 1e9:.2f} GB are free"
        )


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


def _state_bytes(config: ModelConfig, given: LoadOptions, dtype: torch.dtype) -> StateBytes | None:
    """What recurrent states take of the memory; None for a model without."""
    if config.recurrent is None:
        return None
    sized = given.max_mamba_cache_size
    slots = given.max_pool_rows if sized is None or not given.mamba_full_memory_ratio else sized
    return StateBytes(
        # One more for rows that fill up a captured step.
        (slots + 1) * state_bytes(config.recurrent, dtype),
        given.mamba_full_memory_ratio if sized is None else 0.0,
    )


def _choose_states(
    config: ModelConfig, given: LoadOptions, dtype: torch.dtype, kv_dtype: torch.dtype, num_pages: int
) -> tuple[int, StateGroup | None]:
    """The pages of the KV pool, and the recurrent states of the model, for a pool that has `num_pages` for KV."""
    if config.recurrent is None:
        return num_pages, None
    slot_bytes = state_bytes(config.recurrent, dtype)
    page_bytes = given.page_size * kv_bytes_per_token(config, kv_dtype)
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


def _make_states(
    config: ModelConfig, info: ExecutorInfo, device: torch.device, dtype: torch.dtype, pool: KvPool
) -> StatePool | None:
    if config.recurrent is None or info.states is None:
        return None
    paged = PagedCheckpoints(pool.tensor, info.page_size) if info.states.slot_pages else None
    slots = info.max_pool_rows + (MAX_STATE_SAVES if paged is not None else info.states.num_slots)
    try:
        return StatePool(config.recurrent, slots, device, dtype, paged)
    except RuntimeError as error:  # on a GPU an OutOfMemoryError; CPUs have no special error for it
        raise ConfigError(
            f"{slots} recurrent states take {slots * info.states.slot_bytes / 2**30:.1f} GiB, more than {device} has "
            "free; lower max_running_requests or mamba_full_memory_ratio"
        ) from error


def _reserved_bytes(
    config: ModelConfig,
    choice: BackendChoice,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    length: int,
    part: ModelPartition | None,
    drafts_from: ModelConfig | None,
) -> int:
    """Bytes of a CUDA device that are neither weights nor KV; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    sizes: list[int] = []
    buckets: list[int] = []
    divided, capturable = part is not None, choice.triton or choice.flashinfer
    reason = why_not_record(
        *(config, device, dtype),
        capturable=capturable,
        divided=not _captures_alone_or_together(given, part),
        adapters=given.lora_slots > 0 and not choice.triton,
    )
    if not given.disable_cuda_graph and not reason:
        sizes = capture_batch_sizes(min(given.max_pool_rows, given.cuda_graph_max_bs or DEFAULT_MAX_CAPTURE_BS))
        buckets = [own.tokens for own in capture_buckets(_max_capture_tokens(config, choice, given))]
        # With adapters each size is captured twice.
        sizes, buckets = ([*own, *own] if given.lora_slots else own for own in (sizes, buckets))
    need = device_memory(
        config,
        dtype,
        max_step_tokens=given.max_step_tokens,
        max_pool_rows=given.max_pool_rows,
        context_length=length,
        page_size=given.page_size,
        captured=tuple(sizes),
        buckets=tuple(buckets),
        divided=divided,
        draft_tokens=given.draft_tokens,
        flashinfer=choice.flashinfer,
    )
    # A draft model's steps run between those of the model, whose memory torch's allocator gives them.
    drafting = 0 if drafts_from is None else step_bytes(drafts_from, given.max_pool_rows, given.max_pool_rows, 2)
    logger.info(
        "device memory besides weights and KV: %.2f GiB for steps of %d tokens, %.2f for graphs, %.2f for page tables, "
        "%.2f for libraries",
        *(max(need.steps, drafting) / 2**30, given.max_step_tokens, need.graphs / 2**30),
        *(need.page_table / 2**30, need.libraries / 2**30),
    )
    return need.total + max(0, drafting - need.steps)


def memory_need(model_path: str, **options: Any) -> tuple[MemoryNeed, str]:
    """Return what a model takes on a CPU, by its config and the headers of its files, and what multiplies its matrices
    (see describe_formats). Downloads it if it is not here.

    options: see LoadOptions. Raises ConfigError; see load_executor.
    """
    given = with_torch_layers(LoadOptions(**options), None)
    folder, target = resolve_model_path(model_path), torch.device("cpu")
    config = read_folder_config(folder)
    kind = choose_dtype(given.dtype, target, config)
    choice = backends_for(given, config, kind, target)
    drafts_from = draft_config(given, folder, config)
    instructions = choice.engine.library.packed_instructions() if choice.engine and choice.native_model else ""
    need = _memory_need(folder, config, kind, choice, given, given.ranks, drafts_from)
    return need, describe_formats(folder, instructions, given.quantization)


def _memory_need(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    choice: BackendChoice,
    given: LoadOptions,
    sharing: int,
    drafts_from: ModelConfig | None,
) -> MemoryNeed:
    per_token = kv_bytes_per_token(config, choice.kv_dtype)
    if drafts_from is not None:
        per_token += kv_bytes_per_token(drafts_from, choice.kv_dtype)
    native, quantization = choice.native_model, given.quantization if choice.native_model else "none"
    tied = config.tied_embeddings
    states = _state_bytes(config, given, dtype) or StateBytes(0, 0.0)
    per_token = int(per_token * (1 + states.ratio))
    return MemoryNeed(
        weight_bytes(folder, dtype.itemsize, native=native, quantization=quantization, tied=tied)
        + draft_weight_bytes(given, dtype.itemsize, native=native),
        per_token * (given.max_total_tokens or default_cpu_tokens(per_token, sharing)) + states.fixed_bytes,
        activation_bytes(config.hidden_size, config.intermediate_size, config.vocab_size, given.max_pool_rows),
    )


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


def _recorded(
    model: TorchModel,
    config: ModelConfig,
    choice: BackendChoice,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    adapters: LoraManager | None,
    inputs: PlanInputs,
    states: StatePool | None,
    part: ModelPartition | None,
) -> ModelBackend:
    """Return the model with captured decode steps, or the model itself where they cannot be captured."""
    capturable, divided = choice.triton or choice.flashinfer, not _captures_alone_or_together(given, part)
    uncaptured = adapters is not None and not choice.triton
    reason = why_not_record(config, device, dtype, capturable=capturable, divided=divided, adapters=uncaptured)
    if reason:
        logger.info("no CUDA graphs: %s", reason)
        return model
    slots = None if adapters is None else adapters.slots
    assert slots is None or isinstance(slots, TorchLoraPool)
    sizes = given.max_pool_rows, given.cuda_graph_max_bs or DEFAULT_MAX_CAPTURE_BS
    max_tokens = _max_capture_tokens(config, choice, given)
    return capture_graphs(model, config, sizes, device, slots, inputs, max_tokens, states, divided=part is not None)


def _captures_alone_or_together(given: LoadOptions, part: ModelPartition | None) -> bool:
    """Whether a model is whole, or its ranks capture steps together."""
    return part is None or (part.captures and given.enable_tp_cuda_graph)


def _max_capture_tokens(config: ModelConfig, choice: BackendChoice, given: LoadOptions) -> int:
    """The most tokens of a captured step with chunks or drafts. flashinfer would plan it for one number of rows, and
    recurrent states are computed row by row.
    """
    if not choice.triton or choice.flashinfer or config.recurrent is not None:
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


def _context_length(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return config.context_length
    if not 1 <= wanted <= config.context_length:
        raise ConfigError(f"context_length is {wanted}; this model's is {config.context_length}, choose at most that")
    return wanted


def _make_adapters(
    layers: Decoder | NativeDecoder,
    config: ModelConfig,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    choice: BackendChoice,
) -> LoraManager | None:
    """Make the slots of LoRA adapters; None if LoRA is off."""
    if not given.lora_slots:
        return None
    slots: LoraMemoryPool
    if isinstance(layers, NativeDecoder):
        slots = NativeLoraPool(layers, given.lora_slots, given.lora_rank)
    else:
        kernel_tokens = max(MIN_KERNEL_TOKENS, given.max_pool_rows) if choice.triton else 0
        slots = TorchLoraPool(layers, config, given.lora_slots, given.lora_rank, device, dtype, kernel_tokens)
    return LoraManager(config, slots, given.lora_slots, given.lora_rank, given.max_pool_rows)
