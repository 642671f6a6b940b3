"""LoRA adapters of the rows of a step: slots on the device, and their part in each product of torch's layers.

Native steps have their own slots (`native/lora.py`). Between torch's layers, a step with rows of several adapters
computes `x @ A^T` for all slots up to the last one in use as one product, sets what belongs to other rows' adapters to
zero, and multiplies by all B as one product. On a CPU that is faster than a loop over adapters or a gather of matrices
by row, unless the adapters have many tokens in the step: then each adapter is a separate product. It is
exact: a row's zeros add nothing. On a CUDA device, steps of few tokens take Triton's kernels instead
(`attention/triton/lora_kernels.py`), which read the slot of each token on the device and can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tokenyard.base import ConfigError, RowStart, StepPlan, TokenyardError
from tokenyard.executor.cuda_streams import copied, to_device
from tokenyard.executor.layers.linear import Product
from tokenyard.executor.lora_weights import LoraWeights, projection_shapes, read_adapter
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder

FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj", "q_gate"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "mixer_in": ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "mixer_out": ("out_proj",),
}
"""The fused products of a layer, each over one input, and the projections that each consists of where the layer has
them, in this order.
"""

SPLIT_MIN_TOKENS = 64
"""From this many tokens per adapter on average, a product for each adapter is faster than one for all."""


MIN_KERNEL_TOKENS = 256
"""Steps of so many tokens are for the kernels at least, where there are some; a prompt of more is for torch."""


@dataclass(slots=True)
class _Run:
    """Tokens that get the change of slots `first .. last - 1` in one product.

    tokens: int64[m], None for all of the step.
    others: bool[m, slots, 1, 1], True where a token is not of that slot; None where all tokens are of the one slot.
    """

    first: int
    last: int
    tokens: torch.Tensor | None
    others: torch.Tensor | None


class LoraBatchInfo:
    """Which tokens of the step have which adapter. All adapted products of a model share it. SGLang's LoRABatchInfo.

    slots: int64[T], the slot of each token, where Triton's kernels compute the step; None where `runs` do.
    """

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.slots: torch.Tensor | None = None

    def clear(self) -> None:
        """No token of the next step has an adapter."""
        self.runs, self.slots = [], None

    def set(self, slots: npt.NDArray[np.int64], device: torch.device) -> None:
        """Set the slot of each token (int64[T], 0 for none) for the next step."""
        used = np.unique(slots[slots > 0])
        count = int(np.count_nonzero(slots))
        if not len(used):
            self.runs = []
        elif len(used) == 1 or count >= SPLIT_MIN_TOKENS * len(used):
            self.runs = [self._one(slots, int(slot), device) for slot in used]
        else:
            places = np.flatnonzero(slots)
            last = int(used[-1])
            others = slots[places, None] != np.arange(1, last + 1)
            tokens = None if count == len(slots) else to_device(places, device)
            self.runs = [_Run(0, last, tokens, to_device(others[:, :, None, None], device))]

    def _one(self, slots: npt.NDArray[np.int64], slot: int, device: torch.device) -> _Run:
        places = np.flatnonzero(slots == slot)
        tokens = None if len(places) == len(slots) else to_device(places, device)
        return _Run(slot - 1, slot, tokens, None)


class LoraLinear:
    """A product of the layers with the changes of the adapters in each slot.

    a: [slots, projections, rank, inputs]; b: one [slots, rank, outputs] for each projection, scaled. Rows of a smaller
    rank are zero.
    """

    def __init__(
        self, base: Product, batch: LoraBatchInfo, a: torch.Tensor, b: Sequence[torch.Tensor], together: torch.Tensor
    ) -> None:
        """together: [slots, rank, all outputs], of which `b` are parts, where the kernels may compute; else empty."""
        self._base, self._batch = base, batch
        self.a, self.b, self._together = a, list(b), together
        if together.numel():
            # Imported here because the package triton is optional and slow to import.
            from tokenyard.executor.attention.triton.lora_kernels import add_lora, output_tiles

            self._add_lora = add_lora
            self._tiles = output_tiles([part.shape[2] for part in b], a.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [rows, inputs] -> [rows, outputs], in the dtype of `x`."""
        found = self._base(x)
        if self._batch.slots is not None:
            self._add_lora(found, x, self.a, self._together, self._batch.slots, self._tiles)
        for run in self._batch.runs:
            if run.tokens is None:
                self._add(x, run, found)
            else:
                part = found[run.tokens]
                self._add(x[run.tokens], run, part)
                found[run.tokens] = part
        return found

    def _add(self, x: torch.Tensor, run: _Run, found: torch.Tensor) -> None:
        """Add to `found` [m, outputs] the change of `x` [m, inputs]."""
        a = self.a[run.first : run.last]
        slots, parts, rank, inputs = a.shape
        inner = F.linear(x, a.reshape(-1, inputs)).view(len(x), slots, parts, rank)
        if run.others is not None:
            # Not a product with zeros, which an overflow in another row's adapter would survive as NaN.
            inner.masked_fill_(run.others, 0.0)
        begin = 0
        for part, b in enumerate(self.b):
            outputs = b.shape[-1]
            mine = inner[:, :, part].reshape(len(x), slots * rank)
            found[:, begin : begin + outputs].addmm_(mine, b[run.first : run.last].reshape(slots * rank, outputs))
            begin += outputs

    def compile(self) -> None:
        """Compile the kernels, by a product of a token without an adapter."""
        x = self.a.new_zeros(1, self.a.shape[3])
        out, slots = x.new_zeros(1, self._together.shape[2]), torch.zeros(1, dtype=torch.int64, device=x.device)
        self._add_lora(out, x, self.a, self._together, slots, self._tiles)

    def put(self, slot: int, names: Sequence[str], layer: int, weights: LoraWeights) -> None:
        """Copy one adapter's matrices into a slot (from 0 on) in place of what was there."""
        self.a[slot].zero_()
        for part, name in enumerate(names):
            b = self.b[part][slot]
            b.zero_()
            pair = weights.pairs.get((layer, name))
            if pair is not None:
                rank = len(pair.a)
                self.a[slot, part, :rank].copy_(copied(pair.a, b.device))
                b[:rank].copy_(copied(pair.b, b.device).T)
                b[:rank].mul_(pair.scale)


class LoraMemoryPool(Protocol):
    """The slots of adapters that steps use, counted from 0. slot_bytes: bytes of one slot. SGLang's LoRAMemoryPool."""

    slot_bytes: int

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Copy an adapter into a slot in place of what was there."""

    def begin(self, slot_of_token: npt.NDArray[np.int64] | None) -> None:
        """Set the slot of each token (from 1, or 0 for none) for the next step; None if no token has an adapter."""


class TorchLoraPool:
    """LoraMemoryPool between the products of torch's layers.

    slots_of_tokens: int64[kernel_tokens] at a fixed address, the slot of each token of a step that the kernels compute,
    0 behind them; None without kernels.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        slots: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        kernel_tokens: int = 0,
    ) -> None:
        """Change the decoder's products. kernel_tokens: steps of at most so many tokens are for Triton's kernels.

        Raises ConfigError without memory.
        """
        self.slots_of_tokens = None
        if kernel_tokens:
            self.slots_of_tokens = torch.zeros(kernel_tokens, dtype=torch.int64, device=device)
        self._batch = LoraBatchInfo()
        self._config, self._slots, self._rank = config, slots, rank
        self._device, self._dtype = device, dtype
        self._linears: list[tuple[int, tuple[str, ...], LoraLinear]] = []
        decoder.adapt(self._adapt)
        self.slot_bytes = sum(
            matrix[0].numel() * matrix.itemsize for _, _, linear in self._linears for matrix in (linear.a, *linear.b)
        )

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Copy an adapter into a slot; see LoraMemoryPool."""
        for layer, names, linear in self._linears:
            linear.put(slot, names, layer, weights)

    def begin(self, slot_of_token: npt.NDArray[np.int64] | None) -> None:
        """Set the slots of a step's tokens; see LoraMemoryPool."""
        self._batch.clear()
        if slot_of_token is None:
            return
        fixed = self.slots_of_tokens
        if fixed is None or len(slot_of_token) > len(fixed):
            self._batch.set(slot_of_token, self._device)
            return
        # All of it, as a captured step reads zeros behind the rows of the batch.
        padded = np.zeros(len(fixed), np.int64)
        padded[: len(slot_of_token)] = slot_of_token
        fixed.copy_(to_device(padded, self._device))
        self._batch.slots = fixed

    @property
    def active(self) -> bool:
        """Whether a token of the step has an adapter."""
        return bool(self._batch.runs) or self._batch.slots is not None

    def capture(self, *, adapted: bool) -> None:
        """Have the next steps read the slots of their tokens, or no adapters, whatever `begin` was told."""
        self._batch.clear()
        self._batch.slots = self.slots_of_tokens if adapted else None

    def _adapt(self, layer: int, name: str, product: Product) -> Product:
        """A product of a layer (a name in FUSED) with slots for adapters. Raises ConfigError without memory."""
        shapes = projection_shapes(self._config, layer)
        names = tuple(each for each in FUSED[name] if each in shapes)
        try:
            options = {"device": self._device, "dtype": self._dtype}
            a = torch.zeros(self._slots, len(names), self._rank, shapes[names[0]][0], **options)  # type: ignore[call-overload]
            sizes = [shapes[each][1] for each in names]
            if self.slots_of_tokens is None:
                b = [torch.zeros(self._slots, self._rank, size, **options) for size in sizes]  # type: ignore[call-overload]
                together = torch.empty(0)
            else:
                together = torch.zeros(self._slots, self._rank, sum(sizes), **options)  # type: ignore[call-overload]
                b = list(together.split(sizes, dim=2))
        except RuntimeError as error:
            raise no_memory(self._slots, self._rank) from error
        adapted = LoraLinear(product, self._batch, a, b, together)
        if together.numel():
            adapted.compile()
        self._linears.append((layer, names, adapted))
        return adapted


def no_memory(slots: int, rank: int) -> ConfigError:
    """The error of a device without room for the slots."""
    return ConfigError(
        f"there is no memory for {slots} adapters of rank {rank}; lower --max-loras-per-batch or --max-lora-rank"
    )


class LoraManager:
    """The adapters of one model, in host memory and in slots. SGLang's LoRAManager.

    `load` and `drop` may be called from other threads than steps are.
    """

    def __init__(self, config: ModelConfig, slots: LoraMemoryPool, count: int, rank: int, max_pool_rows: int) -> None:
        """count: how many slots there are; rank: the largest of an adapter."""
        self.slots = slots
        self._config, self._rank = config, rank
        self._host: dict[str, LoraWeights] = {}
        self._holders = [""] * count
        self._slot_of_row = np.zeros(max_pool_rows, dtype=np.int64)

    def take_over(self, other: "LoraManager") -> None:
        """Serve the adapters and rows of `other`, whose model this one's replaces."""
        self._host, self._slot_of_row = other._host, other._slot_of_row
        for slot, adapter in enumerate(other._holders):
            if adapter in self._host:
                self._fill(slot, adapter)

    def load(self, adapter: str, folder: Path) -> None:
        """Read an adapter into memory. Raises ConfigError for one that cannot be served."""
        self._host[adapter] = read_adapter(folder, self._config, self._rank)

    def drop(self, adapter: str) -> None:
        """Free the memory of an adapter that no row has any more; unknown ones are ignored."""
        self._host.pop(adapter, None)

    def take(self, starts: Sequence[RowStart]) -> None:
        """Register the rows that start, and copy their adapters to the slots of the plan."""
        for start in starts:
            self._slot_of_row[start.pool_row] = start.slot
            if start.slot and self._holders[start.slot - 1] != start.lora:
                self._fill(start.slot - 1, start.lora)

    def begin(self, plan: StepPlan) -> None:
        """Prepare the slots for the rows of a step."""
        slots = self._slot_of_row[plan.pool_rows]
        self.slots.begin(np.repeat(slots, plan.counts) if slots.any() else None)

    def _fill(self, slot: int, adapter: str) -> None:
        weights = self._host.get(adapter)
        if weights is None:
            raise TokenyardError(f"a plan has rows of the adapter {adapter!r}, which was not loaded")
        # Until the copy is complete, the slot holds no adapter.
        self._holders[slot] = ""
        self.slots.put(slot, weights)
        self._holders[slot] = adapter
