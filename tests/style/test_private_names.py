"""Tests read no private name of what they test: no `thing._name`, no import and no patch of one."""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
OF_LIBRARIES = ("os._exit", "torch.ops.aten._to_copy", "func._schema")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(tree):
    """What a module reads, imports or patches that is private to another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls") and ast.unparse(node) not in OF_LIBRARIES:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokenyard"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "delattr")):
            named = [
                one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ][-1:]
            for name in named:
                target = f"{ast.unparse(node.args[0])}.{name}"
                if is_private(name.rpartition(".")[2]) and not target.endswith(OF_LIBRARIES):
                    yield name


def test_tests_read_no_private_names():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        names = private_names(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{path.relative_to(TESTS)}: {name}" for name in names]
    assert not found


def test_private_names_are_found():
    code = """
from tokenyard.base import _hidden
import os

self._own = os._exit
thing.part._field = 1
monkeypatch.setattr(thing, "_method", None)
monkeypatch.setattr("tokenyard.base._constant", None)
monkeypatch.setattr(os, "_exit", None)
thing.__dict__
"""
    assert set(private_names(ast.parse(code))) == {
        "_hidden",
        "thing.part._field",
        "_method",
        "tokenyard.base._constant",
    }
