"""The draft head that a checkpoint brings: multi-token prediction (DeepSeek V3, arXiv 2412.19437, section 2.2)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.models.parts import fused, read_norm
from tokenyard.executor.weights import SafetensorsWeights, Weights

FIRST_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class DraftHeadNames:
    """Where a checkpoint has its first draft head; others are not read.

    layer: the beginning of the names of its layer. embedding_norm, hidden_norm: norms of its two inputs. product: from
    both to the layer. norm: the one after the layer.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    product: str
    norm: str


def draft_head_names(config: ModelConfig) -> DraftHeadNames | None:
    """Return the names for a family that may have a draft head, None for others."""
    if config.architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"):
        return DraftHeadNames(
            "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
        )
    if config.architecture == "DeepseekV3ForCausalLM":
        layer = f"model.layers.{config.num_layers}."
        return DraftHeadNames(layer, *(layer + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))
    return None


def draft_head_config(config: ModelConfig) -> ModelConfig:
    """The head of a model as a decoder: one layer that attends, with experts where the model has some."""
    experts = None if config.experts is None else replace(config.experts, layers=frozenset({0}))
    return replace(
        config,
        num_layers=1,
        windows=(0,),
        recurrent=None,
        experts=experts,
        has_embedding=False,
        has_lm_head=False,
    )


class DraftHeadWeights(SafetensorsWeights):
    """The tensors of a checkpoint; the first layer is that of the draft head, whose names begin with `layer`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, layer: str) -> None:
        super().__init__(folder, device, dtype)
        self._layer = layer

    def get(self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None) -> torch.Tensor:
        """See SafetensorsWeights."""
        return super().get(self._moved(name), shape, cut)

    def __contains__(self, name: str) -> bool:
        """See SafetensorsWeights."""
        return super().__contains__(self._moved(name))

    def parts(self, prefix: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """See SafetensorsWeights."""
        return super().parts(self._moved(prefix), names)

    def stored_kind(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See SafetensorsWeights."""
        return super().stored_kind(self._moved(name))

    def _moved(self, name: str) -> str:
        return self._layer + name.removeprefix(FIRST_LAYER) if name.startswith(FIRST_LAYER) else name


class DraftHead(Protocol):
    """A head that drafts from what the target has found.

    layers: of the head, which have their own KV pool.
    """

    layers: Decoder

    def step(self, model: TorchModel, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a batch whose tokens are each the one *after* its position.

        model: runs `layers` over the head's KV pool. hidden: [T, hidden], what the target found, or the head at tokens
        that it drafted itself. Returns the head's [m, hidden] of `batch.logit_tokens` and their logits,
        float32[m, vocabulary].
        """


class MtpHead:
    """Predicts the token after the next one, from the next one and what the target model has found so far.

    Embedding and output head are the target's.
    """

    def __init__(self, target: Decoder, layers: Decoder, weights: Weights, names: DraftHeadNames) -> None:
        config = layers.config
        self.target, self.layers = target, layers
        self._embedding_norm = read_norm(config, weights, names.embedding_norm)
        self._hidden_norm = read_norm(config, weights, names.hidden_norm)
        self._product = fused(weights, {names.product: config.hidden_size}, 2 * config.hidden_size, False)
        self._norm = read_norm(config, weights, names.norm)

    def step(self, model: TorchModel, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftHead. hidden: after the last norm of the target, or of the head."""
        embedded = self._embedding_norm(self.target.embedded(batch.token_ids))
        both = torch.cat((embedded, self._hidden_norm(hidden.to(embedded.dtype))), dim=-1)
        batch.hidden = self._product(both)
        found = self._norm(model.layers(batch)[batch.logit_tokens])
        return found, self.target.logits_of_normed(found)
