"""Whether the Triton kernels can serve, found out without importing triton."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

MAX_HEAD_DIM = 256
_PROBE = "#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"
_PROBE_TIMEOUT_S = 30


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter: on any device, slowly, for tests (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on")


def why_not(device: torch.device, head_dim: int) -> str:
    """Return why the kernels cannot serve, "" if they can."""
    if device.type != "cuda" and not interpreted():
        return f"Triton kernels need a CUDA device, not {device.type}"
    if not installed():
        return "the package triton is not installed (pip install triton)"
    if head_dim > MAX_HEAD_DIM:
        return f"Triton kernels take heads of at most {MAX_HEAD_DIM} dimensions, not {head_dim}"
    return "" if interpreted() else why_no_launcher()


@functools.cache
def why_no_launcher() -> str:
    """Return why Triton cannot build its launcher, "" if it can.

    Triton compiles a small C extension at the first launch, with the compiler of CC, or gcc or clang, and with the
    headers of this Python. The probe compiles one like it.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        return "Triton needs a C compiler at the first launch, and there is none (apt install gcc libc6-dev)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(_PROBE, encoding="utf-8")
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_PROBE_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()
            return (
                f"Triton's launcher cannot be built: {compiler} failed ({said[0] if said else 'without a message'}); "
                "install a C compiler and the headers of this Python (apt install gcc libc6-dev python3-dev)"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"Triton's launcher cannot be built: {compiler} does not run ({error})"
    return ""
