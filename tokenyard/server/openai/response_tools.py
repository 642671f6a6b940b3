"""Tools of the Responses API as functions of the model, and calls of the model as items of the API.

`custom` tools become functions with one argument, `input`; functions of a `namespace` get its name in front. Tools
that OpenAI's servers run are left out, with a warning.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import InvalidRequestError
from tokenyard.server.parse.argument_types import loads_lenient

Item = dict[str, Any]
SEPARATOR = "__"
"""Between a namespace and the name of its function."""


@dataclass(slots=True)
class ResponseTools:
    """The tools of one request.

    functions: in the form of chat completions.
    custom: names of the functions that are custom tools.
    namespaces: (namespace, name) by the name of the function.
    warnings: what is left out.
    """

    functions: list[Item] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def choice(self, choice: str | Item | None) -> str | Item | None:
        """tool_choice in the form of chat completions. Raises InvalidRequestError for a tool that is not run here."""
        if choice == "required" and not self.functions:
            raise InvalidRequestError(self._nothing_to_call(), param="tool_choice")
        if not isinstance(choice, dict):
            return choice if self.functions else None
        match choice:
            case {"type": "function" | "custom", "name": str(name)}:
                return {"type": "function", "function": {"name": _joined(choice.get("namespace"), name)}}
            case {"type": "allowed_tools", "tools": list(tools)}:
                names = [_joined(tool.get("namespace"), tool.get("name")) for tool in tools if isinstance(tool, dict)]
                allowed = [{"type": "function", "function": {"name": name}} for name in names]
                return {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": allowed},
                }
            case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
                raise InvalidRequestError(f"tool_choice: this server runs no {kind!r}", param="tool_choice")
        return choice

    def _nothing_to_call(self) -> str:
        return "; ".join(["tool_choice asks for a call, but there are no tools that the client runs", *self.warnings])

    def begun(self, item_id: str, call_id: str, name: str) -> Item:
        """The item of a call that begins; `item_id` has the prefix of its kind."""
        if name in self.custom:
            return {"type": "custom_tool_call", "id": f"ctc_{item_id}", "call_id": call_id, "name": name, "input": ""}
        namespace, own = self.namespaces.get(name, ("", name))
        item = {"type": "function_call", "id": f"fc_{item_id}", "call_id": call_id, "name": own, "arguments": ""}
        return {**item, "namespace": namespace} if namespace else item


def read_tools(tools: list[Item] | None) -> ResponseTools:
    """The tools of a request. Raises InvalidRequestError for `mcp`, and for one without a type or a name."""
    found = ResponseTools()
    for place, tool in enumerate(tools or ()):
        _add(found, tool, f"tools[{place}]")
    return found


def _add(found: ResponseTools, tool: Item, where: str, namespace: str = "") -> None:
    kind = tool.get("type")
    if kind == "namespace":
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise InvalidRequestError(f"{where}: a namespace needs a name and tools", param="tools")
        for place, one in enumerate(inner):
            _add(found, one if isinstance(one, dict) else {}, f"{where}.tools[{place}]", name)
    elif kind == "mcp":
        message = f"{where}: this server connects to no MCP server; connect it in the client, which sends its tools"
        raise InvalidRequestError(message, param="tools", code="unsupported")
    elif kind in ("function", "custom"):
        name = _joined(namespace, tool.get("name"))
        function = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key)}
        if kind == "custom":
            found.custom.add(name)
            function = _custom(tool)
        elif namespace:
            found.namespaces[name] = (namespace, str(tool.get("name")))
        found.functions.append({"type": "function", "function": {"name": name, **function}})
    else:
        found.warnings.append(f"{where} is left out: this server runs no {kind!r}")


def _custom(tool: Item) -> Item:
    """The function for a custom tool. The grammar of its text, if it has one, is told in the description."""
    form = tool.get("format")
    text = tool.get("description") or ""
    if isinstance(form, Mapping) and form.get("definition"):
        text = f"{text}\n\n`input` keeps to this {form.get('syntax', '')} grammar:\n{form['definition']}".strip()
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"description": text, "parameters": parameters}


def _joined(namespace: Any, name: Any) -> str:
    """The name of a function for the model."""
    return f"{namespace}{SEPARATOR}{name or ''}" if namespace else str(name or "")


def input_of(arguments: str) -> str:
    """The text of a custom tool's call, from its arguments; what a cut answer left of them is taken as it is."""
    try:
        value = loads_lenient(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def call_of(item: Item) -> Item:
    """A call of the conversation in the form of chat completions."""
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        name = item.get("name")
    else:
        arguments, name = item.get("arguments") or "{}", _joined(item.get("namespace"), item.get("name"))
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
