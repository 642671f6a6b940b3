"""Which device computes, and whether this build of torch can use it."""

import os
from pathlib import Path

import torch

from tokenyard.base import ConfigError

MIN_CAPABILITY = (8, 0)
"""Older devices have no bfloat16 in their tensor cores, and the kernels' tiles do not fit their registers."""

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DRIVER_NODE = Path("/dev/nvidiactl")


def choose_device(name: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" (the same as cuda:0) or "cuda:N" into a device that is there.

    Raises ConfigError if there is no such device, and for "auto" where a driver is loaded that torch cannot use: the
    CPU would be some hundred times slower than expected.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        if reason := why_no_cuda():
            raise ConfigError(f"{reason}; or choose the CPU with --device cpu")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    device = torch.device("cuda", device.index or 0)
    if not torch.cuda.is_available() or device.index >= torch.cuda.device_count():
        reason = why_no_cuda() or f"torch sees {torch.cuda.device_count()} CUDA devices"
        raise ConfigError(f"device {name!r} is not there; {reason}")
    return device


def why_no_cuda() -> str:
    """Return why torch sees no CUDA device although a driver is loaded, "" where that is no mistake.

    It is none where torch is built for CPUs only, where CUDA_VISIBLE_DEVICES hides all devices, and in a container
    that was given no device: such a container still shows the host's driver in /proc.
    """
    if torch.cuda.is_available() or not torch.version.cuda:
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "none", "NoDevFiles"):
        return ""
    if not (DRIVER_VERSION.exists() and DRIVER_NODE.exists()):
        return ""
    version = _driver_version(DRIVER_VERSION.read_text(encoding="utf-8", errors="replace"))
    return (
        f"an NVIDIA driver ({version}) is loaded, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, "
        "sees no device: CUDA 13 needs driver 580 or newer; update the driver or install a torch for an older CUDA"
    )


def _driver_version(text: str) -> str:
    """The version in the text of /proc/driver/nvidia/version, whose first line has it before the date of the build."""
    words = text.split("\n", 1)[0].split()
    numbers = [word for word in words if word.replace(".", "").isdigit() and "." in word]
    return numbers[0] if numbers else "of unknown version"


def use_device(device: torch.device) -> None:
    """Make a device the current one of the calling thread; call it first on each thread that launches work.

    A thread begins with device 0. Triton launches on the current device, and events, graphs and pinned memory belong to
    it, whatever device the tensors are on.
    """
    if device.type != "cpu":
        torch.cuda.set_device(device)


def prepare_cuda(device: torch.device) -> None:
    """Set what torch keeps per process: the current device, and how products and attention are computed.

    Raises ConfigError for a device below MIN_CAPABILITY, and for one of AMD, which torch calls a CUDA device too.
    """
    if torch.version.hip:
        raise ConfigError(
            f"torch {torch.__version__} is built for ROCm, and nothing of Tokenyard was written or tried for AMD's "
            "GPUs: take --device cpu, or install a torch for CUDA where there is an NVIDIA device"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{device} ({name}) has compute capability {capability[0]}.{capability[1]}; Tokenyard needs 8.0 or newer "
            "(Ampere): choose another device, or --device cpu"
        )
    use_device(device)
    # Images of some vendors turn TF32 on, which keeps 10 of the 23 bits of a float32.
    torch.set_float32_matmul_precision("highest")
    # cuDNN builds a new graph for every number of keys, and a decode has one more key at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
