"""Every package that the code imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tokenyard", "tests", "tools", "benchmarks")
OWN_ENVIRONMENTS = ("tests/clients/check_", "tests/e2e/check_pages.py", "benchmarks/peer_")
"""Programs that run in an environment of another project."""

DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
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


def imported(path):
    """Top-level names of the modules that a file imports, with those of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_every_import_is_declared():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    ours = {*FOLDERS, *(path.stem for path in paths if path.parent.name in ("tools", "benchmarks"))}
    known = declared() | UNDECLARED
    missing = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if not name.startswith(OWN_ENVIRONMENTS):
            foreign = set(imported(path)) - ours - set(sys.stdlib_module_names)
            missing += [
                f"{name}: {one}"
                for one in sorted(foreign)
                if DISTRIBUTIONS.get(one, one.replace("_", "-")) not in known
            ]
    assert not missing


def test_a_missing_declaration_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("import os\n\n\ndef read():\n    from undeclared.part import thing\n")
    assert set(imported(path)) - set(sys.stdlib_module_names) - declared() == {"undeclared"}
