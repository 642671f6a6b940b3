"""`tokenyard doctor`: the machine, the installed packages, and the settings a server with these flags would use."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base import TokenyardError
from tokenyard.base.version import __version__
from tokenyard.cli.flags import Resolved, resolve
from tokenyard.config import Settings
from tokenyard.executor.hf_hub import is_path
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "transformers",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "msgspec",
    "orjson",
    "pyzmq",
)
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")
GIB = 1 << 30


def doctor(namespace: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 1 if a server would not start with these flags."""
    resolved = resolve(vars(namespace))
    report: dict[str, Any] = {
        "machine": machine(),
        "device": device(),
        "packages": packages(),
        "settings": settings_report(resolved),
    }
    problems = find_problems(resolved.settings, report)
    if not problems:
        report["weights"], report["memory"], problems = memory_report(resolved.settings, report)
    report["problems"] = problems
    if namespace.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 1 if problems else 0


def machine() -> dict[str, Any]:
    """Processor, memory and system."""
    shm = Path("/dev/shm")
    return {
        "tokenyard": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_features": sorted(set(CPU_FEATURES) & _cpu_flags()),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "memory_free_gib": round(psutil.virtual_memory().available / GIB, 1),
        "shared_memory_gib": round(shutil.disk_usage(shm).total / GIB, 1) if shm.is_dir() else None,
    }


def _cpu_info() -> str:
    """The text of /proc/cpuinfo, empty if there is no such file."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return match[1] if match else platform.processor() or "unknown"


def _cpu_flags() -> set[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return set(match[1].split()) if match else set()


def device() -> dict[str, Any]:
    """The devices that torch finds, if it is installed."""
    if importlib.util.find_spec("torch") is None:
        return {"torch": None, "would_choose": "mock executor only: torch is not installed"}
    import torch

    from tokenyard.executor.cuda_devices import why_no_cuda

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)})
    return {
        "torch": torch.__version__,
        "cuda_devices": devices,
        "threads": torch.get_num_threads(),
        "kernels": "torch's own" + (f", CPU level {torch.backends.cpu.get_cpu_capability()}" if not devices else ""),
        "native_kernels": native_kernels(),
        "triton": triton_kernels(),
        "no_cuda": why_no_cuda(),
        "would_choose": "cuda" if devices else "cpu",
    }


def triton_kernels() -> str:
    """Whether Triton could build its launcher here, or why not."""
    from tokenyard.executor.attention.triton.available import installed, why_no_launcher

    if not installed():
        return "the package triton is not installed"
    return why_no_launcher() or "installed, and its launcher can be built"


def native_kernels() -> str:
    """The available native CPU kernels and the ones this CPU would use, or why there are none. May build them."""
    try:
        library = load_library()
    except NoLibraryError as error:
        return f"none, steps on the CPU would take up to three times as long: {error}"
    names = ", ".join(LEVELS[level] for level in library.levels())
    packed = library.packed_instructions()
    return f"{library.name}, the best of {names} that this CPU has; packed weights by {packed} ({library.path})"


def packages() -> dict[str, str | None]:
    """Versions of the packages that matter; null for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def settings_report(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """Every setting that is not a default: its value and where it came from. Keys are not shown."""
    public = resolved.settings.public()
    return {name: {"value": public.get(name, "***"), "from": source} for name, source in resolved.sources.items()}


def find_problems(settings: Settings, report: dict[str, Any]) -> list[str]:
    """The reasons why a server would not start, one sentence each."""
    problems = []
    try:
        chosen = settings.effective()
    except TokenyardError as error:
        return [error.message]
    if chosen.executor == "torch" and report["device"]["torch"] is None:
        problems.append("the executor torch needs the package torch: pip install 'tokenyard[torch]'")
    if chosen.executor == "torch" and chosen.device == "auto" and (reason := report["device"].get("no_cuda")):
        problems.append(f"{reason}; or choose the CPU with --device cpu")
    if chosen.device == "cuda" and not report["device"].get("cuda_devices"):
        problems.append("--device is cuda, but torch sees no CUDA device")
    folder = Path(chosen.model_path).expanduser()
    if not folder.exists() and is_path(chosen.model_path):
        problems.append(f"there is no model folder {chosen.model_path!r}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        problems.append(f"there is no config.json in {folder}")
    own_tokenizer = not chosen.skip_tokenizer_init and chosen.tokenizer_path == chosen.model_path
    if own_tokenizer and folder.is_dir() and not (folder / "tokenizer.json").is_file():
        problems.append(f"there is no tokenizer.json in {folder}; give --tokenizer-path or --skip-tokenizer-init")
    return problems


def memory_report(settings: Settings, report: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What multiplies the model's matrices, what it takes of the free memory, and the problem if it does not fit.

    Says nothing where a GPU, several ranks or the mock computes it, or where it is not on this machine.
    """
    chosen = settings.effective()
    here = Path(chosen.model_path).expanduser().exists() and max(chosen.tp_size, chosen.pp_size) == 1
    on_cpu = chosen.device == "cpu" or (chosen.device == "auto" and not report["device"].get("cuda_devices"))
    if chosen.executor != "torch" or chosen.load_format == "dummy" or not here or not on_cpu:
        return "", "", []
    from tokenyard.executor.memory_fit import free_memory
    from tokenyard.executor.model_loader import memory_need

    try:
        (need, formats), free = memory_need(chosen.model_path, **chosen.executor_options()), free_memory()
        need.check(free)
    except TokenyardError as error:
        return "", "", [error.message]
    return formats, need.describe(free), []


def _print_report(report: dict[str, Any]) -> None:
    """The report as tables."""
    console = Console()
    for title in ("machine", "device", "packages"):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in report[title].items():
            table.add_row(name.replace("_", " "), escape(_shown(value)))
        console.print(table)
    table = Table("setting", "value", "from", title="settings that are not defaults", title_justify="left", box=None)
    for name, entry in report["settings"].items():
        table.add_row(name, escape(_shown(entry["value"])), escape(entry["from"]))
    console.print(table if report["settings"] else f"all {len(fields(Settings))} settings are defaults")
    for name in ("weights", "memory"):
        if report.get(name):
            console.print(f"{name}: {escape(report[name])}", soft_wrap=True)
    for problem in report["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}")
    if not report["problems"]:
        console.print("[green]a server would start with these flags[/green]")


def _shown(value: Any) -> str:
    """A value as text for the table."""
    if value is None:
        return "-"
    return ", ".join(str(item) for item in value) or "-" if isinstance(value, list) else str(value)
