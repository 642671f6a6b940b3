"""Whether the Triton kernels can serve, found out without importing triton."""

import importlib.util
import os

import torch

MAX_HEAD_DIM = 256


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
    return ""
