"""What each room may import (docs/architecture.md), and what pure rooms must not import at all."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tokenyard"

MAY_IMPORT = {
    "base": set(),
    "cache": {"base"},
    "cost": {"base"},
    "transfer": {"base", "transfer.protocol"},
    "policy": {"base", "cost"},
    "scheduler": {"base", "cache", "cost", "policy"},
    "tape": {"base", "cache", "cost", "policy", "scheduler"},
    "executor": {"base"},
    "executor.mock": {"base", "cost", "executor"},
    "router.load": {"base"},
    "router.choice": {"base", "router.load"},
    "router.index": {"base", "cost"},
    "router.queue": set(),
    "router.balance": {"base", "policy", "router.load", "router.choice", "router.index"},
    "router": {"base", "cost", "policy", "router.load", "router.choice", "router.index", "router.queue", "ui"},
    "sim": {
        *("base", "cache", "cost", "policy", "scheduler", "tape"),
        *("transfer.protocol", "router.load", "router.choice", "router.index", "router.queue", "router.balance", "ui"),
    },
    "transfer.protocol": {"base"},
    "engine": {
        *("base", "cost", "policy", "scheduler", "tape", "transfer", "transfer.protocol"),
        *("router.load", "router.choice", "router.index", "router.balance"),
    },
    "ui": set(),
    "server": {"base", "engine", "ui"},
    "lang": set(),
    "on_ray": {"base", "engine", "router.load", "router.choice", "sim"},
    "bench": {"base", "sim", "ui"},
}
PURE = (
    *("base", "cache", "cost", "policy", "scheduler", "tape", "sim"),
    *("router.load", "router.choice", "router.index", "router.queue", "router.balance", "transfer.protocol"),
)
BANNED = {"torch", "time", "asyncio", "socket", "threading", "multiprocessing", "zmq", "random"}
SIM_MAY = {"time", "multiprocessing"}
WIRING = {
    "config": {*MAY_IMPORT},
    "wiring": {*MAY_IMPORT, "config"},
    "offline": {*MAY_IMPORT, "config", "wiring"},
    "local": {*MAY_IMPORT, "config", "wiring", "offline"},
    "cli": {*MAY_IMPORT, "config", "wiring", "offline", "local"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""What wires the rooms together. Each imports only what stands above it here, and no room imports any of them."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[1:]), path


def nodes_at_import(tree):
    """The nodes that run on import: all but the bodies of functions and what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes_at_import(node)


def names(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def trees():
    """Every module, with what it consists of."""
    return [(module, ast.parse(path.read_text())) for module, path in modules()]


def room(module):
    """The room of a module under tokenyard: the longest entry of the tables that fits, else the top folder."""
    parts = module.split(".")
    two = ".".join(parts[:2])
    return two if two in MAY_IMPORT else parts[0]


@functools.cache
def ours(name):
    """The part of an imported name after `tokenyard`, "__init__" for the package itself; None for other packages."""
    package, _, rest = name.partition(".")
    if package != "tokenyard":
        return None
    is_module = (PACKAGE / rest.split(".")[0]).is_dir() or (PACKAGE / (rest.split(".")[0] + ".py")).is_file()
    return rest if rest and is_module else "__init__"


def test_imports_stay_within_the_rooms():
    table, wrong = MAY_IMPORT | WIRING, []
    for module, tree in trees():
        home = room(module)
        assert home in table, f"{module} belongs to no room"
        for name in names(nodes_at_import(tree) if home == "__init__" else ast.walk(tree)):
            there = None if ours(name) is None else room(ours(name))
            if there not in {None, home} | table[home]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_the_package_itself_imports_no_room():
    code = "import sys, tokenyard; print(*(name for name in sys.modules if name.startswith('tokenyard')))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == ["tokenyard"]


def test_no_room_imports_another_in_a_circle():
    left = {name: set(allowed) for name, allowed in (MAY_IMPORT | WIRING).items()}
    while free := {name for name, allowed in left.items() if not allowed & left.keys()}:
        left = {name: allowed for name, allowed in left.items() if name not in free}
    assert not left


def test_pure_rooms_do_no_io():
    wrong = []
    for module, tree in trees():
        allowed = SIM_MAY if room(module) == "sim" else set()
        if room(module) in PURE:
            found = {name.split(".")[0] for name in names(ast.walk(tree))} & BANNED - allowed
            wrong += [f"{module} imports {name}" for name in found]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    ["tokenyard.sim", "tokenyard.scheduler", "tokenyard.executor.mock", "tokenyard.server", "tokenyard.router.process"],
)
def test_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
