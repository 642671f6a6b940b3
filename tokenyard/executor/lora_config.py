"""Reads the config of a LoRA adapter, `adapter_config.json` in peft's format. Needs no torch.

LoRA: Hu et al. 2021 (arXiv 2106.09685); rsLoRA, which scales by the root of the rank: Kalajdzievski 2023 (2312.03732).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_LORA_RANK = 4096

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of a layer that adapters can change."""

_NOT_PLAIN = {
    "use_dora": "is a DoRA adapter, which changes the size of the weights as well",
    "use_qalora": "is a QALoRA adapter",
    "lora_bias": "adds its own biases (lora_bias)",
    "modules_to_save": "replaces whole modules of the model (modules_to_save)",
    "layer_replication": "repeats layers of the model (layer_replication)",
    "trainable_token_indices": "changes single embeddings (trainable_token_indices)",
    "target_parameters": "changes parameters by name (target_parameters)",
    "alora_invocation_tokens": "acts from a certain token on (aLoRA)",
    "fan_in_fan_out": "is for weights that are stored transposed (fan_in_fan_out)",
}
"""Fields that must be absent or empty, and what an adapter with one is."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations (init_lora_weights) that change the weights of the base model too."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The used fields of an adapter's config.

    rank: the rank of modules that match no pattern.
    alpha: the alpha of modules that match no pattern.
    root: whether the scale is alpha / sqrt(rank) (rsLoRA).
    rank_pattern: ranks by regular expression over the end of a module's name.
    alpha_pattern: alphas by regular expression over the end of a module's name.
    """

    rank: int
    alpha: float
    root: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its name in the model such as `model.layers.0.self_attn.q_proj`."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor on the product of a module's two matrices."""
        alpha, rank = float(_matching(self.alpha_pattern, module, self.alpha)), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.root else alpha / rank


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the config in an adapter's folder. Raises ConfigError for what is no plain LoRA adapter."""
    path = folder / CONFIG_NAME
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; that is no adapter's config")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); an adapter's folder needs it") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    _refuse_other_kinds(raw, path)
    try:
        return _read_fields(raw, path)
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(f"{path} has a field that makes no sense: {error}") from error


def _refuse_other_kinds(raw: Mapping[str, Any], path: Path) -> None:
    kind = raw.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{path}: peft_type is {kind!r}; only LORA is served")
    for name, what in _NOT_PLAIN.items():
        if raw.get(name):
            raise ConfigError(f"{path}: the adapter {what}; only plain LoRA and rsLoRA are served")
    if raw.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias is {raw['bias']!r}; only adapters that leave biases alone are served")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{path}: init_lora_weights is {start!r}, which changes the base model; convert it to a plain adapter first"
        )


def _read_fields(raw: Mapping[str, Any], path: Path) -> LoraConfig:
    ranks = {str(name): int(rank) for name, rank in (raw.get("rank_pattern") or {}).items()}
    alphas = {str(name): float(alpha) for name, alpha in (raw.get("alpha_pattern") or {}).items()}
    for pattern in (*ranks, *alphas):
        re.compile(pattern)
    config = LoraConfig(
        rank=int(raw["r"]) if "r" in raw else 0,
        alpha=float(raw.get("lora_alpha", 8)),
        root=bool(raw.get("use_rslora")),
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    if not all(1 <= rank <= MAX_LORA_RANK for rank in (config.rank, *ranks.values())):
        raise ConfigError(f"{path}: ranks (r, rank_pattern) must be from 1 to {MAX_LORA_RANK}")
    if not all(math.isfinite(alpha) for alpha in (config.alpha, *alphas.values())):
        raise ConfigError(f"{path}: lora_alpha and alpha_pattern must be finite numbers")
    return config


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that fits the end of a module's name, as peft looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
