"""Loads the layers that draft: those of a draft model, or of a head that reads the target's hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, ExecutorInfo
from tokenyard.executor.backend_choice import make_model
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.drafter import Choose, Drafter, Hidden, NgramDrafter
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.head_drafter import HeadDrafter
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.kv_pool import make_pool
from tokenyard.executor.layer_loader import load_folder, load_layers, read_folder_config
from tokenyard.executor.load_options import LoadOptions, LoadSpec, backends_for
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
ATTENTION = f"{FIRST_LAYER}self_attn."
INSTEAD = "use --speculative-algorithm NGRAM or STANDALONE"


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """Layers that draft. They have their own KV pool, with as many pages as the target's.

    spec: how they were loaded.
    layers: the layers.
    head: the draft head that they are part of; None for those of a draft model.
    """

    spec: LoadSpec
    layers: Decoder | NativeDecoder
    head: DraftHead | None = None


def draft_config(target: LoadSpec) -> ModelConfig | None:
    """Return the config of the layers that draft for a model, None where none do. Reads no weights.

    Raises ConfigError for layers that do not fit the model.
    """
    given, config = target.given, target.config
    if not given.draft_tokens:
        return None
    if given.draft_head in EAGLE_HEADS:
        raw = read_json(resolve_model_path(given.draft_model) / "config.json")
        return eagle_head_config(raw, given.draft_head, config, given.draft_model)
    if given.draft_head:
        if draft_head_names(config) is None:
            raise ConfigError(f"models of {config.architecture} bring no draft head (MTP); {INSTEAD}")
        return draft_head_config(config)
    return _draft_model_config(target) if given.draft_model else None


def draft_weight_bytes(given: LoadOptions, itemsize: int, *, native: bool) -> int:
    """Return the bytes of the weights that draft, 0 for a head in the target's checkpoint, which counts with it.

    itemsize, native: see weight_bytes.
    """
    if not given.draft_tokens or not given.draft_model:
        return 0
    # The embedding of an EAGLE head is the target's, and so is the output head of the first EAGLE.
    shared = {"EAGLE": EMBEDDINGS + HEADS, "EAGLE3": EMBEDDINGS}.get(given.draft_head, ())
    return weight_bytes(resolve_model_path(given.draft_model), itemsize, native=native, without=shared)


@torch.inference_mode()
def load_draft_layers(target: LoadSpec, layers: Decoder | NativeDecoder) -> DraftLayers:
    """Load the layers that draft for a model. layers: the model's.

    Raises ConfigError where there are no weights, or others.
    """
    head, config = target.given.draft_head, target.draft
    assert config is not None
    given = replace(target.given, quantization="none", deterministic=False)
    if head:
        given = replace(given, model_impl="torch")
    spec = replace(
        target,
        folder=resolve_model_path(given.draft_model) if given.draft_model else target.folder,
        given=given,
        part=None,
        whole=config,
        config=config,
        choice=backends_for(given, config, target.dtype, target.device),
        draft=None,
    )
    if not head:
        return DraftLayers(spec, load_folder(spec))
    assert isinstance(layers, Decoder)
    load = _load_eagle_head if head in EAGLE_HEADS else _load_mtp_head
    return load(spec, layers)


def make_drafter(
    drafts: DraftLayers | None, spec: LoadSpec, target: ModelBackend, info: ExecutorInfo, pages: PageTable
) -> Callable[[Choose], Drafter] | None:
    """Return what makes the drafter of an executor, None where nothing drafts.

    drafts: None for prompt lookup. spec: of the model. target: computes the model.
    """
    max_drafts = spec.given.draft_tokens
    if not max_drafts:
        return None

    def make(choose: Choose) -> Drafter:
        if drafts is None:
            return NgramDrafter(max_drafts)
        pool = make_pool(drafts.spec.config, info, spec.device, spec.choice.kv_dtype)
        model = make_model(drafts.spec.choice, drafts.layers, pool, pages)
        if drafts.head is not None:
            assert isinstance(model, TorchModel)
            inputs = _combined(drafts.head, target) if isinstance(drafts.head, Eagle3Head) else None
            return HeadDrafter(max_drafts, drafts.head, model, pool, pages, choose, inputs)
        return ModelDrafter(max_drafts, model, pool, pages, choose)

    return make


def _load_mtp_head(spec: LoadSpec, target: Decoder) -> DraftLayers:
    """Load the draft head that a checkpoint brings. Raises ConfigError if it brings none."""
    names = draft_head_names(target.config)
    assert names is not None
    files: DraftHeadWeights | None = None
    if spec.given.load_format != "dummy":
        files = DraftHeadWeights(spec.folder, spec.device, spec.dtype, names.layer)
        if f"{names.product}.weight" not in files:
            raise ConfigError(
                f"the checkpoint in {spec.folder} brings no draft head (MTP): it has no {names.product}.weight;"
                f" {INSTEAD}"
            )
    layers, weights = _load_head_layers(spec, files)
    return DraftLayers(spec, layers, MtpHead(target, layers, weights, names))


def _load_eagle_head(spec: LoadSpec, target: Decoder) -> DraftLayers:
    """Load an EAGLE head. Raises ConfigError for other tensors than its config means."""
    files: DraftHeadWeights | None = None
    if spec.given.load_format != "dummy":
        files = _eagle_files(spec)
        config = replace(
            spec.config,
            qkv_bias=f"{ATTENTION}q_proj.bias" in files,
            output_bias=f"{ATTENTION}o_proj.bias" in files,
            mlp_bias=f"{FIRST_LAYER}mlp.down_proj.bias" in files,
        )
        spec = replace(spec, whole=config, config=config)
    layers, weights = _load_head_layers(spec, files)
    eagle, bias = spec.config.eagle, files is not None and "fc.bias" in files
    assert eagle is not None
    if not eagle.aux_layers:
        return DraftLayers(spec, layers, EagleHead(target, layers, weights, bias=bias))
    name, tokens = spec.given.draft_model, target.config.vocab_size
    has_head = files is None or "lm_head.weight" in files
    d2t: torch.Tensor | None = None
    if files is None:
        d2t = torch.zeros(eagle.draft_vocab_size, dtype=torch.int64)
    elif "d2t" in files:
        d2t = files.stored("d2t")
    token_ids = draft_token_ids(d2t, tokens, eagle.draft_vocab_size, name)
    if not has_head and eagle.draft_vocab_size != tokens:
        raise ConfigError(f"the head {name} drafts only some tokens, and has no tensor lm_head.weight")
    head = Eagle3Head(target, layers, weights, bias=bias, has_head=has_head, token_ids=token_ids)
    return DraftLayers(spec, layers, head)


def _eagle_files(spec: LoadSpec) -> DraftHeadWeights:
    """The tensors of an EAGLE head. Raises ConfigError for a checkpoint without, or with one of another shape."""
    found = (DraftHeadWeights(spec.folder, spec.device, spec.dtype, layer) for layer in EAGLE_LAYERS)
    files = next((one for one in found if f"{ATTENTION}q_proj.weight" in one), None)
    if files is None or f"{ATTENTION}q_norm.weight" in files:
        named = " or ".join(f"{layer}self_attn.q_proj.weight" for layer in EAGLE_LAYERS)
        raise ConfigError(
            f"{spec.folder} holds no EAGLE head of Llama's shape, which has a tensor {named} and no q_norm"
        )
    return files


def _load_head_layers(spec: LoadSpec, files: DraftHeadWeights | None) -> tuple[Decoder, Weights]:
    """The layers of a head and what their weights come from: its files, or random numbers for None."""
    dummy: Weights = DummyWeights(spec.device, spec.dtype, spec.given.seed)
    weights = dummy if files is None else checkpoint_weights(spec.config, files)
    layers = load_layers(spec, weights)
    assert isinstance(layers, Decoder)
    return layers, weights


def _combined(head: Eagle3Head, target: ModelBackend) -> Hidden:
    """Return what an EAGLE-3 head reads of the steps of a model."""
    assert isinstance(target, TorchModel | CudaGraphRunner)
    return lambda first, last: head.combined(target.aux_hidden(first, last))


def _draft_model_config(target: LoadSpec) -> ModelConfig:
    """The config of a draft model. Raises ConfigError if it does not fit the model, or has other tokens."""
    draft_model, config = target.given.draft_model, target.config
    folder = resolve_model_path(draft_model)
    found = read_folder_config(folder)
    if found.recurrent is not None:
        raise ConfigError(f"the draft model {draft_model} has recurrent states; choose one whose layers all attend")
    if found.vocab_size != config.vocab_size:
        raise ConfigError(
            f"the draft model {draft_model} has {found.vocab_size} tokens, and the model {config.vocab_size}; a draft "
            "model needs the same vocabulary"
        )
    if _vocabulary(folder) != _vocabulary(target.folder):
        raise ConfigError(
            f"the draft model {draft_model} has another tokenizer than the model; a draft model needs the same one"
        )
    if found.context_length < target.context_length:
        raise ConfigError(
            f"the draft model {draft_model} has a context of {found.context_length} tokens, below the"
            f" {target.context_length} served; set --context-length to at most that"
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
