"""Launches of Triton kernels where there is no GPU: a driver that is pretended, the compiler and ptxas that are real.

A launch specialises its kernel exactly as on a device, because Triton's own launcher binds the arguments; only the
binary is not started. Kernels must not be in interpreter mode.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tokenyard.executor.attention.triton.available import installed, interpreted

SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block can have, by compute capability (CUDA programming guide, table of capabilities)."""
NAMES = {90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}


def need_compiler():
    """Skip the module that calls this where Triton cannot compile."""
    if not installed() or interpreted():
        reason = "Triton's interpreter is on" if installed() else "the package triton is not installed"
        pytest.skip(f"{reason}; make test-triton runs these", allow_module_level=True)


class Binary(NamedTuple):
    """A compiled kernel: its name, bytes of shared memory, registers and spilled bytes of a thread, and its PTX."""

    name: str
    shared: int
    registers: int
    spills: int
    ptx: str


class _Driver:
    """What Triton asks a driver for before it compiles. Its devices are numbered by compute capability."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_device(self):
        return self._capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


class Launches:
    """What was launched.

    keys: the specialisations of each kernel, in order of their first launch.
    binaries: the compiled ones.
    """

    def __init__(self):
        self.keys = {}
        self.binaries = []


@contextmanager
def pretended_launches(capability=90, *, compiled=False):
    """Within, launches start nothing; yields what was launched. compiled: whether to compile each specialisation."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found, run = Launches(), JITFunction.run

    def launch(kernel, *args, grid, warmup=False, **options):
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__.strip('_')}"
        made = run(kernel, *args, grid=grid, warmup=True, **options) if compiled else None
        key = made.hash if compiled else _key(kernel, args, options)
        keys = found.keys.setdefault(name, {})
        if key not in keys:
            keys[key] = None
            if compiled:
                found.binaries.append(_binary(name, made, capability))

    # Left in place afterwards: there is no driver to go back to.
    driver.set_active(_Driver(capability))
    JITFunction.run = launch
    try:
        yield found
    finally:
        JITFunction.run = run


def _key(kernel, args, options):
    """What decides whether a launch compiles anew."""
    from triton import knobs

    options = {**options, "debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    _, specialization, others = _binder(kernel)(*args, **options)
    return str((specialization, sorted(others.items(), key=str)))


def _binder(kernel):
    from triton.runtime.driver import driver

    return kernel.device_caches[driver.active.get_current_device()][-1]


def _binary(name, made, capability):
    ptx = made.asm["ptx"]
    registers, spills = _ptxas(ptx, capability)
    return Binary(name, made.metadata.shared, registers, spills, ptx)


def _ptxas(ptx, capability):
    """Registers and spilled bytes, as ptxas reports them. Triton has several, each for some devices."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool, arch = get_ptxas(capability), NAMES.get(capability, f"sm_{capability}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={arch}", str(source), "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    text = said.stdout + said.stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))


def columns(count, length):
    """Columns of one upload, int64[count, length]: only the first one is aligned."""
    return torch.zeros(count, length + length % 2 + 1, dtype=torch.int64)[:, :length].unbind()
