"""Every package that the code imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tokenyard", "tests", "tools", "benchmarks")
OWN_ENVIRONMENTS = ("tests/clients/check_", "tests/e2e/check_pages.py", "benchmarks/peer_")
"""Programs that run in an environment of another project."""

DISTRIBUTIONS = {
    "envoy": "xds-protos",
    "flashinfer": "flashinfer-python",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "jwt": "pyjwt",
    "opentelemetry": "opentelemetry-sdk",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Names of distributions that differ from the module's."""

UNDECLARED = {"triton"}
"""Comes with torch on Linux; `make test-triton` installs it elsewhere."""


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.match(r"[\w-]+", entry)[0].lower().replace("_", "-") for entries in lists for entry in entries}


IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^#\n]+))", re.M)


def perhaps_imported(text):
    """What `imported` may find in a text, by its lines: strings that look like imports count as well."""
    for first, names in IMPORT.findall(text):
        yield from [first] if first else re.findall(r"(?:^|,)[ \t]*(\w+)", names)


def imported(text):
    """Top-level names of the modules that a text imports, with those of functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_every_import_is_declared():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    ours = {*FOLDERS, *(path.stem for path in paths if path.parent.name in ("tools", "benchmarks"))}
    known = declared() | UNDECLARED
    ours |= sys.stdlib_module_names

    def is_missing(name):
        return name not in ours and DISTRIBUTIONS.get(name, name.replace("_", "-")) not in known

    missing = []
    for path in paths:
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        # Parsing all files takes seconds.
        if not name.startswith(OWN_ENVIRONMENTS) and any(map(is_missing, perhaps_imported(text))):
            missing += [f"{name}: {one}" for one in sorted(set(imported(text))) if is_missing(one)]
    assert not missing


@pytest.mark.parametrize("find", [imported, perhaps_imported])
def test_a_missing_declaration_is_found(find):
    text = "import os, other.part as it\n\n\ndef read():\n    from undeclared.part import thing\n"
    assert set(find(text)) - sys.stdlib_module_names == {"other", "undeclared"}
