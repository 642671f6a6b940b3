"""Draft heads that were trained for a model: EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tokenyard.base import ConfigError
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.config import EagleConfig, ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.models.parts import fused, read_norm
from tokenyard.executor.weights import Weights

EAGLE_LAYERS = ("midlayer.", "layers.0.")
"""The beginning of the names of the head's layer in checkpoints."""


def eagle_head_config(raw: Mapping[str, Any], algorithm: str, target: ModelConfig, name: str) -> ModelConfig:
    """Return the head of a config.json as a decoder of one layer. algorithm: EAGLE or EAGLE3; name: of the head.

    Reads the files of the EAGLE repository, SGLang (SpecForge) and vLLM (speculators). Raises ConfigError for a head
    that does not fit the target or is not supported.
    """
    try:
        return _head_config(raw, algorithm, target, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"config.json of the head {name} has a field of the wrong type: {error}") from error


def _head_config(raw: Mapping[str, Any], algorithm: str, target: ModelConfig, name: str) -> ModelConfig:
    """See `eagle_head_config`; raises whatever a field of the wrong type leads to."""
    third = "draft_vocab_size" in raw or any("Eagle3" in str(one) for one in raw.get("architectures") or ())
    if third != (algorithm == "EAGLE3"):
        right = "EAGLE3" if third else "EAGLE"
        raise ConfigError(f"the head {name} is for --speculative-algorithm {right}, not {algorithm}")
    try:
        inner = raw.get("transformer_layer_config") or {}
        config = read_model_config({**raw, **inner, "architectures": ["LlamaForCausalLM"]})
    except ConfigError as error:
        raise ConfigError(f"the head {name}: {error.message}") from error
    for what, own, wanted in (
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("a hidden size of", config.hidden_size, target.hidden_size),
        ("a target hidden size of", raw.get("target_hidden_size") or target.hidden_size, target.hidden_size),
    ):
        if own != wanted:
            raise ConfigError(f"the head {name} has {what} {own}, and the model {wanted}; it was trained for another")
    if config.num_layers != 1:
        raise ConfigError(f"the head {name} has {config.num_layers} layers; only heads of one layer are supported")
    if not (raw.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ConfigError(f"the head {name} reads no auxiliary hidden states (eagle_config), which is not supported")
    eagle = EagleConfig(
        _aux_layers(raw, target.num_layers, name) if third else (),
        int(raw.get("draft_vocab_size") or config.vocab_size),
        bool(raw.get("norm_before_residual", False)),
    )
    return replace(config, eagle=eagle, has_embedding=False, has_lm_head=False)


def _aux_layers(raw: Mapping[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """See Decoder.aux_layers. In `eagle_config` SGLang counts layers whose output is read, and vLLM, at the top, those
    whose input is; without either the layers are those that both take.
    """
    outputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    inputs = [int(one) + 1 for one in outputs] if outputs else raw.get("eagle_aux_hidden_state_layer_ids")
    found = sorted({int(one) for one in inputs or (2, layers // 2, layers - 3)})
    if found[0] < 0 or found[-1] > layers:
        raise ConfigError(
            f"the head {name} reads layers {found} of the model (eagle_aux_hidden_state_layer_ids), which"
            f" has {layers}; it was trained for another"
        )
    return tuple(found)


def draft_token_ids(d2t: torch.Tensor | None, tokens: int, draft_tokens: int, name: str) -> torch.Tensor | None:
    """Return int64[draft_tokens], which of a model's `tokens` those of a head's own vocabulary are; None for the same.

    d2t: how much larger each one's id is in the model; None where the checkpoint of the head `name` does not say it.
    Raises ConfigError for a checkpoint that means something else.
    """
    if d2t is None:
        if draft_tokens != tokens:
            raise ConfigError(f"the head {name} drafts {draft_tokens} of {tokens} tokens, and has no d2t to say which")
        return None
    ids = d2t.long() + torch.arange(len(d2t))
    if len(ids) != draft_tokens or int(ids.min()) < 0 or int(ids.max()) >= tokens:
        raise ConfigError(
            f"the head {name} has a tensor d2t that does not map {draft_tokens} tokens to the model's {tokens}"
        )
    return ids


class EagleHead:
    """Predicts the target's next hidden state behind the last norm, from the last one and the token after it.

    Embedding and output head are the target's. bias: whether the product of both has one.
    """

    def __init__(self, target: Decoder, layers: Decoder, weights: Weights, *, bias: bool) -> None:
        size = layers.config.hidden_size
        self.target, self.layers = target, layers
        self._product = fused(weights, {"fc": size}, 2 * size, bias)

    def step(self, model: TorchModel, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftHead."""
        embedded = self.target.table_rows(batch.token_ids)
        batch.hidden = self._product(torch.cat((embedded, hidden.to(embedded.dtype)), dim=-1))
        found = model.layers(batch)[batch.logit_tokens]
        return found, self.target.logits_of_normed(found)


class Eagle3Head:
    """Predicts the next token from the token after each position and what the target found there in some of its layers,
    or the head itself at tokens that it drafted. The embedding is the target's.

    has_head: whether the checkpoint has an output head; if not, the target's serves.
    token_ids: int64[draft vocabulary], the target's ids of its tokens; None where they are the same.
    """

    def __init__(
        self,
        target: Decoder,
        layers: Decoder,
        weights: Weights,
        *,
        bias: bool,
        has_head: bool,
        token_ids: torch.Tensor | None,
    ) -> None:
        config = layers.config
        assert config.eagle is not None
        size = config.hidden_size
        self.target, self.layers = target, layers
        self._token_ids = None if token_ids is None else token_ids.to(layers.hidden_states(0).device)
        self._product = fused(weights, {"fc": size}, len(config.eagle.aux_layers) * size, bias)
        self._norm = read_norm(config, weights, "norm")
        self._head = fused(weights, {"lm_head": config.eagle.draft_vocab_size}, size, False) if has_head else None
        target.aux_layers = config.eagle.aux_layers

    def combined(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] of what the target left, [T, layers * hidden]."""
        return self._product(aux_hidden_states)

    def step(self, model: TorchModel, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftHead."""
        embedded = self.target.table_rows(batch.token_ids)
        batch.hidden = torch.cat((embedded, hidden.to(embedded.dtype)), dim=-1)
        found = model.layers(batch)[batch.logit_tokens]
        return found, self._logits(self._norm(found))

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            return self.target.logits_of_normed(normed)
        logits = self._head(normed).float()
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.target.config.vocab_size), float("-inf"))
        whole[:, self._token_ids] = logits
        return whole
