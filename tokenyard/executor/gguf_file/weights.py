"""The tensors of a GGUF file by their Hugging Face names, as they are stored or dequantized as they are loaded."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenyard.base import ConfigError
from tokenyard.executor.formats.packed import PackedBytes, PackedRows
from tokenyard.executor.formats.unpacked import UnpackedMatrices
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.gguf_file.dequantize import dequantized
from tokenyard.executor.gguf_file.gguf_reader import GgufFile

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
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
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA_IN_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_IN_LAYER = {
    "gemma2": GEMMA_IN_LAYER,
    "gemma3": GEMMA_IN_LAYER,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}
"""GGUF's names of tensors, by Hugging Face's: of all families, and those of single families."""

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
        self._norms_hold_one = self._file.architecture in ("gemma2", "gemma3")
        self._interleaved = {"attn_q": heads, "attn_k": kv_heads} if self._file.architecture == "llama" else {}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of a Hugging Face name; see Weights. Raises ConfigError if missing or misshapen."""
        own, expert, tensor = self._find(name)
        data = tensor.data if expert is None else tensor.data[expert : expert + 1]
        try:
            # Norms lose the one that files add to them before they are rounded.
            found = dequantized(data, tensor.tensor_type, torch.float32 if data.ndim == 1 else self._dtype)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ConfigError(f"{self._file.path}: tensor {own!r} cannot be dequantized: {error}") from error
        found = found.reshape(shape) if found.numel() == torch.Size(shape).numel() else found
        if tuple(found.shape) != shape:
            raise ConfigError(f"{self._file.path}: {own!r} has shape {tuple(found.shape)}; its metadata mean {shape}")
        if own.endswith("norm.weight") and self._norms_hold_one:
            found = found - 1.0
        heads = self._heads_in_turns(own)
        if heads:
            found = _half_split(found, heads)
        found = found.to(device=self._device, dtype=self._dtype)
        if data.dtype == np.uint8:
            self._unpacked.add(tensor.tensor_type.name, own, data.nbytes, found.nbytes)
        return found

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows | None:
        """See PackedSource."""
        own, expert, tensor = self._find(name)
        form = FORMATS.get(tensor.tensor_type.name)
        rows, inputs = shape
        if form is None or inputs % form.inputs:
            return None
        stored = tuple(int(size) for size in tensor.data.shape)
        wanted = (rows, form.row_bytes(inputs))
        if stored[-2:] != wanted or stored[:-2] != (stored[:1] if expert is not None else ()):
            raise ConfigError(f"{self._file.path}: {own!r} has rows of bytes {stored}; its metadata mean {wanted}")
        place = int(tensor.data_offset) + (expert or 0) * rows * wanted[1]
        path, heads = self._file.path, self._heads_in_turns(own)

        def read() -> PackedBytes:
            found = np.memmap(path, np.uint8, "r", place, wanted)
            if not heads:
                return found
            return np.ascontiguousarray(found.reshape(heads, -1, 2, wanted[1]).swapaxes(1, 2)).reshape(wanted)

        return PackedRows(form, shape, read)

    def _find(self, name: str) -> tuple[str, int | None, Any]:
        """GGUF's name of a tensor, which expert of it is meant, and the tensor. Raises ConfigError if it is missing."""
        own, expert = self._names(name)
        tensor = self._file.tensors.get(own)
        if tensor is None:
            raise ConfigError(f"{self._file.path} has no tensor {own!r}, which {name!r} should be")
        return own, expert, tensor

    def _heads_in_turns(self, own: str) -> int:
        """How many heads a tensor has whose rows lie in another order than Hugging Face's, 0 for the same order."""
        return self._interleaved.get(own.split(".")[2], 0) if own.startswith("blk.") else 0

    def _names(self, name: str) -> tuple[str, int | None]:
        """GGUF's name of a tensor, and which expert of it is meant, None for all of it."""
        if name.endswith(".self_attn.sinks"):
            return f"blk.{name.split('.')[2]}.attn_sinks.weight", None
        match = _LAYER.fullmatch(name)
        if match is None:
            base, _, kind = name.rpartition(".")
            return f"{WHOLE.get(base, base)}.{kind}", None
        layer, base, kind = match.groups()
        expert = _EXPERT.fullmatch(base)
        if expert is not None:
            return f"blk.{layer}.ffn_{expert[2]}_exps.{kind}", int(expert[1])
        return f"blk.{layer}.{self._in_layer.get(base, base)}.{kind}", None


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head, so that the two rows of a rotated pair are half a head apart, not adjacent."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
