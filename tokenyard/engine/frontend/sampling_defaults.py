"""What a request gets that leaves a sampling field out: the model's own values, or those of the OpenAI API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError, InvalidRequestError, SamplingParams
from tokenyard.engine.text.model_files import read_json

SAMPLING_DEFAULTS = ("model", "openai")
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What is taken from `generation_config.json`; a length limit of the model's authors is no matter of sampling."""


def read_sampling_defaults(model_path: str, kind: str) -> dict[str, float | int]:
    """Defaults for a model folder, by the field names of `SamplingParams`.

    `kind` "model" reads `generation_config.json`; without that file, and for "openai", only the defaults of
    `SamplingParams` apply. Raises ConfigError for a file that cannot be read or holds values that cannot be used.
    """
    file = Path(model_path) / "generation_config.json"
    if kind == "openai":
        return {}
    return _checked(read_json(file), f"{file} (--sampling-defaults openai leaves it aside)")


def _checked(content: Mapping[str, Any], where: str) -> dict[str, float | int]:
    """The fields that a model sets; Transformers writes null for "not set" and top_k 0 for "all"."""
    found = {name: content[name] for name in GENERATION_FIELDS if content.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{where}: {name} is {value!r}; it must be a {'whole ' if whole else ''}number")
    if found.get("top_k") == 0:
        found["top_k"] = -1
    try:
        SamplingParams(**found).validate()
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    return found
