"""How Ollama's API writes what is known of a model. Shared by the server and the front of several models."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tokenyard.base.model_facts import ModelFacts
from tokenyard.server.parse.output_style import OutputStyle

NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays loaded."""


def time_text(at_s: float | None) -> str:
    """A Unix time in the form of the API; `NEVER` for None."""
    return NEVER if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def list_entry(name: str, facts: ModelFacts) -> dict[str, Any]:
    """A model in `/api/tags`."""
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(facts.modified_s),
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": details(facts),
    }


def loaded_entry(
    name: str, facts: ModelFacts, *, size: int, context_length: int, expires_s: float | None
) -> dict[str, Any]:
    """A model in `/api/ps`. size: bytes of memory, none of which is a GPU's. expires_s: Unix time, None for never."""
    entry = list_entry(name, facts)
    del entry["modified_at"]
    return entry | {
        "size": size,
        "size_vram": 0,
        "context_length": context_length,
        "expires_at": time_text(expires_s),
    }


def details(facts: ModelFacts) -> dict[str, Any]:
    """Format and kind of a model."""
    return {
        "parent_model": "",
        "format": facts.container,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": parameter_size(facts.parameters),
        "quantization_level": facts.quantization,
    }


def capabilities(style: OutputStyle) -> list[str]:
    """What a model can do, by how it writes."""
    thinks = style.form is not None and style.form.thinks is not None
    return ["completion", *(["tools"] if style.knows_tools else []), *(["thinking"] if thinks else [])]


def parameter_size(parameters: int) -> str:
    """A number of parameters as Ollama writes it, such as 8.0B; "" for 0."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return str(parameters or "")


def shown(facts: ModelFacts, *, template: str, context_length: int, capabilities: Sequence[str]) -> dict[str, Any]:
    """A model in `/api/show`."""
    family = facts.family or "tokenyard"
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": details(facts),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": facts.parameters,
            f"{family}.context_length": context_length,
        },
        "capabilities": list(capabilities),
        "modified_at": time_text(facts.modified_s),
    }
