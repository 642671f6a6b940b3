"""Loads the layers that draft: those of a draft model, or of a head that reads the target's hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, ExecutorInfo
from tokenyard.executor.backend_choice import BackendChoice, load_layers, make_model
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.drafter import Choose, Drafter, Hidden, NgramDrafter
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.head_drafter import HeadDrafter
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.kv_pool import make_pool
from tokenyard.executor.layer_loader import load_folder, read_folder_config
from tokenyard.executor.load_options import LoadOptions, backends_for
from tokenyard.executor.memory_fit import EMBEDDINGS, HEADS, weight_bytes
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.draft_head import (
    FIRST_LAYER,
    DraftHead,
    DraftHeadWeights,
    MtpHead,
    draft_head_config,
    draft_head_names,
)
from tokenyard.executor.models.eagle_head import (
    EAGLE_LAYERS,
    Eagle3Head,
    EagleHead,
    draft_token_ids,
    eagle_head_config,
)
from tokenyard.executor.models.model_backend import ModelBackend, TorchModel
from tokenyard.executor.models.stacked_params import checkpoint_weights
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.weights import DummyWeights, Weights, read_json

EAGLE_HEADS = ("EAGLE", "EAGLE3")
INSTEAD = "use --speculative-algorithm NGRAM or STANDALONE"


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """Layers that draft; their KV is in a pool of their own, with as many pages as the target's.

    config: of these layers.
    choice: what computes them.
    layers: the layers.
    head: the draft head that they are part of; None for those of a draft model.
    """

    config: ModelConfig
    choice: BackendChoice
    layers: Decoder | NativeDecoder
    head: DraftHead | None = None


def draft_config(
    given: LoadOptions, folder: Path, config: ModelConfig, context_length: int | None = None
) -> ModelConfig | None:
    """Return the config of the layers that draft for the model in `folder`, None where none do. Reads no weights.

    context_length: see LoadOptions; None for the model's. Raises ConfigError for layers that do not fit the model.
    """
    if not given.draft_tokens:
        return None
    if given.draft_head in EAGLE_HEADS:
        raw = read_json(resolve_model_path(given.draft_model) / "config.json")
        return eagle_head_config(raw, given.draft_head, config, given.draft_model)
    if given.draft_head:
        if draft_head_names(config) is None:
            raise ConfigError(f"models of {config.architecture} bring no draft head (MTP); {INSTEAD}")
        return draft_head_config(config)
    if given.draft_model:
        return _draft_model_config(given.draft_model, folder, config, context_length or config.context_length)
    return None


def draft_weight_bytes(given: LoadOptions, itemsize: int, *, native: bool) -> int:
    """Return the bytes of the weights that draft, 0 for a head in the target's checkpoint, which counts with it.

    itemsize, native: see weight_bytes.
    """
    if not given.draft_tokens or not given.draft_model:
        return 0
    # The embedding of an EAGLE head is the target's, and so is the output head of the first EAGLE.
    shared = {"EAGLE": EMBEDDINGS + HEADS, "EAGLE3": EMBEDDINGS}.get(given.draft_head, ())
    return weight_bytes(resolve_model_path(given.draft_model), itemsize, native=native, without=shared)


def load_draft_layers(
    config: ModelConfig,
    target: Decoder | NativeDecoder,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
) -> DraftLayers:
    """Load the layers that draft, which have this config. target: the layers of the model, which is in `folder`.

    Raises ConfigError where there are no weights, or others.
    """
    given = replace(given, quantization="none", deterministic=False)
    if given.draft_head:
        given = replace(given, model_impl="torch")
    choice = backends_for(given, config, dtype, device)
    if given.draft_head:
        assert isinstance(target, Decoder)
        load = _load_eagle_head if given.draft_head in EAGLE_HEADS else _load_mtp_head
        head = load(choice, config, target, folder, given, device, dtype, context_length)
        return DraftLayers(config, choice, head.layers, head)
    layers = load_folder(
        choice, config, resolve_model_path(given.draft_model), given, device, dtype, context_length, None
    )
    return DraftLayers(config, choice, layers)


def make_drafter(
    drafts: DraftLayers | None,
    given: LoadOptions,
    target: ModelBackend,
    info: ExecutorInfo,
    pages: PageTable,
    device: torch.device,
    kv_dtype: torch.dtype,
) -> Callable[[Choose], Drafter] | None:
    """Return what makes the drafter of an executor, None where nothing drafts.

    drafts: None for prompt lookup. target: computes the model.
    """
    if not given.draft_tokens:
        return None

    def make(choose: Choose) -> Drafter:
        if drafts is None:
            return NgramDrafter(given.draft_tokens)
        pool = make_pool(drafts.config, info, device, kv_dtype)
        model = make_model(drafts.choice, drafts.layers, pool, pages)
        if drafts.head is not None:
            assert isinstance(model, TorchModel)
            inputs = _combined(drafts.head, target) if isinstance(drafts.head, Eagle3Head) else None
            return HeadDrafter(given.draft_tokens, drafts.head, model, pool, pages, choose, inputs)
        return ModelDrafter(given.draft_tokens, model, pool, pages, choose)

    return make


@torch.inference_mode()
def _load_mtp_head(
    choice: BackendChoice,
    config: ModelConfig,
    target: Decoder,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
) -> DraftHead:
    """Load the draft head that a checkpoint brings. Raises ConfigError if it brings none."""
    names, weights = draft_head_names(target.config), None
    assert names is not None
    if given.load_format != "dummy":
        files = DraftHeadWeights(folder, device, dtype, names.layer)
        if f"{names.product}.weight" not in files:
            raise ConfigError(
                f"the checkpoint in {folder} brings no draft head (MTP): it has no {names.product}.weight; {INSTEAD}"
            )
        weights = checkpoint_weights(config, files)
    weights = weights or DummyWeights(device, dtype, given.seed)
    layers = load_layers(choice, config, weights, device, dtype, context_length)
    assert isinstance(layers, Decoder)
    return MtpHead(target, layers, weights, names)


@torch.inference_mode()
def _load_eagle_head(
    choice: BackendChoice,
    config: ModelConfig,
    target: Decoder,
    folder: Path,
    given: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
) -> DraftHead:
    """Load an EAGLE head. Raises ConfigError for other tensors than its config means."""
    eagle, attention = config.eagle, f"{FIRST_LAYER}self_attn."
    assert eagle is not None
    files: DraftHeadWeights | None = None
    weights: Weights
    if given.load_format == "dummy":
        weights = DummyWeights(device, dtype, given.seed)
    else:
        path = resolve_model_path(given.draft_model)
        found = (DraftHeadWeights(path, device, dtype, layer) for layer in EAGLE_LAYERS)
        files = next((one for one in found if f"{attention}q_proj.weight" in one), None)
        if files is None or f"{attention}q_norm.weight" in files:
            named = " or ".join(f"{layer}self_attn.q_proj.weight" for layer in EAGLE_LAYERS)
            raise ConfigError(f"{path} holds no EAGLE head of Llama's shape, which has a tensor {named} and no q_norm")
        config = replace(
            config,
            qkv_bias=f"{attention}q_proj.bias" in files,
            output_bias=f"{attention}o_proj.bias" in files,
            mlp_bias=f"{FIRST_LAYER}mlp.down_proj.bias" in files,
        )
        weights = checkpoint_weights(config, files)
    layers = load_layers(choice, config, weights, device, dtype, context_length)
    assert isinstance(layers, Decoder)
    bias = files is not None and "fc.bias" in files
    if not eagle.aux_layers:
        return EagleHead(target, layers, weights, bias=bias)
    has_head = files is None or "lm_head.weight" in files
    d2t: torch.Tensor | None = None
    if files is None:
        d2t = torch.zeros(eagle.draft_vocab_size, dtype=torch.int64)
    elif "d2t" in files:
        d2t = files.stored("d2t")
    token_ids = draft_token_ids(d2t, target.config.vocab_size, eagle.draft_vocab_size, given.draft_model)
    if not has_head and eagle.draft_vocab_size != target.config.vocab_size:
        raise ConfigError(f"the head {given.draft_model} drafts only some tokens, and has no tensor lm_head.weight")
    return Eagle3Head(target, layers, weights, bias=bias, has_head=has_head, token_ids=token_ids)


def _combined(head: Eagle3Head, target: ModelBackend) -> Hidden:
    """Return what an EAGLE-3 head reads of the steps of a model."""
    assert isinstance(target, TorchModel | CudaGraphRunner)
    return lambda first, last: head.combined(target.aux_hidden(first, last))


def _draft_model_config(draft_model: str, folder: Path, config: ModelConfig, context_length: int) -> ModelConfig:
    """The config of a draft model. Raises ConfigError if it does not fit the model in `folder`, or has other tokens."""
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
