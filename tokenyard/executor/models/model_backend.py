"""The interface of a whole step: from a batch of tokens to logits."""

from typing import Protocol

import torch

from tokenyard.base import TokenyardError
from tokenyard.executor.attention.backend import AttentionBackend
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.models.decoder import Decoder


class ModelBackend(Protocol):
    """Computes steps. Keys and values of the batch's tokens are in the pool afterwards."""

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; returns float32[len(batch.logit_tokens), vocabulary], which the caller may change.

        The tensor is valid until the next step.
        """

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Return float32[last - first, vocabulary] of tokens first .. last - 1 of the step computed last."""

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return float32[last - first, hidden] of the same tokens: the input of the head."""


class ReleasedModel:
    """The place of a model whose weights were released. Each method raises TokenyardError."""

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """There is nothing to compute with."""
        raise TokenyardError("the weights are released; call /resume_memory_occupation")

    def logits(self, first: int, last: int) -> torch.Tensor:
        """See `step`."""
        raise TokenyardError("the weights are released")

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """See `step`."""
        raise TokenyardError("the weights are released")


class TorchModel:
    """A decoder of torch layers, which call an attention backend: any device, any dtype.

    states: [T, hidden] of the step computed last, before the last norm.
    aux_hidden_states: of the same step; see ForwardBatch.
    """

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self.attention_spec = decoder.attention_spec
        self.attention = attention
        self.decoder = decoder
        self.states = torch.empty(0)
        self.aux_hidden_states: torch.Tensor | None = None

    def hidden_like(self, batch: ForwardBatch) -> torch.Tensor:
        """Return memory for the hidden states of a batch, [tokens, hidden], as the layers compute them."""
        return self.decoder.hidden_states(len(batch.token_ids))

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; see ModelBackend."""
        self.layers(batch)
        return self.decoder.logits(self.states[batch.logit_tokens])

    def layers(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch without its logits, as a rank of several that does not sample: [tokens, hidden]."""
        self.attention.prepare(batch)
        self.states = self.decoder.forward(batch, self.attention)
        self.aux_hidden_states = batch.aux_hidden_states
        return self.states

    def idle(self) -> None:
        """Compute an idle batch in a step of other ranks."""
        self.decoder.idle()

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Return logits of tokens of the last step; see ModelBackend."""
        return self.decoder.logits(self.states[first:last])

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return hidden states of tokens of the last step; see ModelBackend."""
        return self.decoder.normed(self.states[first:last]).float()

    def aux_hidden(self, first: int, last: int) -> torch.Tensor:
        """Return what an EAGLE-3 head reads of tokens of the last step, [last - first, layers * hidden]."""
        assert self.aux_hidden_states is not None
        return self.aux_hidden_states[first:last]
