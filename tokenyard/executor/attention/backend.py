"""The interface of attention: how a layer calls the backend that attends over the paged KV pool."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from tokenyard.executor.forward_batch import Bucket, ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How a model's layers attend.

    windows: for each layer, how many tokens back (its own included) a token sees, 0 for all.
    scale: the factor on scores.
    softcap: scores are capped by `softcap * tanh(score / softcap)`, 0 for none (Gemma 2).
    sinks: float32[heads] for each layer, a score that joins a head's softmax and has no value (gpt-oss; Xiao et al.
    2023, arXiv 2309.17453); () for none.
    """

    windows: tuple[int, ...]
    scale: float
    softcap: float = 0.0
    sinks: tuple[torch.Tensor, ...] = ()


class AttentionBackend(Protocol):
    """Causal attention of a batch's tokens over their rows' slots, with an optional window per layer.

    The order of calls is: `prepare` once for a step, then `forward` once for each layer, in order.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute, once for all layers, what the step needs. The page table already holds the step's page writes."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store k and v ([T, kv heads, head_dim]) and attend with q ([T, heads, head_dim]): [T, heads * head_dim].

        A row of the batch has `counts` queries at consecutive positions, each of which sees the row's keys up to its
        own position: one for a decode, several for a chunk or for drafts to verify.
        """


@runtime_checkable
class PlansCapturedSteps(Protocol):
    """An AttentionBackend that works on the host for decodes, and so before each replay of a captured step."""

    def plan_captured(self, batch: ForwardBatch, size: int) -> None:
        """Prepare a batch of decodes that is padded to `size` rows; `prepare` is captured for `batch.captured`.

        Rows beyond those of the batch read one token of page 0. SGLang's init_forward_metadata_replay_cuda_graph.
        """


@runtime_checkable
class PlansTokenBuckets(Protocol):
    """An AttentionBackend whose steps with rows of all kinds can be captured, padded to a number of tokens."""

    def plan_bucket(self, batch: ForwardBatch, bucket: Bucket) -> None:
        """Prepare a batch that is padded to a bucket; `prepare` is captured for `batch.bucket`.

        Tokens beyond those of the batch attend to nothing, and what they find is not defined. The largest step is
        planned first.
        """


class KvSlots(NamedTuple):
    """Where a layer's keys and values of a batch's tokens go: slots int64[T] of keys and values [slot, kv heads,
    head_dim]. kind: of a pool of bytes, see KvPool.
    """

    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kind: torch.dtype | None = None


class FusedKvWriteAttention(AttentionBackend, Protocol):
    """An AttentionBackend that can also attend after kernels that write keys and values themselves."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store keys and values and attend; see AttentionBackend."""
        set_kv_buffer(self.place(layer, batch), k, v)
        return self.attend(layer, q, batch)

    def place(self, layer: int, batch: ForwardBatch) -> KvSlots:
        """Return where a layer's keys and values of a prepared batch go."""

    def attend(self, layer: int, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend with keys and values that are in the pool: as `forward` after its writes."""


def set_kv_buffer(place: KvSlots, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values ([T, kv heads, head_dim]) to their slots. SGLang's method of this name."""
    place.keys.index_copy_(0, place.slots, k)
    place.values.index_copy_(0, place.slots, v)
