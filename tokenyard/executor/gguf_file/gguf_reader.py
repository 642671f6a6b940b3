"""Opens a GGUF file: its metadata, and where its tensors lie. Needs no torch."""

from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.header_check import check_header

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3_5MoeForCausalLM",
}
"""Hugging Face's name of each kind of model that can be read, by GGUF's.

Qwen3-Next computes what Qwen3.5-MoE does, and its files have the products of Qwen3.5, all but one.
"""


class GgufFile:
    """A GGUF file that is open for reading; tensors stay on the disk until they are used.

    Raises ConfigError for a file that is damaged or of a kind that is not supported, and without the gguf package.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError("reading a GGUF file needs the gguf package: pip install 'tokenyard[gguf]'") from error
        self.path = path
        try:
            check_header(path)
            self._reader = GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except Exception as error:  # the package raises whatever numpy does on what it did not expect
            raise ConfigError(f"{path} is damaged, cut off or no GGUF file: {error}") from error
        for tensor in self.tensors.values():
            if int(tensor.data_offset) + int(tensor.n_bytes) > path.stat().st_size:
                raise ConfigError(f"{path} is cut off: tensor {tensor.name!r} reaches beyond its end")
        self.architecture = self.value("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{path} holds a model of kind {self.architecture!r}; supported are {known}")

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, `default` if the file does not have it."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise ConfigError(f"{self.path}: the value of {key} cannot be read: {error}") from error

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the file's architecture."""
        return self.value(f"{self.architecture}.{key}", default)
