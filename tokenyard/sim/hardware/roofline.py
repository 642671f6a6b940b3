"""Step time from a model's sizes and a device's data sheet: each part takes as long as its bytes or its operations.

Every part of a layer (attention's projections, experts, the rest) takes the time of reading its weights or of its
products, whichever is longer, smoothed where they are close (Williams et al., "Roofline", 2009). Data sheets are
promises: `Efficiency` says which share of them an engine gets, and what launches, all-reduces and the host add. Its
numbers are fitted to measured runs (`benchmarks/silicon.py --fit`); each has one meaning, so that the effect of a
choice can be followed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.base import ConfigError
from tokenyard.cost import Column, Grid, StepTable
from tokenyard.sim.hardware.devices import Device
from tokenyard.sim.hardware.model_shape import Attention, FeedForward, ModelShape, kv_share

Floats = npt.NDArray[np.float64]

MS = 1e3
SHARPNESS = 3.0
"""How sharp the corner of the roofline is."""

STATE_OPS = 4
"""Products per number of a recurrent state and token of a chunk: decay, update, read, and the chunked form's own."""

ACTIVATION_PASSES = 12
"""How often the hidden vector of a token is written or read in a layer outside the large products."""

DECODE_POINTS = tuple(range(1, 65)) + tuple(sorted({round(64 * 2 ** (i / 8)) for i in range(1, 57)}))
MIXED_POINTS = tuple(sorted({round(2 ** (i / 4)) for i in range(65)}))
ROW_POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CONTEXT_POINTS = (0, 128, 512, 2048, 8192, 32768, 131_072)
CHUNK_POINTS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PREFIX_POINTS = (0, 128, 1024, 4096, 16384, 65536, 262_144)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a model is divided: `tp` devices share each layer, `dp` such groups share the experts (DP attention)."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for a size below 1."""
        if min(self.tp, self.dp, self.ep) < 1:
            raise ConfigError("tensor, data and expert parallel sizes must be at least 1")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What an engine gets out of a device.

    memory, expert_memory, kv_memory: shares of the data sheet's bandwidth, for dense weights, experts and KV.
    compute16, compute8, compute4: shares of the data sheet's operations, by bits of the inputs.
    attention: share of the 16-bit operations that attention of chunks gets.
    layer_us: launches and small kernels of a layer, in a captured graph.
    moe_us, latent_us, state_us: what a layer with experts, latent attention or a recurrence adds to that.
    chunk_layer_us: what a layer adds in a step with chunks, which has no graph.
    reduce_us: latency of an all-reduce; its bytes take the share `link` of the data sheet's link.
    imbalance: tokens of the busiest device over the mean, with expert parallelism.
    host_ms: what the engine adds to a step: scheduling, sampling, output.
    request_ms, request_us_per_token: what it adds to a request before its first token: tokenizing, HTTP.
    """

    memory: float = 0.75
    expert_memory: float = 0.6
    kv_memory: float = 0.7
    compute16: float = 0.6
    compute8: float = 0.5
    compute4: float = 0.4
    attention: float = 0.4
    layer_us: float = 20.0
    moe_us: float = 20.0
    latent_us: float = 15.0
    state_us: float = 20.0
    chunk_layer_us: float = 20.0
    reduce_us: float = 8.0
    link: float = 0.6
    imbalance: float = 1.3
    host_ms: float = 1.0
    request_ms: float = 10.0
    request_us_per_token: float = 5.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times of one model on one kind of device, in milliseconds."""

    shape: ModelShape
    device: Device
    parallel: Parallel
    efficiency: Efficiency

    def base_ms(self, tokens: Floats, *, chunks: bool) -> Floats:
        """A step of `tokens` (float64[n]) on each group, without attention: float64[n]."""
        shape, share, tp = self.shape, self.efficiency, self.parallel.tp
        total = np.zeros(len(tokens))
        for attention, part, count in shape.layers:
            layer = self._product(
                tokens, attention.params / tp, shape.attention_bits, shape.attention_math_bits, share.memory
            )
            if part.params:
                layer = layer + self._product(
                    tokens, part.params / tp, shape.weight_bits, shape.math_bits, share.memory
                )
            if part.experts:
                layer = layer + self._experts(tokens, part)
            total += count * (layer + self._small(tokens, attention, part, chunks))
        head = shape.hidden * shape.vocab / tp
        sampled = np.ones(len(tokens)) if chunks else tokens
        total += self._product(sampled, head, 16, 16, share.memory)
        return total * MS

    def _product(self, tokens: Floats, params: float, bits: float, math_bits: int, memory: float) -> Floats:
        """Seconds to multiply `tokens` vectors with `params` weights."""
        read = params * bits / 8 / (self.device.bytes_per_s * memory)
        return _roof(np.full(len(tokens), read), 2.0 * tokens * params / self._flops(math_bits))

    def _flops(self, bits: int) -> float:
        share = {16: self.efficiency.compute16, 8: self.efficiency.compute8, 4: self.efficiency.compute4}
        have = min(width for width in self.device.flops if width >= bits)
        return self.device.flops[have] * share[have]

    def _experts(self, tokens: Floats, part: FeedForward) -> Floats:
        """Seconds of the experts: those that any token chose are read once, by all groups together."""
        groups, share = self.parallel.dp, self.efficiency
        devices, together = self.parallel.tp * groups, tokens * groups
        uneven = share.imbalance if self.parallel.ep > 1 else 1.0
        # More tokens on the busiest device touch more of its experts, but never more than it has.
        used = part.experts * -np.expm1(uneven * together * np.log1p(-part.top_k / (part.experts + 1e-9)))
        read = used * part.expert_params * self.shape.expert_bits / 8 / devices / self.device.bytes_per_s
        work = 2.0 * together * part.top_k * part.expert_params / devices / self._flops(self.shape.expert_math_bits)
        return _roof(read / share.expert_memory, work * uneven)

    def _small(self, tokens: Floats, attention: Attention, part: FeedForward, chunks: bool) -> Floats:
        """Seconds of launches, activations and all-reduces of a layer."""
        share, device, tp = self.efficiency, self.device, self.parallel.tp
        fixed_us = share.layer_us + (share.chunk_layer_us if chunks else 0.0) + (share.moe_us if part.experts else 0.0)
        fixed_us += {"latent": share.latent_us, "state": share.state_us}.get(attention.kind, 0.0)
        row = self.shape.hidden * 2.0
        seconds = fixed_us / 1e6 + tokens * (ACTIVATION_PASSES * row / device.bytes_per_s)
        if tp > 1:
            sent = 2.0 * (tp - 1) / tp * row / (device.link_bytes_per_s * share.link)
            seconds = seconds + 2.0 * (share.reduce_us * np.log2(tp) / 3.0 / 1e6 + tokens * sent)
        if (groups := self.parallel.dp) > 1 and part.experts:
            # A token goes to no group twice, nor to its own.
            sent = min(part.top_k, groups - 1) * row / (device.link_bytes_per_s * share.link)
            seconds = seconds + 2.0 * (share.reduce_us * np.log2(groups) / 3.0 / 1e6 + tokens * sent)
        return seconds

    def rows_ms(self, rows: Floats, context: Floats) -> Floats:
        """Attention of `rows` decoding rows with a mean context, element by element."""
        shape, share, tp = self.shape, self.efficiency, self.parallel.tp
        total = np.zeros(np.broadcast(rows, context).shape)
        for attention, _, count in shape.layers:
            if attention.kind == "state":
                moved = rows * 2.0 * attention.state_values * 4.0 / min(tp, attention.heads)
                total = total + count * moved / (self.device.bytes_per_s * share.kv_memory)
                continue
            read = np.minimum(context, attention.window) if attention.window else context
            bytes_read = rows * read * attention.kv_values * shape.kv_bits / 8 / kv_share(attention, tp)
            heads = max(attention.heads / tp, 1.0)
            work = 2.0 * rows * read * heads * (attention.qk_dim + attention.v_dim)
            memory_s = bytes_read / (self.device.bytes_per_s * share.kv_memory)
            total = total + count * _roof(memory_s, work / (self.device.flops_at(16) * share.attention))
        return total * MS

    def chunk_ms(self, tokens: Floats, prefix: Floats) -> Floats:
        """Attention of a chunk of `tokens` after `prefix`, element by element."""
        share, tp = self.efficiency, self.parallel.tp
        total = np.zeros(np.broadcast(tokens, prefix).shape)
        for attention, _, count in self.shape.layers:
            heads = max(attention.heads / tp, 1.0)
            if attention.kind == "state":
                work = STATE_OPS * 2.0 * tokens * heads * attention.qk_dim * attention.v_dim
            else:
                mean = prefix + tokens / 2.0
                seen = np.minimum(mean, attention.window) if attention.window else mean
                work = 2.0 * tokens * seen * heads * attention.prefill_dim
            total = total + count * work / (self.device.flops_at(16) * share.attention)
        return total * MS

    def table(self, origin: str) -> StepTable:
        """The step times as tables."""

        def column(points: tuple[int, ...], *, chunks: bool) -> Column:
            return Column(points, _numbers(self.base_ms(np.array(points, np.float64), chunks=chunks)))

        def grid(first: tuple[int, ...], second: tuple[int, ...], times: Any) -> Grid:
            across = np.array(second, np.float64)
            return Grid(first, second, tuple(_numbers(times(np.float64(one), across)) for one in first))

        return StepTable(
            decode=column(DECODE_POINTS, chunks=False),
            mixed=column(MIXED_POINTS, chunks=True),
            rows=grid(ROW_POINTS, CONTEXT_POINTS, self.rows_ms),
            chunk=grid(CHUNK_POINTS, PREFIX_POINTS, self.chunk_ms),
            host_ms=self.efficiency.host_ms,
            origin=origin,
        )

    def kv_pool_tokens(self, mem_fraction: float, max_rows: int, batch_tokens: int) -> int:
        """Tokens of KV that fit on the devices next to weights, activations, windows and states of `max_rows` requests.

        Raises ConfigError if the weights do not fit.
        """
        shape, tp, dp = self.shape, self.parallel.tp, self.parallel.dp
        experts = sum(c * part.experts * part.expert_params for _, part, c in shape.layers) * shape.expert_bits / 8
        weights = (shape.weight_bytes - experts) / tp + experts / (tp * dp)
        activations = RUNTIME_BYTES + batch_tokens * shape.hidden * 2.0 * ACTIVATION_PASSES
        left = self.device.memory_bytes * mem_fraction - weights - activations - shape.fixed_kv_bytes(max_rows, tp)
        tokens = int(left / shape.kv_bytes_per_token(tp))
        if tokens < MIN_POOL_TOKENS:
            needed = (weights + activations) / 1e9
            raise ConfigError(
                f"{shape.name} needs {needed:.0f} GB on each of {tp * dp} x {self.device.name} and leaves no room for "
                f"KV in {self.device.memory_bytes * mem_fraction / 1e9:.0f} GB; raise --tp-size, or take a checkpoint "
                "with smaller weights (such as the name with -FP8)"
            )
        return tokens


RUNTIME_BYTES = 3e9
"""Device memory of the runtime, captured graphs and communication buffers."""

MIN_POOL_TOKENS = 1024


def _roof(memory: Floats, compute: Floats) -> Floats:
    """The larger of two times, smoothed where they are close."""
    longer = np.maximum(memory, compute)
    shorter = np.minimum(memory, compute)
    found: Floats = longer * (1.0 + (shorter / np.maximum(longer, 1e-30)) ** SHARPNESS) ** (1.0 / SHARPNESS)
    return found


def _numbers(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)
