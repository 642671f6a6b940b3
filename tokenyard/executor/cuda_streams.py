"""The order of work on a device: a step's own, and the ways of inputs and results beside the steps around it."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Measures how long the device works on a step, and tells when what the step sends to the host has arrived."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._seconds = 0.0
        if not self._on_cpu:
            self._begin, self._end, self._arrived = (_timing_event() for _ in range(3))
        self._begin_s = 0.0

    def start(self) -> None:
        """Note the begin of the step's work."""
        if self._on_cpu:
            self._begin_s = time.perf_counter()
        else:
            self._begin.record()

    def stop(self) -> None:
        """Note its end; a CPU may start and stop several times, and the times add up."""
        if self._on_cpu:
            self._seconds += time.perf_counter() - self._begin_s
        else:
            self._end.record()

    def sent(self) -> None:
        """Note that all the step sends to the host is on its way, on the current stream, which follows the step."""
        if not self._on_cpu:
            self._arrived.record()

    def wait(self) -> float:
        """Wait until what the step sent has arrived; returns the seconds the device worked."""
        if self._on_cpu:
            return self._seconds
        self._arrived.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0


class HostCopies:
    """The way of results to the host. On CUDA it is a stream of its own, so that the next step does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _copy_stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Queue what is done within on the stream of copies, behind all that is on the current stream by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(_current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host that is there once the queue has come so far; the tensor itself on a CPU."""
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

    On CUDA the copy goes on a stream of its own, beside the step that runs: on the stream of steps it would begin when
    that step has ended, and the device would are stalled meanwhile. What is queued from now on comes behind the copy.
    """
    stream = _upload_stream(device)
    if stream is None:
        return host.to(device, non_blocking=True)
    with torch.cuda.stream(stream):
        tensor = host.to(device, non_blocking=True)
    steps = _current_stream()
    steps.wait_stream(stream)
    # Its memory belongs to the stream of uploads, which must not use it again before the step has done with it.
    tensor.record_stream(steps)
    return tensor


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream | None:
    return _copy_stream(device) if device.type == "cuda" else None


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _current_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()
