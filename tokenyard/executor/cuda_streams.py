"""CUDA streams and events: step timing, and copies of inputs and results that overlap with steps."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch


class StepTimer:
    """Measures how long the device works on a step, and waits for the step's results to arrive on the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._seconds = 0.0
        if not self._on_cpu:
            self._begin, self._end, self._arrived = (timing_event() for _ in range(3))
        self._begin_s = 0.0

    def start(self) -> None:
        """Record the begin of the step's work."""
        if self._on_cpu:
            self._begin_s = time.perf_counter()
        else:
            self._begin.record()

    def stop(self) -> None:
        """Record the end of the step's work. On a CPU, several spans of `start` and `stop` add up."""
        if self._on_cpu:
            self._seconds += time.perf_counter() - self._begin_s
        else:
            self._end.record()

    def sent(self) -> None:
        """Record that all copies of the step's results are queued on the current stream, which follows the step."""
        if not self._on_cpu:
            self._arrived.record()

    def wait(self) -> float:
        """Wait until the step's results have arrived; returns the seconds that the device worked."""
        if self._on_cpu:
            return self._seconds
        self._arrived.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0


class HostCopies:
    """Copies results to the host. On CUDA it has its own stream, so that the next step does not wait for the copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = copy_stream(device)

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Queue the work inside on the copy stream, behind all work that is on the current stream now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, valid once the copy stream reaches it; the tensor itself on a CPU."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            # The tensor is freed before the copy is done; its memory must not be given to a later step until then.
            tensor.record_stream(self._stream)
        return host


def uploaded(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of pinned memory on the device; the host waits for nothing.

    On CUDA the copy has its own stream and overlaps with the running step. On the stream of steps it would begin when
    that step ends, and the device would idle meanwhile. Work queued after this call waits for the copy.
    """
    stream = upload_stream(device)
    if stream is None:
        return host.to(device, non_blocking=True)
    with torch.cuda.stream(stream):
        tensor = host.to(device, non_blocking=True)
    steps = current_stream()
    steps.wait_stream(stream)
    # The upload stream owns this memory and must not reuse it before the step is done with it.
    tensor.record_stream(steps)
    return tensor


@functools.cache
def upload_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the device's one stream for copies from the host; None on a CPU."""
    return copy_stream(device)


def timing_event() -> torch.cuda.Event:
    """Make an event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Make a stream for copies; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def current_stream() -> torch.cuda.Stream:
    """Return the stream that the step runs on."""
    return torch.cuda.current_stream()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Send an array to the device without waiting for it; on a CPU the tensor shares the array's memory.

    A copy from memory that is not pinned would wait for all work queued before it.
    """
    if device.type == "cpu":
        return torch.from_numpy(array)
    # The allocator of pinned memory does not hand it out again before the copy is done.
    return uploaded(pinned(array, device), device)


def copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a tensor to the device without waiting for it; the tensor itself on a CPU."""
    return host if device.type == "cpu" else uploaded(host.contiguous().pin_memory(), device)


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on the host, in pinned memory; on a CPU the tensor shares the array's memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory()
