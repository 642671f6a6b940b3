"""Messages as clients send them, made into what chat templates expect (the conventions of HF transformers)."""

import json
from typing import Any

from jinja2 import Environment, nodes

Message = dict[str, Any]

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def takes_parts(environment: Environment, source: str) -> bool:
    """Whether a template loops over the parts of a message's content, and so wants it as a list where it is one.

    Most templates write content out as a string. Raises jinja2.TemplateSyntaxError.
    """
    tree = environment.parse(source)
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, set()):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps filtered, or one of `names` that stand for it."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return _is_word(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        return node.node.attr == "get" and bool(node.args) and _is_word(node.args[0])
    return isinstance(node, nodes.Name) and node.name in names


def _is_word(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value == "content"


def ready_messages(messages: list[Message], *, parts: bool) -> list[Message]:
    """Copies of `messages` for a template; with `parts`, content that is a list of text parts stays one.

    Fields that are null are left out, reasoning is given under each of its names, and the arguments of tool calls,
    which clients send as JSON text, become objects.
    """
    ready = []
    for message in messages:
        kept = {name: value for name, value in message.items() if value is not None}
        if isinstance(kept.get("content"), list) and not parts:
            kept["content"] = "\n".join(part["text"] for part in kept["content"] if "text" in part)
        if isinstance(kept.get("tool_calls"), list):
            kept["tool_calls"] = [_ready_call(call) for call in kept["tool_calls"]]
        reasoning = next((kept[name] for name in REASONING_NAMES if name in kept), None)
        ready.append(kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning})
    return ready


def _ready_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
