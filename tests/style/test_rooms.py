"""What each room may import (docs/architecture.md), and what pure rooms must not import at all."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tokenyard"

BANNED = {"torch", "time", "asyncio", "socket", "threading", "multiprocessing", "zmq", "random"}
SIM_MAY = {"time", "multiprocessing"}
EVERY_ROOM_ABOVE = "every room above"


def read_table(page):
    """The table of rooms in docs/architecture.md: what each may import, and which are pure."""
    may_import, pure = {}, set()
    for line in page.split("## What may import what")[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        name, allowed = cells[0].strip("`"), set(re.findall(r"`([\w.]+)`", cells[2]))
        may_import[name] = set(may_import) if cells[2] == EVERY_ROOM_ABOVE else allowed
        pure |= {name} if cells[3] == "yes" else set()
    return may_import, pure


MAY_IMPORT, PURE = read_table((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
PACKAGE_ITSELF = {"__main__": {"cli"}, "__init__": set()}


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


def test_the_table_names_the_folders_of_the_package():
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(MAY_IMPORT)
    assert {name for name in MAY_IMPORT if not (PACKAGE / name.replace(".", "/")).is_dir()} == {
        *("executor.mock", "kv_store.machine", "multi_model.residency", "progress", "wiring", "local")
    }
    assert {"base", "scheduler", "sim", "routing"} <= PURE


def test_imports_stay_within_the_rooms():
    table, wrong = MAY_IMPORT | PACKAGE_ITSELF, []
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
    left = {name: set(allowed) for name, allowed in (MAY_IMPORT | PACKAGE_ITSELF).items()}
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
