"""The rooms and who may import whom (docs/architecture.md), and what pure rooms must not import at all."""

import ast
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
    "transfer": {"base"},
    "policy": {"base", "cost"},
    "scheduler": {"base", "cache", "cost", "policy"},
    "tape": {"base", "cache", "cost", "policy", "scheduler"},
    "executor": {"base"},
    "executor.mock": {"base", "cost", "executor"},
    "router.choice": {"base", "cost"},
    "router.index": {"base", "cost"},
    "sim": {"base", "cost", "cache", "policy", "scheduler", "tape", "router.choice", "router.index"},
    "engine": {"base", "cost", "policy", "scheduler", "tape", "transfer", "router.choice", "router.index"},
    "router": {"base", "router.choice", "router.index"},
    "server": {"base", "engine"},
    "lang": {"server"},
}
PURE = ("base", "cache", "cost", "policy", "scheduler", "tape", "sim", "router.choice", "router.index")
BANNED = {"torch", "time", "asyncio", "socket", "threading", "multiprocessing", "zmq", "random"}
SIM_MAY = {"time", "multiprocessing"}
NO_ROOM = {"", "__version__", "cli", "config", "__main__", "offline", "bench"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[1:]), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module):
    """The room of a module under tokenyard: the longest entry of the table that fits, else the top folder."""
    parts = module.split(".")
    for length in (2, 1):
        name = ".".join(parts[:length])
        if name in MAY_IMPORT:
            return name
    return parts[0]


def ours(name):
    return name.removeprefix("tokenyard.") if name.startswith("tokenyard.") else None


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_stay_within_the_rooms(module, path):
    home = room(module)
    if home in NO_ROOM or home == "__init__":
        return
    assert home in MAY_IMPORT, f"{module} belongs to no room"
    for name in imports(path):
        target = ours(name)
        if target is None:
            continue
        there = room(target)
        if there != home and there not in NO_ROOM:
            assert there in MAY_IMPORT[home], f"{module} imports {name}"
        assert there not in {"cli", "config", "offline"}, f"{module} imports {name}"


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_pure_rooms_do_no_io(module, path):
    home = room(module)
    if home not in PURE:
        return
    allowed = SIM_MAY if home == "sim" else set()
    found = {name.split(".")[0] for name in imports(path)} & BANNED - allowed
    assert not found, f"{module} imports {found}"


@pytest.mark.parametrize(
    "module", ["tokenyard.sim", "tokenyard.scheduler", "tokenyard.executor.mock", "tokenyard.server"]
)
def test_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
