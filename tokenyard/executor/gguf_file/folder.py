"""A folder as the rest of the package expects it, made from the metadata of a GGUF file. Needs no torch.

config.json and the tokenizer's files are written from it; `model.gguf` in the folder is a link to the file. The folder
lies in the user's cache, and the same file gets the same folder again.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.architectures import own_facts
from tokenyard.executor.gguf_file.gguf_reader import ARCHITECTURES, GgufFile
from tokenyard.executor.gguf_file.tokenizer import write_tokenizer

LINK = "model.gguf"


def folder_of_gguf(path: Path) -> Path:
    """Return the folder of a GGUF file, written if it is not there yet.

    Raises ConfigError for a file that is damaged or not supported.
    """
    path = path.resolve()
    stat = path.stat()
    digest = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenyard" / "gguf"
    folder = cache / f"{path.stem}-{digest}"
    if (folder / LINK).exists():
        return folder
    file = GgufFile(path)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, "folder")
            made.mkdir()
            write_folder(file, made)
            (made / LINK).symlink_to(path)
            made.replace(folder)
    except OSError as error:
        if (folder / LINK).exists():  # another process was faster
            return folder
        raise ConfigError(f"{cache} cannot be written, so {path.name} cannot be unpacked there: {error}") from error
    return folder


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write config.json and the files of the tokenizer.

    Raises ConfigError for metadata that is missing, not supported or makes no sense.
    """
    try:
        (folder / "config.json").write_text(json.dumps(read_config(file), indent=1), encoding="utf-8")
        write_tokenizer(file, folder)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # a list in place of a number, no heads, a merge of unknown tokens
        raise ConfigError(f"{file.path} has metadata that makes no sense: {error!r}") from error


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model. Raises ConfigError for missing fields."""
    heads = _needed(file, "attention.head_count")
    tokens = file.value("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "vocab_size": len(tokens) or file.own("vocab_size"),
        "hidden_size": _needed(file, "embedding_length"),
        "intermediate_size": file.own("expert_feed_forward_length")
        if file.architecture == "gpt-oss"
        else file.own("feed_forward_length") or file.own("expert_feed_forward_length"),
        "num_hidden_layers": _needed(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.own("attention.head_count_kv", heads),
        "head_dim": file.own("attention.key_length") or _needed(file, "embedding_length") // heads,
        "max_position_embeddings": _needed(file, "context_length"),
        "rms_norm_eps": _needed(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": file.own("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": None,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            token
            for name in ("eos", "eot", "eom")
            if (token := file.value(f"tokenizer.ggml.{name}_token_id")) is not None
        ],
    }
    config["partial_rotary_factor"] = file.own("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    if file.own("expert_count"):
        config |= {
            "num_experts": file.own("expert_count"),
            "num_local_experts": file.own("expert_count"),
            "num_experts_per_tok": _needed(file, "expert_used_count"),
            "moe_intermediate_size": _needed(file, "expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return config | _rope(file) | own_facts(file, config)


def _needed(file: GgufFile, key: str) -> Any:
    value = file.own(key)
    if value is None:
        raise ConfigError(f"{file.path} does not say {file.architecture}.{key}")
    return value


def _rope(file: GgufFile) -> dict[str, Any]:
    """Return how positions are scaled, as `rope_scaling`."""
    kind = file.own("rope.scaling.type", "none")
    if file.architecture == "gemma4":  # see its own facts
        return {}
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3(file)}
    if kind in ("none", "longrope"):  # of longrope the file holds the factors
        return {"rope_scaling": {"rope_type": "default"}}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported")
    original = file.own("rope.scaling.original_context_length")
    scaling = {"rope_type": kind, "factor": file.own("rope.scaling.factor", 1.0)}
    return {"rope_scaling": scaling | ({"original_max_position_embeddings": original} if original else {})}


def _llama3(file: GgufFile) -> dict[str, Any]:
    """Return Llama 3's rope scaling, of which the file holds the factor of each frequency; the largest is the stated
    one.

    The other three numbers are those of every released model. Raises ConfigError if the factors do not follow from
    them.
    """
    factors = file.tensors["rope_freqs.weight"].data
    found = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, size = file.own("rope.freq_base", 10000.0), 2 * len(factors)
    for place, factor in enumerate(factors.tolist()):
        turns = 8192 * theta ** (-2 * place / size) / 6.283185307179586
        keep = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        if abs(1.0 / (keep + (1.0 - keep) / found["factor"]) - factor) > 1e-3 * factor:
            raise ConfigError(f"{file.path}: the factors in rope_freqs.weight are none of Llama 3's")
    return found
