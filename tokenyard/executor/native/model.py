"""A model whose steps the native library runs, each in one call."""

import ctypes
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.formats.converted import WeightsMemory
from tokenyard.executor.formats.packed import LinearPart, PackedBytes, PackedRows, PackedSource, divide, unpacked
from tokenyard.executor.formats.weight_format import INT8, STORED, WeightFormat
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.rotary import rotary_table
from tokenyard.executor.models.config import ACTIVATIONS, ModelConfig
from tokenyard.executor.models.decoder import norm_names
from tokenyard.executor.models.parts import fused_parts
from tokenyard.executor.models.stacked_params import QUERY_GATE, QueriesAndGates
from tokenyard.executor.native.library import DOWN, GATE_UP, HEAD, OUTPUT, QKV, ROUTER, NativeConfig, NativeStep
from tokenyard.executor.native.moe import NO_MEMORY, describe_moe, expert_products, with_addresses
from tokenyard.executor.native.recurrent import (
    NativeStateRows,
    describe_recurrent,
    product_size,
    recurrent_products,
    recurrent_vectors,
    rows_of,
)
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, check, describe_step, int32s
from tokenyard.executor.state_pool import StateBatch
from tokenyard.executor.weights import Weights

logger = logging.getLogger(__name__)

KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""The library's numbers of pools of bytes."""
EMBEDDING = "model.embed_tokens"
ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, AFTER_ATTENTION, AFTER_MLP, SINKS, SHARED_GATE = range(8)
LAST_NORM = 14


class _Linear(NamedTuple):
    """A product of the model, which may be several matrices over the same input.

    layer, which, expert: as the library counts; expert is -1 for a product that is not of one.
    outputs: the matrices' names, without `.weight`, and rows.
    """

    layer: int
    which: int
    expert: int
    outputs: dict[str, int]
    inputs: int
    bias: bool


class NativeDecoder:
    """The weights of a model, laid out once for the library's products.

    Weights are taken by their Hugging Face names, one after another, so that a second copy of the model never lies in
    memory. Matrices in one of the library's formats stay packed (see `formats`). An embedding that is the head too is
    looked up in the head's panels; another one that is packed stays in its file, which is mapped.

    int8: other matrices of products are rounded to bytes, with a scale for each output; embeddings stay.
    kv_dtype: of the pool, see KvPool; None for `dtype`.
    memory: where weights of products and a packed embedding lie; None for the library's memory. Files that do not fit
    raise UnusableFileError before anything is read.

    `adapters` is set before a step: the slot of each token's adapter (see NativeLoraPool), None where no token has one.
    `weight_bytes` is the size of the weights of products.

    Raises ConfigError if a weight is missing or misshapen or memory runs out.
    """

    def __init__(
        self,
        engine: NativeRuntime,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        context_length: int,
        *,
        int8: bool = False,
        kv_dtype: torch.dtype | None = None,
        memory: WeightsMemory | None = None,
    ) -> None:
        self.engine, self.config, self.dtype = engine, config, dtype
        self._unpacked = INT8 if int8 else STORED
        self.adapters: npt.NDArray[np.int32] | None = None
        weights = QueriesAndGates(weights, config) if config.output_gate else weights
        self._memory = memory
        self._kv_format = KV_FORMATS.get(kv_dtype, 0) if kv_dtype is not None else 0
        self._embedding_rows = self._packed_embedding(weights)
        self._cos_sin = {
            rope: rotary_table(rope, config.head_dim, context_length) for rope in dict.fromkeys(config.ropes)
        }
        self.model = self._make(dtype, int8)
        begin_s = time.perf_counter()
        self.weight_bytes = self._load_linears(weights)
        for layer in range(config.num_layers):
            self._take_vectors(weights, layer)
        last_norm = weights.get("model.norm.weight", (config.hidden_size,))
        self._norm(0, LAST_NORM, last_norm)
        self.last_norm = RMSNorm(last_norm.float(), config.norm_eps, config.norm_offset)
        logger.info(
            "loaded and packed %d layers, %.2f GB, in %.1f s",
            *(config.num_layers, self.weight_bytes / 1e9, time.perf_counter() - begin_s),
        )

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.engine.functions.ty_model_free(self.model)

    def _packed_embedding(self, weights: Weights) -> PackedRows | None:
        """The embedding as it is stored; None where it is numbers."""
        shape = self.config.vocab_size, self.config.hidden_size
        return weights.packed(f"{EMBEDDING}.weight", shape) if isinstance(weights, PackedSource) else None

    def _load_embedding(self, weights: Weights, place: PackedBytes | None) -> torch.Tensor | PackedBytes:
        """Give the library the embedding, which lies in `place` or is put there if there is one; returns its owner."""
        rows, functions = self._embedding_rows, self.engine.functions
        if rows is None:
            numbers = weights.get(f"{EMBEDDING}.weight", (self.config.vocab_size, self.config.hidden_size)).contiguous()
            functions.ty_model_embedding(self.model, address(numbers))
            return numbers
        found = rows.read() if place is None else place
        if place is not None and self._memory is not None and not self._memory.filled:
            place[:] = rows.read().reshape(-1)
        functions.ty_model_embedding(self.model, found.ctypes.data)
        return found

    def _make(self, dtype: torch.dtype, int8: bool) -> int:
        """Create the library's model, which has room for all weights."""
        config, layers = self.config, range(self.config.num_layers)
        windows = int32s(config.windows)
        tables = (ctypes.c_void_p * len(layers))(*(address(self._cos_sin[rope]) for rope in config.ropes))
        experts = None if config.experts is None else describe_moe(config, dtype, int8=int8)
        having = int32s(tuple(self._has_experts(layer) for layer in layers))
        recurrent = None if config.recurrent is None else describe_recurrent(config.recurrent)
        recurring = int32s(tuple(self._has_state(layer) for layer in layers))
        # As transformers has it, in the dtype of the weights.
        embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        wanted = NativeConfig(
            dtype=DTYPES[dtype],
            int8=int8,
            layers=config.num_layers,
            hidden=config.hidden_size,
            inter=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotated=2 * self._cos_sin[config.ropes[0]].shape[-1],
            gate=ACTIVATIONS.index(config.activation),
            shared=0 if config.experts is None else config.experts.shared_size,
            output_gate=config.output_gate,
            eps=config.norm_eps,
            gate_limit=config.gate_limit,
            embedding_scale=embedding_scale,
            attention_scale=config.score_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            residual_scale=config.residual_scale,
            logit_scale=config.logit_scale,
            vocabulary=config.vocab_size,
            windows=ctypes.addressof(windows),
            embedding_format=STORED if self._embedding_rows is None else self._embedding_rows.format.number,
            kv_format=self._kv_format,
            cos_sin=ctypes.addressof(tables),
            experts=None if experts is None else ctypes.addressof(experts),
            expert_layers=ctypes.addressof(having),
            recurrent=None if recurrent is None else ctypes.addressof(recurrent),
            recurrent_layers=ctypes.addressof(recurring),
        )
        made = self.engine.functions.ty_model_new(self.engine.pool, self.engine.level, ctypes.byref(wanted))
        if not made:
            raise ConfigError(NO_MEMORY)
        return int(made)

    def _linears(self) -> Iterator[_Linear]:
        """All products of the model."""
        config = self.config
        hidden = config.hidden_size
        for layer in range(config.num_layers):
            mlp, inter = f"model.layers.{layer}.mlp", config.intermediate_size
            if config.recurrent is not None and self._has_state(layer):
                inputs, output, bias = recurrent_products(config, config.recurrent, layer)
                yield _Linear(layer, QKV, -1, inputs, hidden, bias)
                yield _Linear(layer, OUTPUT, -1, *output, bias)
            else:
                yield from self._attention_linears(layer)
            if config.experts is not None and self._has_experts(layer):
                for product in expert_products(config, layer):
                    yield _Linear(layer, *product, config.experts.bias)
                mlp, inter = f"{mlp}.shared_expert", config.experts.shared_size
                if not inter:
                    continue
            gate_up = {f"{mlp}.gate_proj": inter, f"{mlp}.up_proj": inter}
            yield _Linear(layer, GATE_UP, -1, gate_up, hidden, config.mlp_bias)
            yield _Linear(layer, DOWN, -1, {f"{mlp}.down_proj": hidden}, inter, config.mlp_bias)
        head = EMBEDDING if config.tied_embeddings else "lm_head"
        yield _Linear(0, HEAD, -1, {head: config.vocab_size}, hidden, bias=False)

    def _attention_linears(self, layer: int) -> Iterator[_Linear]:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        if config.output_gate:
            qkv[f"{prefix}.{QUERY_GATE}"] = q_size
        yield _Linear(layer, QKV, -1, qkv, config.hidden_size, config.qkv_bias)
        yield _Linear(layer, OUTPUT, -1, {f"{prefix}.o_proj": config.hidden_size}, q_size, config.output_bias)

    def _load_linears(self, weights: Weights) -> int:
        """Lay out the weights of all products, and take the embedding unless the head's weights are the same numbers;
        returns the bytes of the products. Raises ConfigError; see NativeDecoder.
        """
        functions = self.engine.functions
        products = self._divided(weights)
        for one, parts in products:
            if any(part.packed for part in parts):
                formats = int32s(tuple(part.format.number if part.format else self._unpacked for part in parts))
                outputs = (ctypes.c_int64 * len(parts))(*(part.outputs for part in parts))
                place = (self.model, one.layer, one.which, one.expert)
                order = next((part.packed[0].order for part in parts if part.packed), None)
                if order is not None:
                    functions.ty_model_order(*place, order.ctypes.data)
                if functions.ty_model_parts(*place, len(parts), formats, outputs):
                    raise AssertionError(f"parts of {list(one.outputs)} do not end with panels")
        nbytes = int(functions.ty_model_measure(self.model))
        of_head = self.config.tied_embeddings and self._holds_numbers(products[-1][1])
        reserved = self._reserve(nbytes, products, None if of_head else self._embedding_rows)
        if functions.ty_model_place(self.model, None if reserved is None else reserved[0].ctypes.data):
            raise ConfigError(NO_MEMORY)
        for one, parts in products:
            for number, part in enumerate(parts):
                self._load_part(weights, one, number, part)
        if not of_head:
            self._embedding = self._load_embedding(weights, None if reserved is None else reserved[1])
        return nbytes

    def _holds_numbers(self, parts: Sequence[LinearPart]) -> bool:
        """Whether a product's panels give the numbers of its weights as they were stored, row by row."""
        if len(parts) > 1:
            return False
        if not parts[0].packed:
            return self._unpacked == STORED
        return parts[0].packed[0].order is None and not parts[0].packed[0].format.name.startswith("FP8")

    def _reserve(
        self, nbytes: int, products: Sequence[tuple[_Linear, tuple[LinearPart, ...]]], rows: PackedRows | None
    ) -> tuple[PackedBytes, PackedBytes] | None:
        """Memory of `memory` for products and embedding; None for the library's. Raises UnusableFileError."""
        if self._memory is None:
            return None
        layout = hashlib.blake2b(digest_size=16)
        for one, parts in products:
            layout.update(repr(one).encode())
            for part in parts:
                layout.update(repr((part.matrices, part.format)).encode())
                for packed in part.packed:
                    layout.update(b"" if packed.order is None else packed.order.tobytes())
        layout.update(repr(None if rows is None else (rows.format, rows.shape)).encode())
        return self._memory.reserve(layout.hexdigest(), (nbytes, 0 if rows is None else rows.nbytes))

    def _divided(self, weights: Weights) -> list[tuple[_Linear, tuple[LinearPart, ...]]]:
        """All products, each in parts of one format."""
        multiple = self.engine.functions.ty_part_multiple(self.engine.level)
        products = []
        formats = defaultdict[tuple[int, int], set[WeightFormat | None]](set)
        for one in self._linears():
            # The weights of a router stay numbers: another choice of experts is a large change.
            parts = unpacked(one.outputs)
            if one.which != ROUTER:
                parts = divide(weights, one.outputs, one.inputs, multiple=multiple, gated=one.which == GATE_UP)
            if one.expert >= 0:
                formats[one.layer, one.which].update(part.format for part in parts)
            products.append((one, parts))
        # The experts of a layer take the same rows, so they have one format.
        return [
            (one, unpacked(one.outputs) if len(formats.get((one.layer, one.which), ())) > 1 else parts)
            for one, parts in products
        ]

    def _load_part(self, weights: Weights, one: _Linear, number: int, part: LinearPart) -> None:
        call = partial(self.engine.functions.ty_model_linear, self.model, one.layer, one.which, one.expert, number)
        biases = [weights.get(f"{name}.bias", (rows,)).float() for name, rows in part.matrices] if one.bias else []
        bias = torch.cat(biases) if biases else None
        if self._memory is not None and self._memory.filled:
            call(None, None if bias is None else address(bias))
            return
        if not part.packed:
            weight, _ = fused_parts(weights, dict(part.matrices), one.inputs, bias=False)
            return with_addresses(call, weight, bias)
        data = part.read()
        call(data.ctypes.data, None if bias is None else address(bias))

    def _has_experts(self, layer: int) -> bool:
        experts = self.config.experts
        return experts is not None and layer in experts.layers

    def _has_state(self, layer: int) -> bool:
        return self.config.recurrent is not None and layer in self.config.recurrent.layers

    def _take_vectors(self, weights: Weights, layer: int) -> None:
        config, prefix = self.config, f"model.layers.{layer}"
        attention, names = f"{prefix}.self_attn", norm_names(config)
        norms = {ATTENTION_NORM: "input_layernorm", MLP_NORM: names.before_mlp}
        norms |= {AFTER_ATTENTION: names.after_attention, AFTER_MLP: names.after_mlp}
        for which, name in norms.items():
            if name:
                self._norm(layer, which, weights.get(f"{prefix}.{name}.weight", (config.hidden_size,)))
        experts = config.experts if self._has_experts(layer) else None
        if experts is not None and experts.shared_size and experts.shared_gated:
            gate = weights.get(f"{prefix}.mlp.shared_expert_gate.weight", (1, config.hidden_size))
            self._vector(layer, SHARED_GATE, gate)
        if config.recurrent is not None and self._has_state(layer):
            for which, numbers in recurrent_vectors(config.recurrent, weights, layer).items():
                self._vector(layer, which, numbers)
            return
        if config.qk_norm:
            self._norm(layer, Q_NORM, weights.get(f"{attention}.q_norm.weight", (config.head_dim,)))
            self._norm(layer, K_NORM, weights.get(f"{attention}.k_norm.weight", (config.head_dim,)))
        if config.sinks:
            self._vector(layer, SINKS, weights.get(f"{attention}.sinks", (config.num_heads,)))

    def _norm(self, layer: int, which: int, weight: torch.Tensor) -> None:
        self._vector(layer, which, weight.float() + self.config.norm_offset)

    def _vector(self, layer: int, which: int, numbers: torch.Tensor) -> None:
        numbers = numbers.float().contiguous()
        self.engine.functions.ty_model_vector(self.model, layer, which, address(numbers))


class NativeModel:
    """A ModelBackend for a CPU: a step is one call of the library, over the pool and the page table as they are."""

    def __init__(self, decoder: NativeDecoder, pool: KvPool, pages: PageTable, *, fixed_order: bool = False) -> None:
        self._decoder, self._pool, self._pages, self._fixed_order = decoder, pool, pages, fixed_order
        self._functions = decoder.engine.functions
        self._vocabulary = decoder.config.vocab_size
        self.logits_buffer = torch.empty(0, self._vocabulary)
        self._window_slots = torch.empty(0, dtype=torch.int64)

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; see ModelBackend."""
        wanted = len(batch.logit_tokens)
        if len(self.logits_buffer) < wanted:
            # Kept from step to step: fresh pages cost more than filling them.
            self.logits_buffer = torch.empty(wanted, self._vocabulary)
        logits = self.logits_buffer[:wanted]
        step = describe_step(batch, self._pool, self._pages, logits, fixed_order=self._fixed_order)
        self._describe_windows(step, batch)
        states = None if batch.states is None else self._states(batch.states)
        step.states = None if states is None else ctypes.addressof(states.described)
        adapters = self._decoder.adapters
        step.adapters = None if adapters is None else adapters.ctypes.data
        check(self._functions.ty_model_step(self._decoder.model, ctypes.byref(step)))
        return logits

    def _states(self, batch: StateBatch) -> NativeStateRows:
        """Describe the states of a step, and how those of rows that verify drafts are computed again."""
        own = self._decoder.config.recurrent
        assert own is not None
        found = NativeStateRows(batch.pool, rows_of(batch), product_size(own))
        if found.kept_runs:
            batch.replay = partial(self._replay, found)
        return found

    def _replay(self, states: NativeStateRows, counts: Sequence[int]) -> None:
        again = states.again(counts)
        check(self._functions.ty_model_replay(self._decoder.model, ctypes.byref(again.described)))

    def _describe_windows(self, step: NativeStep, batch: ForwardBatch) -> None:
        """Describe where keys and values of layers with a window lie if they have a separate pool."""
        pool, pages = self._pool.windows, self._pages.windows
        if pool is None or pages is None:
            return
        self._window_slots = torch.from_numpy(pages.host_slots(batch.pool_rows.numpy(), batch.positions.numpy()))
        step.window_kv = address(pool.tensor)
        step.window_plane_bytes = pool.tensor.stride(1) * pool.tensor.itemsize
        step.window_slots = address(self._window_slots)
        step.window_table = address(pages.tensor)
        step.window_table_stride = pages.tensor.stride(0)

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Return logits of tokens of the last step; see ModelBackend."""
        tokens = torch.arange(first, last)
        found = torch.empty(last - first, self._vocabulary)
        check(self._functions.ty_model_logits(self._decoder.model, address(tokens), len(tokens), address(found)))
        return found

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return hidden states of tokens of the last step; see ModelBackend."""
        tokens = torch.arange(first, last)
        found = torch.empty(last - first, self._decoder.config.hidden_size)
        check(self._functions.ty_model_residual(self._decoder.model, address(tokens), len(tokens), address(found)))
        return self._decoder.last_norm(found)
