"""What is known of a model by its files, without loading it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model on disk.

    size_bytes: of its weight files.
    modified_s: when the newest of them was written, as Unix time.
    digest: SHA-256 over paths, sizes and times of the files, in hexadecimal: other files have another one.
    container: gguf or safetensors.
    family: the architecture by its file's own name, such as llama.
    parameters: how many numbers its weights hold.
    quantization: the type that most of them have, such as Q4_K or BF16.
    context_length: most tokens of prompt and answer together, 0 if the files do not say.
    """

    size_bytes: int = 0
    modified_s: float = 0.0
    digest: str = ""
    container: str = "safetensors"
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    context_length: int = 0
