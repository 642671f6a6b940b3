"""Messages as clients send them, made into what chat templates expect (the conventions of HF transformers)."""

import json
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, nodes

Message = dict[str, Any]

SYSTEM_ROLES = ("system", "developer")
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The form in which a template expects messages.

    parts: content that is a list of parts stays a list, instead of their joined text.
    null_content: a message that only calls tools has content null, instead of "".
    json_arguments: arguments of a call are JSON text, instead of an object.
    """

    parts: bool = False
    null_content: bool = False
    json_arguments: bool = False


def template_features(environment: Environment, source: str) -> TemplateFeatures:
    """What a template wants, read off its source: whether it loops over content, asks whether content is none, and
    joins arguments to strings without a filter such as tojson. Raises jinja2.TemplateSyntaxError.
    """
    tree = environment.parse(source)
    names = _names_of_content(tree)
    joined = (_field(side) for total in tree.find_all(nodes.Add) for side in (total.left, total.right))
    filtered = (_field(step.node) for step in tree.find_all(nodes.Filter))
    return TemplateFeatures(
        parts=any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)),
        null_content=any(test.name == "none" and _is_content(test.node, names) for test in tree.find_all(nodes.Test)),
        json_arguments="arguments" in joined and "arguments" not in filtered,
    )


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables that a template sets to a message's content, and never to its tool calls, as some of Mistral's do."""
    fields: dict[str, set[str | None]] = {}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            fields.setdefault(assignment.target.name, set()).add(_field(_unfiltered(assignment.node)))
    return {name for name, found in fields.items() if "content" in found and "tool_calls" not in found}


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, perhaps filtered, or one of `names` that alias it."""
    node = _unfiltered(node)
    return _field(node) == "content" or (isinstance(node, nodes.Name) and node.name in names)


def _unfiltered(node: nodes.Node) -> nodes.Node:
    """An expression without the filters that it goes through."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _field(node: nodes.Node | None) -> str | None:
    """The field that an expression takes from a message or the like, in any of Jinja's ways; None for other ones."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem):
        return _word(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        return _word(node.args[0])
    return None


def _word(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def normalize_messages(messages: list[Message], wants: TemplateFeatures) -> list[Message]:
    """Copies of `messages` in the form that a template wants.

    Other fields that are null are left out, and reasoning is given under each of its names.
    """
    return [_ready_message(message, wants) for message in messages]


def alternating(messages: list[Message]) -> list[Message]:
    """The messages as turns of user and assistant, which is all that many templates accept: text of the system within
    the conversation becomes the user's, and messages of the user that follow each other become one.
    """
    turns: list[Message] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role in SYSTEM_ROLES and turns:
            if len(turns) == 1 and turns[0].get("role") in SYSTEM_ROLES:
                turns[0] = {**turns[0], "content": _joined(turns[0].get("content"), content)}
                continue
            message = {"role": "user", "content": f"<system>\n{_text(content)}\n</system>"}
        if message.get("role") == "user" and turns and turns[-1].get("role") == "user":
            turns[-1] = {**turns[-1], "content": _joined(turns[-1].get("content"), message.get("content"))}
        else:
            turns.append(message)
    return turns


def _joined(first: Any, second: Any) -> str:
    return f"{_text(first)}\n\n{_text(second)}"


def _text(content: Any) -> str:
    """Content as one text; parts are joined by line breaks."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def _ready_message(message: Message, wants: TemplateFeatures) -> Message:
    ready = {name: value for name, value in message.items() if value is not None}
    if isinstance(ready.get("tool_calls"), list):
        ready["tool_calls"] = [_ready_call(call, wants) for call in ready["tool_calls"]]
    if "content" not in ready:
        ready["content"] = None if wants.null_content and ready.get("tool_calls") else ""
    elif isinstance(ready["content"], list) and not wants.parts:
        ready["content"] = _text(ready["content"])
    reasoning = next((ready[name] for name in REASONING_NAMES if name in ready), None)
    return ready if reasoning is None else {"thinking": reasoning, **ready, "reasoning_content": reasoning}


def _ready_call(call: Any, wants: TemplateFeatures) -> Any:
    """A tool call with arguments in the expected form; clients should send JSON text, some send objects."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str) and not wants.json_arguments:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    elif isinstance(arguments, dict) and wants.json_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
