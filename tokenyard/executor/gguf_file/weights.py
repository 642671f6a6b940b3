"""The tensors of a GGUF file by their Hugging Face names, as they are stored or dequantized as they are loaded."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.formats.packed import PackedBytes, PackedRows
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.gguf_file.dequantize import dequantized
from tokenyard.executor.gguf_file.gguf_reader import GgufFile

WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA_IN_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
DELTA_NET_IN_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
OWN_IN_LAYER = {
    "gemma2": GEMMA_IN_LAYER,
    "gemma3": GEMMA_IN_LAYER,
    "gemma4": GEMMA_IN_LAYER
    | {
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "lfm2": {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
    },
    "granitehybrid": {
        "mamba.in_proj": "ssm_in",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.norm": "ssm_norm",
        "mamba.out_proj": "ssm_out",
    },
    "qwen35": DELTA_NET_IN_LAYER,
    "qwen35moe": DELTA_NET_IN_LAYER,
    "qwen3next": DELTA_NET_IN_LAYER | {"linear_attn.in_proj_b": "ssm_ba", "linear_attn.in_proj_a": "ssm_ba"},
}
"""GGUF's names of tensors, by Hugging Face's: of all families, and those of single families."""

WITHOUT_KIND = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
}
"""Tensors of layers whose Hugging Face names end in neither weight nor bias."""

_DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_TWO_IN_ONE = ".ssm_ba.weight"
"""Strengths and steps of each key head of a gated delta net, one after the other."""
_NO_KIND = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class GgufWeights:
    """See `PackedSource`. Tensors are read one at a time.

    heads, kv_heads: of the model; files of kind llama hold the rows of queries and keys in another order, by head.
    unpacked: takes what is dequantized.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        unpacked: UnpackedMatrices | None = None,
    ) -> None:
        self._file = GgufFile(path)
        self._unpacked = unpacked or UnpackedMatrices()
        self._device, self._dtype = device, dtype
        self._in_layer = IN_LAYER | OWN_IN_LAYER.get(self._file.architecture, {})
        # Of Gemma, files hold what is multiplied with, and Hugging Face's less one.
        self._norms_hold_one = self._file.architecture in ("gemma2", "gemma3", *_DELTA_NETS)
        turns = self._file.architecture in ("granite", "granitehybrid", "llama")
        self._interleaved = {"attn_q": heads, "attn_k": kv_heads} if turns else {}
        self._values = _ValueHeads(self._file) if self._file.architecture in ("qwen35", "qwen35moe") else None

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of a Hugging Face name; see Weights. Raises ConfigError if missing or misshapen."""
        own, expert, tensor = self._find(name)
        data = tensor.data if expert is None else tensor.data[expert : expert + 1]
        try:
            # Norms lose the one that files add to them before they are rounded.
            found = dequantized(data, tensor.tensor_type, torch.float32 if data.ndim == 1 else self._dtype)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ConfigError(f"{self._file.path}: tensor {own!r} cannot be dequantized: {error}") from error
        if own.endswith(_TWO_IN_ONE):
            heads = self._file.own("ssm.group_count", 1)
            found = found.reshape(heads, 2, -1, found.shape[-1])[:, int(".in_proj_a." in name)].flatten(0, 1)
        found = found.reshape(shape) if found.numel() == torch.Size(shape).numel() else found
        if tuple(found.shape) != shape:
            raise ConfigError(f"{self._file.path}: {own!r} has shape {tuple(found.shape)}; its metadata mean {shape}")
        if own.endswith("norm.weight") and self._norms_hold_one and not own.endswith("ssm_norm.weight"):
            found = found - 1.0
        if own.endswith(".ssm_a"):
            found = (-found).log()
        rows = self._row_order(own, len(found))
        if rows is not None:
            found = found[torch.from_numpy(rows)]
        columns = self._column_order(own)
        if columns is not None:
            found = found[:, torch.from_numpy(columns).argsort()]
        found = found.to(device=self._device, dtype=self._dtype)
        if data.dtype == np.uint8:
            self._unpacked.add(tensor.tensor_type.name, own, data.nbytes, found.nbytes)
        return found

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        own, expert, tensor = self._find(name)
        form = FORMATS.get(tensor.tensor_type.name)
        rows, inputs = shape
        if form is None or inputs % form.inputs or own.endswith(_TWO_IN_ONE):
            return None
        stored = tuple(int(size) for size in tensor.data.shape)
        wanted = (rows, form.row_bytes(inputs))
        if stored[-2:] != wanted or stored[:-2] != (stored[:1] if expert is not None else ()):
            raise ConfigError(f"{self._file.path}: {own!r} has rows of bytes {stored}; its metadata mean {wanted}")
        place = int(tensor.data_offset) + (expert or 0) * rows * wanted[1]
        path, order = self._file.path, self._row_order(own, rows)

        def read() -> PackedBytes:
            found = np.memmap(path, np.uint8, "r", place, wanted)
            return found if order is None else found[order]

        return PackedRows(form, shape, read, self._column_order(own))

    def _find(self, name: str) -> tuple[str, int | None, Any]:
        """GGUF's name of a tensor, which expert of it is meant, and the tensor. Raises ConfigError if it is missing."""
        own, expert = self._names(name)
        tensor = self._file.tensors.get(own)
        if tensor is None:
            raise ConfigError(f"{self._file.path} has no tensor {own!r}, which {name!r} should be")
        return own, expert, tensor

    def _row_order(self, own: str, rows: int) -> npt.NDArray[np.int64] | None:
        """Which row of a tensor each of Hugging Face's is; None for the same order."""
        part = own.split(".")[2] if own.startswith("blk.") else ""
        if part in self._interleaved:
            # The two rows of a rotated pair are half a head apart, not adjacent.
            return np.arange(rows).reshape(self._interleaved[part], -1, 2).swapaxes(1, 2).reshape(-1)
        return None if self._values is None else self._values.row_order(part, rows)

    def _column_order(self, own: str) -> npt.NDArray[np.int32] | None:
        """Which of Hugging Face's inputs each column of a tensor is; None for the same order."""
        return self._values.columns if self._values is not None and own.endswith(".ssm_out.weight") else None

    def _names(self, name: str) -> tuple[str, int | None]:
        """GGUF's name of a tensor, and which expert of it is meant, None for all of it."""
        plain = _NO_KIND.fullmatch(name)
        if plain is not None and plain[2] in WITHOUT_KIND:
            return f"blk.{plain[1]}.{WITHOUT_KIND[plain[2]]}", None
        match = _LAYER.fullmatch(name)
        if match is None:
            base, _, kind = name.rpartition(".")
            return f"{WHOLE.get(base, base)}.{kind}", None
        layer, base, kind = match.groups()
        expert = _EXPERT.fullmatch(base)
        if expert is not None:
            return f"blk.{layer}.ffn_{expert[2]}_exps.{kind}", int(expert[1])
        return f"blk.{layer}.{self._in_layer.get(base, base)}.{kind}", None


class _ValueHeads:
    """The order of a gated delta net's value heads: files have the first one of each key head, then the second ones,
    and so on; Hugging Face has those of a key head one after the other.

    columns: int32[values], which of Hugging Face's inputs each column of the last product is; None for the same order.
    """

    def __init__(self, file: GgufFile) -> None:
        self._heads, keys = file.own("ssm.time_step_rank", 1), file.own("ssm.group_count", 1)
        self._moved = self._heads > keys > 1
        own = np.arange(self._heads)
        each = self._heads // keys
        # The place in the file of each of Hugging Face's heads.
        self._places = own % each * keys + own // each
        dim = file.own("ssm.inner_size", self._heads) // self._heads
        columns = (np.argsort(self._places)[:, None] * dim + np.arange(dim)).reshape(-1)
        self.columns = columns.astype(np.int32) if self._moved else None

    def row_order(self, part: str, rows: int) -> npt.NDArray[np.int64] | None:
        """See GgufWeights."""
        sizes = {"attn_gate": rows, "ssm_beta": rows, "ssm_alpha": rows, "ssm_a": rows, "ssm_dt": rows}
        if self.columns is None or part not in sizes | {"attn_qkv": 0, "ssm_conv1d": 0}:
            return None
        values = sizes.get(part, len(self.columns))
        dim = values // self._heads
        order = (self._places[:, None] * dim + np.arange(dim)).reshape(-1)
        return np.concatenate((np.arange(rows - values), rows - values + order))
