"""Loads a model by name into an executor."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, ExecutorInfo, StateGroup
from tokenyard.base.protocols import MAX_STATE_SAVES
from tokenyard.base.version import __version__
from tokenyard.executor.backend_choice import (
    BITS_ON_LOAD,
    BackendChoice,
    choose_backends,
    load_layers,
    make_model,
    make_sampling_backend,
    plan_inputs,
)
from tokenyard.executor.cuda_devices import choose_device, prepare_cuda
from tokenyard.executor.cuda_graph_runner import DEFAULT_MAX_CAPTURE_BS, capture_batch_sizes, capture_graphs
from tokenyard.executor.cuda_graph_runner import why_not as why_not_record
from tokenyard.executor.device_memory import device_memory, step_bytes
from tokenyard.executor.distributed.partition import ModelPartition, layers_only
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.drafter import Choose, Drafter, NgramDrafter
from tokenyard.executor.formats.converted import (
    BESIDE,
    ConvertedFile,
    ConvertedFileWriter,
    UnusableFileError,
    WeightsMemory,
)
from tokenyard.executor.formats.on_load import QuantizedOnLoad
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.future_map import FutureMap
from tokenyard.executor.gguf_file.folder import LINK
from tokenyard.executor.gguf_file.weights import GgufWeights
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.kv_pool import (
    KvPool,
    StateBytes,
    choose_num_pages,
    choose_swa_pool,
    default_cpu_tokens,
    kv_bytes_per_token,
)
from tokenyard.executor.lora_manager import MIN_KERNEL_TOKENS, LoraManager, LoraMemoryPool, TorchLoraPool
from tokenyard.executor.memory_fit import MemoryNeed, activation_bytes, describe_formats, free_memory, weight_bytes
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.draft_head import (
    DraftHead,
    DraftHeadWeights,
    draft_head_config,
    draft_head_names,
)
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.models.stacked_params import checkpoint_weights, cut_out
from tokenyard.executor.mtp_drafter import MtpDrafter
from tokenyard.executor.native.build import library_name
from tokenyard.executor.native.lora import NativeLoraPool
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.plan_inputs import PlanInputs
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.state_pool import PagedCheckpoints, StatePool, state_bytes
from tokenyard.executor.warm_up import CHUNKS, warm_up
from tokenyard.executor.weight_updates import Checkpoint, LoadedModel, WeightUpdates
from tokenyard.executor.weights import DummyWeights, SafetensorsFile, SafetensorsWeights, Weights, read_json

logger = logging.getLogger(__name__)

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
    model_impl, attention_backend, quantization, kv_cache_dtype, deterministic: see choose_backends.
    disable_cuda_graph: turns the capture of decode steps off.
    cuda_graph_max_bs: the largest batch size to capture; None for DEFAULT_MAX_CAPTURE_BS.
    swa_full_tokens_ratio: see choose_swa_pool; divided models keep all tokens in all layers.
    max_step_tokens: the most prompt tokens of a step, for which a CUDA device keeps memory.
    max_mamba_cache_size, mamba_full_memory_ratio, mamba_track_interval: of recurrent states; see StateGroup.fitting.
    mamba_shared_memory: KV and checkpoints of recurrent states share the memory of both; see StateGroup.sharing.
    draft_tokens: the most drafts of a row in one step; 0 for none.
    draft_model: the model that drafts; "" for prompt lookup, or for `draft_head`.
    draft_head: whether the head that the checkpoint brings drafts (MTP).
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
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    swa_full_tokens_ratio: float = 0.0
    max_step_tokens: int = 16384
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float = 0.9
    mamba_track_interval: int = 256
    mamba_shared_memory: bool = False
    draft_tokens: int = 0
    draft_model: str = ""
    draft_head: bool = False
    lora_slots: int = 0
    lora_rank: int = 16
    rank: int = 0
    ranks: int = 1
    nodes: int = 1


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
    given = LoadOptions(**options)
    target, sharing = _prepare_device(given, part)
    folder = resolve_model_path(model_path)
    config = whole = read_folder_config(folder)
    refuse_unsupported(whole, given, part)
    if part is not None:
        config, given = part.config(whole), replace(given, model_impl=layers_only(part, given.model_impl))
    if given.draft_tokens and given.draft_head:
        given = replace(given, model_impl=_layers_under_head(given.model_impl))
    kind = choose_dtype(given.dtype, target, config)
    length = _context_length(given.context_length, config)
    choice = _choose_backends(given, config, kind, target)
    if target.type == "cpu" and part is None and given.load_format != "dummy":
        need = _memory_need(folder, config, kind, choice, given, sharing)
        free = free_memory()
        logger.info("memory: %s", need.describe(free))
        need.check(free)

    layers = _load_layers(choice, whole, folder, given, target, kind, length, part)
    adapters = _make_adapters(layers, config, given, target, kind, choice)
    drafts_from = _draft_config(given.draft_model, folder, config, length) if given.draft_tokens else None
    # The pool takes what the weights of both models leave free.
    draft_layers = None if drafts_from is None else _load_draft_layers(drafts_from, given, length, target, kind)
    head = None
    if given.draft_tokens and given.draft_head:
        drafts_from = draft_head_config(config)
        head_choice = _choose_backends(
            replace(given, model_impl="torch", quantization="none", deterministic=False), drafts_from, kind, target
        )
        head = _load_draft_head(head_choice, config, layers, folder, given, target, kind, length)
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
    pool = _make_pool(config, info, target, choice.kv_dtype, pool_memory)
    pages = PageTable(given.max_pool_rows, length, given.page_size, target, windows=info.windows is not None)
    model = make_model(choice, layers, pool, pages)
    sampling_backend = make_sampling_backend(choice, config)
    inputs = plan_inputs(choice, pages, FutureMap(given.max_pool_rows, target), sampling_backend)
    if isinstance(model, TorchModel) and target.type == "cuda" and not given.disable_cuda_graph:
        model = _recorded(model, config, choice, given, target, kind, adapters, inputs, divided=part is not None)

    def drafter(choose: Choose) -> Drafter:
        if drafts_from is not None and head is not None:
            head_pool = _make_pool(drafts_from, info, target, choice.kv_dtype)
            head_model = make_model(head_choice, head.layers, head_pool, pages)
            assert isinstance(head_model, TorchModel)
            return MtpDrafter(given.draft_tokens, head, head_model, head_pool, pages, choose)
        if drafts_from is None or draft_layers is None:
            return NgramDrafter(given.draft_tokens)
        draft_pool = _make_pool(drafts_from, info, target, choice.kv_dtype)
        draft_model = make_model(*draft_layers, draft_pool, pages)
        made = ModelDrafter(given.draft_tokens, draft_model, draft_pool, pages, choose)
        if target.type == "cuda":
            made.warm_up(CHUNKS)
        return made

    def load_again(checkpoint: Checkpoint) -> LoadedModel:
        """Load other weights of the model, over the same KV pool."""
        _check_same_model(whole, read_folder_config(checkpoint.folder), checkpoint.folder)
        if target.type == "cpu":
            _check_room(checkpoint.folder, kind, choice, given)
        # Steps run meanwhile, and the threads of the native kernels take one job at a time.
        own = choice if choice.engine is None else replace(choice, engine=choice.engine.another())
        # Memory that is resumed gets the weights of the start, from a converted file or at random as then.
        updates = checkpoint.updates if checkpoint.digest else None
        layers = _load_layers(own, whole, checkpoint.folder, given, target, kind, length, None, updates)
        adapters = _make_adapters(layers, config, given, target, kind, own)
        model = make_model(own, layers, pool, pages)
        if isinstance(model, TorchModel) and target.type == "cuda" and not given.disable_cuda_graph:
            model = _recorded(model, config, own, given, target, kind, adapters, inputs, divided=False)
        return LoadedModel(model, adapters)

    executor = make(
        *(model, pool, pages, info, target, drafter if given.draft_tokens else None, sampling_backend, adapters),
        _make_states(config, info, target, kind, pool),
    )
    if part is None and head is None:
        executor.weight_updates = WeightUpdates(folder, load_again)
    if target.type == "cuda" and part is None:
        warm_up(executor)
    return executor


def _layers_under_head(model_impl: str) -> str:
    """Return what computes a model whose head drafts: torch's layers, as the head reads their hidden states.

    Raises ConfigError where `model_impl` demands whole steps by native kernels.
    """
    if model_impl == "native":
        raise ConfigError(
            "--speculative-algorithm NEXTN reads hidden states, which --model-impl native does not return; leave out"
            " --model-impl"
        )
    return "torch"


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
        slots * state_bytes(config.recurrent, dtype), given.mamba_full_memory_ratio if sized is None else 0.0
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
    divided, capturable = part is not None, choice.triton or choice.flashinfer
    reason = why_not_record(
        *(config, device, dtype),
        capturable=capturable,
        divided=divided,
        adapters=given.lora_slots > 0 and not choice.triton,
    )
    if not given.disable_cuda_graph and not reason:
        sizes = capture_batch_sizes(min(given.max_pool_rows, given.cuda_graph_max_bs or DEFAULT_MAX_CAPTURE_BS))
        # With adapters each size is captured twice.
        sizes *= 2 if given.lora_slots else 1
    need = device_memory(
        config,
        dtype,
        max_step_tokens=given.max_step_tokens,
        max_pool_rows=given.max_pool_rows,
        context_length=length,
        page_size=given.page_size,
        captured=tuple(sizes),
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
    given = LoadOptions(**options)
    folder, target = resolve_model_path(model_path), torch.device("cpu")
    config = read_folder_config(folder)
    kind = choose_dtype(given.dtype, target, config)
    choice = _choose_backends(given, config, kind, target)
    instructions = choice.engine.library.packed_instructions() if choice.engine and choice.native_model else ""
    need = _memory_need(folder, config, kind, choice, given, given.ranks)
    return need, describe_formats(folder, instructions, given.quantization)


def _memory_need(
    folder: Path, config: ModelConfig, dtype: torch.dtype, choice: BackendChoice, given: LoadOptions, sharing: int
) -> MemoryNeed:
    per_token = kv_bytes_per_token(config, choice.kv_dtype)
    quantization = given.quantization if choice.native_model else "none"
    tied = config.tied_embeddings
    states = _state_bytes(config, given, dtype) or StateBytes(0, 0.0)
    per_token = int(per_token * (1 + states.ratio))
    return MemoryNeed(
        weight_bytes(folder, dtype.itemsize, native=choice.native_model, quantization=quantization, tied=tied),
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


def _choose_backends(
    given: LoadOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> BackendChoice:
    return choose_backends(
        *(given.model_impl, given.attention_backend, given.quantization, config, dtype, device, given.threads),
        deterministic=given.deterministic,
        kv_cache_dtype=given.kv_cache_dtype,
    )


def _recorded(
    model: TorchModel,
    config: ModelConfig,
    choice: BackendChoice,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    adapters: LoraManager | None,
    inputs: PlanInputs,
    *,
    divided: bool,
) -> ModelBackend:
    """Return the model with captured decode steps, or the model itself where they cannot be captured."""
    capturable = choice.triton or choice.flashinfer
    uncaptured = adapters is not None and not choice.triton
    reason = why_not_record(config, device, dtype, capturable=capturable, divided=divided, adapters=uncaptured)
    if reason:
        logger.info("no CUDA graphs: %s", reason)
        return model
    slots = None if adapters is None else adapters.slots
    assert slots is None or isinstance(slots, TorchLoraPool)
    sizes = given.max_pool_rows, given.cuda_graph_max_bs or DEFAULT_MAX_CAPTURE_BS
    return capture_graphs(model, config, sizes, device, slots, inputs)


def _load_draft_layers(
    config: ModelConfig, given: LoadOptions, context_length: int, device: torch.device, dtype: torch.dtype
) -> tuple[BackendChoice, Decoder | NativeDecoder]:
    """Load the weights of the draft model, which has this config. Returns how it is computed, and its layers."""
    given = replace(given, quantization="none", deterministic=False)
    choice = _choose_backends(given, config, dtype, device)
    folder = resolve_model_path(given.draft_model)
    return choice, _load_layers(choice, config, folder, given, device, dtype, context_length, None)


@torch.inference_mode()
def _load_draft_head(
    choice: BackendChoice,
    config: ModelConfig,
    target: Decoder | NativeDecoder,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
) -> DraftHead:
    """Load the draft head that a checkpoint brings. Raises ConfigError if it brings none."""
    names, instead = draft_head_names(config), "use --speculative-algorithm NGRAM or STANDALONE"
    if names is None or not isinstance(target, Decoder):
        raise ConfigError(f"models of {config.architecture} bring no draft head (MTP); {instead}")
    own, weights = draft_head_config(config), None
    if given.load_format != "dummy":
        files = DraftHeadWeights(folder, device, dtype, names)
        if f"{names.product}.weight" not in files:
            raise ConfigError(
                f"the checkpoint in {folder} brings no draft head (MTP): it has no {names.product}.weight; {instead}"
            )
        weights = checkpoint_weights(own, files)
    weights = weights or DummyWeights(device, dtype, given.seed)
    layers = load_layers(choice, own, weights, device, dtype, context_length)
    assert isinstance(layers, Decoder)
    return DraftHead(target, layers, weights, names)


def _draft_config(draft_model: str, folder: Path, config: ModelConfig, context_length: int) -> ModelConfig | None:
    """The config of a draft model, None for "". Raises ConfigError if it does not fit the model in `folder`, or has
    other tokens.
    """
    if not draft_model:
        return None
    draft_folder = resolve_model_path(draft_model)
    found = read_folder_config(draft_folder)
    if found.recurrent is not None:
        raise ConfigError(f"the draft model {draft_model} has recurrent states; choose one whose layers all attend")
    if found.vocab_size != config.vocab_size:
        raise ConfigError(
            f"the draft model {draft_model} has {found.vocab_size} tokens, and the model {config.vocab_size}; a draft "
            "model needs the same vocabulary"
        )
    if _vocabulary(draft_folder) != _vocabulary(folder):
        raise ConfigError(
            f"the draft model {draft_model} has another tokenizer than the model; a draft model needs the same one"
        )
    if found.context_length < context_length:
        raise ConfigError(
            f"the draft model {draft_model} has a context of {found.context_length} tokens, below the {context_length} "
            "served; set --context-length to at most that"
        )
    return found


def _vocabulary(folder: Path) -> Any:
    """Return the vocabulary of a folder's tokenizer.json; None without one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    said = read_json(file)
    model = said.get("model")
    added = [(one.get("id"), one.get("content")) for one in said.get("added_tokens") or () if isinstance(one, dict)]
    return (model.get("vocab") if isinstance(model, dict) else None), added


def read_folder_config(folder: Path) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json. Raises ConfigError."""
    generation = folder / "generation_config.json"
    return read_model_config(read_json(folder / "config.json"), read_json(generation) if generation.exists() else None)


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


def _context_length(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return config.context_length
    if not 1 <= wanted <= config.context_length:
        raise ConfigError(f"context_length is {wanted}; this model's is {config.context_length}, choose at most that")
    return wanted


@torch.inference_mode()
def _load_layers(
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
    choice = _choose_backends(given, config, kind, device)
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


def _make_pool(
    config: ModelConfig,
    info: ExecutorInfo,
    device: torch.device,
    dtype: torch.dtype,
    memory: Callable[[int], torch.Tensor] | None = None,
) -> KvPool:
    try:
        return KvPool(config, info.num_pages, info.page_size, device, dtype, info.windows, memory=memory)
    except (RuntimeError, OSError, OverflowError) as error:  # on a GPU an OutOfMemoryError; the last two are mmap's
        tokens = info.num_pages * info.page_size
        raise ConfigError(
            f"a KV pool of {tokens} tokens takes {tokens * info.kv_bytes_per_token / 2**30:.1f} GiB, more than {device}"
            " has free; lower max_total_tokens or mem_fraction_static"
        ) from error
