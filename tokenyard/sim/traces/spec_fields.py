"""Reads mappings with named fields: the parts of a workload specification or a configuration."""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from tokenyard.base import ConfigError
from tokenyard.sim.traces.trace_files import read_bytes


def read_document(path: Path) -> Any:
    """What a YAML or JSON file holds. Raises ConfigError, in one line, if it is neither."""
    try:
        return yaml.safe_load(read_bytes(path).decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is not a YAML file: {reason}") from None


def known_fields(value: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """A mapping with no other than the `known` fields. Raises ConfigError for others."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: fields are needed, not {str(value)[:40]!r}")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; {near[0]} may be meant" if near else "; it would change the traffic and is not modelled"
            raise ConfigError(f"{where}: unknown field {str(name)[:40]!r}{hint}")
    return value
