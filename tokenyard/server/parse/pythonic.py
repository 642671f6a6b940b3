"""Calls written as a Python list, `[name(key=value, ...), ...]`: parsed as literals, never executed."""

import ast
import json
from typing import Any

_WORDS = {"true": True, "false": False, "null": None, "none": None}
MAX_CALL_CHARS = 200_000


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call; None for anything but a list of calls with literals."""
    if len(text) > MAX_CALL_CHARS:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        items = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [_call(item) for item in items]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls or None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _literal(keyword.value)
    # A literal may contain a lone surrogate, which UTF-8 cannot encode.
    return _name(node.func), json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace").decode()


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _literal(node: ast.expr) -> Any:
    """The value of a literal, including JSON's true, false and null."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("no literal")


class ListScan:
    """Finds the end of the list, ignoring brackets in strings."""

    def __init__(self) -> None:
        self.depth = 0
        self.quote = ""
        self.escaped = False
        self.done = False

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from `at`; returns the end of the part that belongs to the list, and sets `done` at its end."""
        while at < len(text) and not self.done:
            char = text[at]
            at += 1
            if self.escaped:
                self.escaped = False
            elif self.quote:
                self.escaped = char == "\\"
                if char == self.quote:
                    self.quote = ""
            elif char in "\"'":
                self.quote = char
            elif char in "([{":
                self.depth += 1
            elif char in ")]}":
                self.depth -= 1
                self.done = self.depth <= 0
        return at
