"""A model whose steps the native library runs, each in one call."""

import ctypes
import logging
import time

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.layers.norm import RMSNorm
from tokenyard.executor.layers.rotary import rotary_table
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import fused_parts
from tokenyard.executor.native.engine import DTYPES, NativeEngine, address, check, describe_step, int32s
from tokenyard.executor.native.library import DOWN, GATE_UP, HEAD, OUTPUT, QKV, Config
from tokenyard.executor.weights import Weights

logger = logging.getLogger(__name__)

ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, LAST_NORM = range(5)


class NativeDecoder:
    """The weights of a model, laid out once for the library's products.

    Weights are taken by their Hugging Face names, one after another, so that a second copy of the model never lies in
    memory. int8: those of products are rounded to bytes, with a scale for each output; embeddings stay. `adapters` is
    set before a step: the slot of each token's adapter (see NativeSlots), None where no token has one. Raises
    ConfigError if a weight is missing or misshapen or memory runs out.
    """

    def __init__(
        self,
        engine: NativeEngine,
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
        self._cos_sin = rotary_table(config.rope, config.head_dim, context_length)
        self.model = self._make(dtype, int8)
        begin_s = time.perf_counter()
        for layer in range(config.num_layers):
            self._take_layer(weights, layer)
        last_norm = weights.get("model.norm.weight", (config.hidden_size,))
        self._norm(0, LAST_NORM, last_norm)
        self.last_norm = RMSNorm(last_norm.float(), config.norm_eps)
        head = self._embedding if config.tied_embeddings else weights.get("lm_head.weight", shape)
        self._linear(0, HEAD, head, None)
        logger.info("loaded and packed %d layers in %.1f s", config.num_layers, time.perf_counter() - begin_s)

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.engine.functions.ty_model_free(self.model)

    def _make(self, dtype: torch.dtype, int8: bool) -> int:
        """Create the library's model, which has room for all weights."""
        config = self.config
        windows = int32s(config.windows)
        wanted = Config(
            dtype=DTYPES[dtype],
            int8=int8,
            layers=config.num_layers,
            hidden=config.hidden_size,
            inter=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            vocabulary=config.vocab_size,
            windows=ctypes.addressof(windows),
            embedding=address(self._embedding),
            cos_sin=address(self._cos_sin),
        )
        made = self.engine.functions.ty_model_new(self.engine.pool, self.engine.level, ctypes.byref(wanted))
        if not made:
            raise ConfigError("there is no memory for the packed weights; try a smaller model or --model-impl torch")
        return int(made)

    def _take_layer(self, weights: Weights, layer: int) -> None:
        config, prefix = self.config, f"model.layers.{layer}"
        hidden, inter = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        self._fused(weights, layer, QKV, qkv, hidden, config.qkv_bias)
        self._fused(weights, layer, OUTPUT, {f"{attention}.o_proj": hidden}, q_size, config.output_bias)
        gate_up = {f"{mlp}.gate_proj": inter, f"{mlp}.up_proj": inter}
        self._fused(weights, layer, GATE_UP, gate_up, hidden, config.mlp_bias)
        self._fused(weights, layer, DOWN, {f"{mlp}.down_proj": hidden}, inter, config.mlp_bias)
        self._norm(layer, ATTENTION_NORM, weights.get(f"{prefix}.input_layernorm.weight", (hidden,)))
        self._norm(layer, MLP_NORM, weights.get(f"{prefix}.post_attention_layernorm.weight", (hidden,)))
        if config.qk_norm:
            self._norm(layer, Q_NORM, weights.get(f"{attention}.q_norm.weight", (config.head_dim,)))
            self._norm(layer, K_NORM, weights.get(f"{attention}.k_norm.weight", (config.head_dim,)))

    def _fused(
        self, weights: Weights, layer: int, which: int, outputs: dict[str, int], inputs: int, bias: bool
    ) -> None:
        self._linear(layer, which, *fused_parts(weights, outputs, inputs, bias))

    def _linear(self, layer: int, which: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        self.engine.functions.ty_model_linear(
            self.model, layer, which, address(weight), None if bias is None else address(bias)
        )

    def _norm(self, layer: int, which: int, weight: torch.Tensor) -> None:
        weight = weight.float().contiguous()
        self.engine.functions.ty_model_norm(self.model, layer, which, address(weight))


class NativeModel:
    """A ModelBackend for a CPU: a step is one call of the library, over the pool and the page table as they are."""

    def __init__(self, decoder: NativeDecoder, pool: KvPool, pages: PageTable, *, fixed_order: bool = False) -> None:
        self._decoder, self._pool, self._pages, self._fixed_order = decoder, pool, pages, fixed_order
        self._functions = decoder.engine.functions
        self._vocabulary = decoder.config.vocab_size
        self._logits = torch.empty(0, self._vocabulary)

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch; see ModelBackend."""
        wanted = len(batch.logit_tokens)
        if len(self._logits) < wanted:
            # Kept from step to step: fresh pages cost more than filling them.
            self._logits = torch.empty(wanted, self._vocabulary)
        logits = self._logits[:wanted]
        step = describe_step(batch, self._pool, self._pages, logits, fixed_order=self._fixed_order)
        adapters = self._decoder.adapters
        step.adapters = None if adapters is None else adapters.ctypes.data
        check(self._functions.ty_model_step(self._decoder.model, ctypes.byref(step)))
        return logits

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
