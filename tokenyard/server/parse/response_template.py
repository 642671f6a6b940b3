"""Formats from a checkpoint's `response_template` (in tokenizer_config.json, as transformers reads it).

A template lists fields (content, thinking, tool_calls) with the markers that open and close each. Templates whose
markers are literals and whose calls are JSON become a format. For others the chat template decides.
"""

import re
from collections.abc import Mapping
from typing import Any

from tokenyard.server.parse.format import OutputFormat, Region, ToolCallShape

REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
NAME, ARGUMENTS = "{content.name}", ("{content.arguments}", "{content.parameters}")


def format_of(template: Any) -> OutputFormat | None:
    """The format that a response_template describes, None if a format cannot express it."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        return None
    edges: dict[str, str] = {}
    regions: dict[str, Region] = {}
    thinks: tuple[str, str] | None = None
    shape: ToolCallShape | None = None
    for name, entry in fields.items():
        if not isinstance(entry, Mapping):
            return None
        opening, closing = _literals(entry, "open"), _literals(entry, "close")
        if name == "content" and not (opening or closing):
            continue
        if not opening or closing is None:
            return None
        if name in REASONING_FIELDS and entry.get("content", "text") == "text" and closing:
            regions["reasoning"] = Region("reasoning", dict.fromkeys(closing, "start"))
            edges |= dict.fromkeys(opening, "reasoning")
            thinks = (opening[0], closing[0])
        elif (
            name == "tool_calls"
            and entry.get("content") == "json"
            and not entry.get("content_args")
            and _plain_calls(entry.get("transform"))
        ):
            regions["call"] = Region("objects", dict.fromkeys(closing, "content"))
            edges |= dict.fromkeys(opening, "call")
            shape = ToolCallShape(
                opening[0] + '{"name": "', '", "arguments": ', "}" + (closing or [""])[0], between="\n"
            )
        else:
            return None
    if not edges or _overlap(edges):
        return None
    calls = {marker: target for marker, target in edges.items() if target == "call"}
    regions |= {"start": Region("start", edges), "content": Region("content", calls)}
    opened = ((_ends_with(thinks[0]), "reasoning"),) if thinks is not None else ()
    return OutputFormat("checkpoint", regions, opened=opened, shape=shape, thinks=thinks)


def _literals(entry: Mapping[str, Any], name: str) -> list[str] | None:
    """The literal markers of a field, [] for none, None if they are patterns."""
    if f"{name}_pattern" in entry:
        return None
    value = entry.get(name, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        return None
    # White space around markers is not part of them: the parser strips it from the enclosed text.
    return [stripped for item in values if (stripped := item.strip())]


def _plain_calls(transform: Any) -> bool:
    """Whether calls are plain JSON objects with a name and arguments (or parameters)."""
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if function in (None, "{content}"):
        return True
    if not isinstance(function, Mapping):
        return False
    return function.get("name") == NAME and function.get("arguments") in ARGUMENTS


def _overlap(markers: Mapping[str, str]) -> bool:
    """Whether a marker is a prefix of another."""
    return any(one != other and other.startswith(one) for one in markers for other in markers)


def _ends_with(marker: str) -> str:
    return re.escape(marker) + r"\s*$"
