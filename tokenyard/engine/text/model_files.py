"""The JSON files next to a model's weights. Imports no tokenizer library, so that `--help` stays fast."""

import json
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file. Raises ConfigError for anything else in it."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content
