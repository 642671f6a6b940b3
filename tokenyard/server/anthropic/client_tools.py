"""Schemas of the tools that Anthropic defines and the client runs: their definitions carry a type and no schema."""

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_LINES: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_BASH: dict[str, Any] = {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}}
_EDIT: dict[str, Any] = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": _LINES,
}


def _commands(words: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Parameters of a tool with several commands."""
    command = {"type": "string", "enum": words.split()}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command", *required]}


CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": ("Run commands in a persistent bash session of the user's machine. `restart` starts a new one.", _BASH),
    "text_editor": (
        "View, create and edit files of the user's machine. `view` shows a file or folder, `create` writes `file_text`,"
        " `str_replace` replaces the one occurrence of `old_str` by `new_str`, `insert` puts `insert_text` after"
        " line `insert_line`.",
        _commands("view create str_replace insert", _EDIT, ["path"]),
    ),
    "memory": (
        "Read and write notes below /memories that outlast this conversation.",
        _commands("view create str_replace insert delete rename", {**_EDIT, "old_path": _TEXT, "new_path": _TEXT}, []),
    ),
}
"""Description and parameters by the type of a tool without its date."""
