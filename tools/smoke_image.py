"""Checks that an image can serve: its build runs this, and `docker run` can where the devices are.

    docker run --rm --gpus all --entrypoint python tokenyard:cuda smoke_image.py

It needs what the image has and nothing else. With a device, the same answer must come from it.
Prints a line for each check; the exit status is 1 if one fails.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import torch

from tokenyard import LLM
from tokenyard.cli.doctor import device

PROMPT, TOKENS = "Once upon a time", 16


def checks() -> Iterator[tuple[str, str]]:
    """Yield what is checked, and why it failed or ""."""
    found = device()
    native = str(found["native_kernels"])
    yield f"native kernels: {native}", native if native.startswith("none") else ""
    yield "the driver, if there is one, serves this torch", str(found["no_cuda"])
    if torch.version.cuda:
        yield f"Triton for CUDA {torch.version.cuda}", why_no_triton(str(found["triton"]))
    expected = answer("cpu")
    yield f"the CPU answers {expected!r}", "" if expected else "with nothing"
    for index in range(len(found["cuda_devices"])):
        text = answer(f"cuda:{index}")
        yield f"cuda:{index} answers {text!r}", "" if text == expected else f"the CPU answers {expected!r}"


def why_no_triton(launcher: str) -> str:
    """Return why Triton could not compile here, "" if it could. launcher: what doctor says."""
    if not launcher.startswith("installed"):
        return launcher
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        return "the package triton is not built for NVIDIA devices"
    return ""


def answer(device: str) -> str:
    """Return what the demo model continues PROMPT with, the same on any device."""
    with LLM(device=device, dtype="float32", max_total_tokens=256, threads=1) as llm:
        return str(llm.generate(PROMPT, {"max_new_tokens": TOKENS, "temperature": 0.0})[0].text)


def main() -> int:
    """Run all checks."""
    failed = 0
    for what, why in checks():
        print(f"{'FAILED' if why else 'ok'}: {what}{f': {why}' if why else ''}", flush=True)
        failed += bool(why)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
