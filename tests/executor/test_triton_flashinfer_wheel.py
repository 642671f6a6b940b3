"""The stand-in's signatures, and with them every call of the package, against the syntax tree of the real wheel.

The wheel is read and not installed: `make test-triton` downloads it, or FLASHINFER_WHEEL says where it is.
"""

import ast
import inspect
import os
import zipfile
from pathlib import Path

import pytest

from tests.executor import fake_flashinfer

WHEELS = Path(".venv-triton", "wheels").glob("flashinfer_python-*.whl")
WHEEL = os.environ.get("FLASHINFER_WHEEL") or str(next(WHEELS, ""))
DECODE, EXTEND = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"

pytestmark = pytest.mark.skipif(not WHEEL, reason="the wheel of flashinfer is not there; make test-triton downloads it")


def methods(module, name):
    """The methods of a class in the wheel by name, the last of several definitions."""
    with zipfile.ZipFile(WHEEL) as wheel:
        tree = ast.parse(wheel.read(f"flashinfer/{module}.py"))
    [found] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(node):
    """Names and defaults, None for none, of the parameters of a method: in order, and those that need their name."""
    args = node.args
    places = [each.arg for each in (*args.posonlyargs, *args.args)]
    defaults = [None] * (len(places) - len(args.defaults)) + [ast.literal_eval(each) for each in args.defaults]
    by_name = zip((each.arg for each in args.kwonlyargs), args.kw_defaults, strict=True)
    return list(zip(places, defaults, strict=True)), {
        name: None if default is None else ast.literal_eval(default) for name, default in by_name
    }


@pytest.mark.parametrize(
    ("module", "name", "method", "real"),
    [
        ("decode", DECODE, "__init__", "__init__"),
        ("decode", DECODE, "reset_workspace_buffer", "reset_workspace_buffer"),
        # `plan` hands what follows the size of a page, by name, to this one.
        ("decode", DECODE, "plan", "_plan_impl"),
        ("decode", DECODE, "run", "run"),
        ("prefill", EXTEND, "__init__", "__init__"),
        ("prefill", EXTEND, "plan", "plan"),
        ("prefill", EXTEND, "run", "run"),
    ],
)
def test_the_stand_in_has_the_wheels_signatures(module, name, method, real):
    places, by_name = parameters(methods(module, name)[real])
    for place, parameter in enumerate(
        inspect.signature(getattr(getattr(fake_flashinfer, name), method)).parameters.values()
    ):
        default = None if parameter.default is parameter.empty else parameter.default
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert places[place] == (parameter.name, default)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            assert by_name[parameter.name] == default


def test_compiled_kernels_come_from_the_package_that_is_looked_for():
    with zipfile.ZipFile(WHEEL) as wheel:
        source = wheel.read("flashinfer/jit/env.py").decode()
    assert 'find_spec("flashinfer_jit_cache")' in source
