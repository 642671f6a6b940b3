"""Reads what the files of a model say about it. Needs no torch."""

import hashlib
import json
from collections import Counter
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.base.model_facts import ModelFacts
from tokenyard.executor.gguf_file.folder import LINK
from tokenyard.executor.memory_fit import stored_tensors


def read_model_facts(folder: Path) -> ModelFacts:
    """The facts of a model's folder (see `resolve_model_path`).

    Raises ConfigError for files that are damaged or cannot be read.
    """
    gguf = (folder / LINK).exists()
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    try:
        files = [(folder / LINK).resolve()] if gguf else sorted(folder.glob("*.safetensors"))
        stats = [path.stat() for path in files]
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}/config.json is no JSON object")
    kinds = Counter[str]()
    for tensor in stored_tensors(folder):
        kinds[tensor.kind] += tensor.numbers
    names = [f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in zip(files, stats, strict=True)]
    # A model that also reads images says in a part of its config how long its texts may be.
    text = config.get("text_config")
    length = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    architectures = config.get("architectures") or [""]
    return ModelFacts(
        size_bytes=sum(stat.st_size for stat in stats),
        modified_s=max((stat.st_mtime for stat in stats), default=0.0),
        digest=hashlib.sha256("\0".join(names).encode()).hexdigest(),
        container="gguf" if gguf else "safetensors",
        family=str(config.get("model_type") or str(architectures[0]).removesuffix("ForCausalLM").lower()),
        parameters=sum(kinds.values()),
        quantization=kinds.most_common(1)[0][0] if kinds else "",
        context_length=length if isinstance(length, int) else 0,
    )
