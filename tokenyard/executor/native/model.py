"""A model whose steps the native library runs, each in one call."""

import ctypes
import logging
import time
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.rotary import rotary_table
from tokenyard.executor.models.config import ACTIVATIONS, ModelConfig
from tokenyard.executor.models.decoder import fused_parts, norm_names
from tokenyard.executor.native.library import DOWN, GATE_UP, HEAD, OUTPUT, QKV, NativeConfig, NativeStep
from tokenyard.executor.native.moe import NO_MEMORY, describe_moe, load_experts, with_addresses
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, check, describe_step, int32s
from tokenyard.executor.weights import Weights

logger = logging.getLogger(__name__)

ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, AFTER_ATTENTION, AFTER_MLP, SINKS, LAST_NORM = range(8)


class NativeDecoder:
    """The weights of a model, laid out once for the library's products.

    Weights are taken by their Hugging Face names, one after another, so that a second copy of the model never lies in
    memory. int8: those of products are rounded to bytes, with a scale for each output; embeddings stay. `adapters` is
    set before a step: the slot of each token's adapter (see NativeLoraPool), None where no token has one. Raises
    ConfigError if a weight is missing or misshapen or memory runs out.
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
    ) -> None:
        self.engine, self.config, self.dtype = engine, config, dtype
        self.adapters: npt.NDArray[np.int32] | None = None
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.get("model.embed_tokens.weight", shape).contiguous()
        self._cos_sin = {
            rope: rotary_table(rope, config.head_dim, context_length) for rope in dict.fromkeys(config.ropes)
        }
        self.model = self._make(dtype, int8)
        begin_s = time.perf_counter()
        for layer in range(config.num_layers):
            self._take_layer(weights, layer)
        last_norm = weights.get("model.norm.weight", (config.hidden_size,))
        self._norm(0, LAST_NORM, last_norm)
        self.last_norm = RMSNorm(last_norm.float(), config.norm_eps, config.norm_offset)
        head = self._embedding if config.tied_embeddings else weights.get("lm_head.weight", shape)
        self._linear(0, HEAD, head, None)
        logger.info("loaded and packed %d layers in %.1f s", config.num_layers, time.perf_counter() - begin_s)

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.engine.functions.ty_model_free(self.model)

    def _make(self, dtype: torch.dtype, int8: bool) -> int:
        """Create the library's model, which has room for all weights."""
        config, layers = self.config, range(self.config.num_layers)
        windows = int32s(config.windows)
        tables = (ctypes.c_void_p * len(layers))(*(address(self._cos_sin[rope]) for rope in config.ropes))
        experts = None if config.experts is None else describe_moe(config, dtype, int8=int8)
        having = int32s(tuple(self._has_experts(layer) for layer in layers))
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
            eps=config.norm_eps,
            gate_limit=config.gate_limit,
            embedding_scale=embedding_scale,
            attention_scale=config.score_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            vocabulary=config.vocab_size,
            windows=ctypes.addressof(windows),
            embedding=address(self._embedding),
            cos_sin=ctypes.addressof(tables),
            experts=None if experts is None else ctypes.addressof(experts),
            expert_layers=ctypes.addressof(having),
        )
        made = self.engine.functions.ty_model_new(self.engine.pool, self.engine.level, ctypes.byref(wanted))
        if not made:
            raise ConfigError(NO_MEMORY)
        return int(made)

    def _take_layer(self, weights: Weights, layer: int) -> None:
        config, prefix = self.config, f"model.layers.{layer}"
        hidden = config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, names = f"{prefix}.self_attn", norm_names(config)
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        self._fused(weights, layer, QKV, qkv, hidden, config.qkv_bias)
        self._fused(weights, layer, OUTPUT, {f"{attention}.o_proj": hidden}, q_size, config.output_bias)
        self._take_mlp(weights, layer)
        norms = {ATTENTION_NORM: "input_layernorm", MLP_NORM: names.before_mlp}
        norms |= {AFTER_ATTENTION: names.after_attention, AFTER_MLP: names.after_mlp}
        for which, name in norms.items():
            if name:
                self._norm(layer, which, weights.get(f"{prefix}.{name}.weight", (hidden,)))
        if config.qk_norm:
            self._norm(layer, Q_NORM, weights.get(f"{attention}.q_norm.weight", (config.head_dim,)))
            self._norm(layer, K_NORM, weights.get(f"{attention}.k_norm.weight", (config.head_dim,)))
        if config.sinks:
            self._vector(layer, SINKS, weights.get(f"{attention}.sinks", (config.num_heads,)))

    def _has_experts(self, layer: int) -> bool:
        experts = self.config.experts
        return experts is not None and layer in experts.layers

    def _take_mlp(self, weights: Weights, layer: int) -> None:
        config, mlp = self.config, f"model.layers.{layer}.mlp"
        if self._has_experts(layer):
            return load_experts(partial(self._expert, layer), config, weights, layer)
        hidden, inter = config.hidden_size, config.intermediate_size
        gate_up = {f"{mlp}.gate_proj": inter, f"{mlp}.up_proj": inter}
        self._fused(weights, layer, GATE_UP, gate_up, hidden, config.mlp_bias)
        self._fused(weights, layer, DOWN, {f"{mlp}.down_proj": hidden}, inter, config.mlp_bias)

    def _fused(
        self, weights: Weights, layer: int, which: int, outputs: dict[str, int], inputs: int, bias: bool
    ) -> None:
        self._linear(layer, which, *fused_parts(weights, outputs, inputs, bias))

    def _linear(self, layer: int, which: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with_addresses(partial(self.engine.functions.ty_model_linear, self.model, layer, which), weight, bias)

    def _expert(self, layer: int, which: int, expert: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        call = partial(self.engine.functions.ty_model_expert, self.model, layer, which, expert)
        with_addresses(call, weight, bias)

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
        self._logits = torch.empty(0, self._vocabulary)
        self._window_slots = torch.empty(0, dtype=torch.int64)

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; see ModelBackend."""
        wanted = len(batch.logit_tokens)
        if len(self._logits) < wanted:
            # Kept from step to step: fresh pages cost more than filling them.
            self._logits = torch.empty(wanted, self._vocabulary)
        logits = self._logits[:wanted]
        step = describe_step(batch, self._pool, self._pages, logits, fixed_order=self._fixed_order)
        self._describe_windows(step, batch)
        adapters = self._decoder.adapters
        step.adapters = None if adapters is None else adapters.ctypes.data
        check(self._functions.ty_model_step(self._decoder.model, ctypes.byref(step)))
        return logits

    def _describe_windows(self, step: NativeStep, batch: ForwardBatch) -> None:
        """Describe where keys and values of layers with a window lie if they have a separate pool."""
        pool, pages = self._pool.windows, self._pages.windows
        if pool is None or pages is None:
            return
        self._window_slots = pages.slots(batch.pool_rows, batch.positions).to(torch.int64)
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
