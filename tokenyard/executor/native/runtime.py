"""What native backends share: the threads, the kernels, and the description of a step for the library."""

import ctypes
import logging
import os
from pathlib import Path

import torch

from tokenyard.executor.forward_batch import ForwardBatch, PageTable
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.native.library import BF16, FLOAT32, LEVELS, Library, NativeStep

logger = logging.getLogger(__name__)

DTYPES = {torch.bfloat16: BF16, torch.float32: FLOAT32}
MAX_HEAD_DIM = 256
MAX_THREADS = 256
NO_SUCH_TOKEN = 2


class NativeRuntime:
    """The library with its threads. Backends that share a runtime must not run at the same time."""

    def __init__(self, library: Library, threads: int, level: int | None = None) -> None:
        self.library = library
        self.functions = library.functions
        self.level = library.level if level is None else level
        self.threads = threads
        self.name = LEVELS[self.level]
        cores = pinned_cores(threads)
        self.pool = self.functions.ty_pool_new(threads, int32s(cores) if cores else None)

    def another(self) -> "NativeRuntime":
        """Return the same kernels with threads of their own, for work at the same time."""
        return NativeRuntime(self.library, self.threads, self.level)

    def __del__(self) -> None:
        # A constructor that failed has no pool.
        if getattr(self, "pool", None):
            self.functions.ty_pool_free(self.pool)

    def active_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of activations between products, for weights of `dtype`."""
        return torch.bfloat16 if self.functions.ty_active_is_bf16(self.level, DTYPES[dtype]) else torch.float32


def choose_threads(wanted: int) -> int:
    """Return how many threads compute: `wanted` if not 0, else OMP_NUM_THREADS, else the cores this process may use.

    Never more than MAX_THREADS, and by OMP_NUM_THREADS never more than the cores. What is ignored is said once.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    if wanted:
        if wanted > cores:
            logger.warning("%d threads share %d cores, which makes steps slower than %d threads", wanted, cores, cores)
        return min(wanted, MAX_THREADS)
    if given.isdecimal() and int(given):
        if int(given) > cores:
            logger.warning(
                "OMP_NUM_THREADS is %s; the %d cores that this process may use get a thread each", given, cores
            )
        return min(int(given), cores, MAX_THREADS)
    if given:
        logger.warning("OMP_NUM_THREADS is %r, which is no number of threads; it is ignored", given)
    return max(1, min(cores, _granted_cores(), MAX_THREADS))


def pinned_cores(threads: int) -> tuple[int, ...]:
    """Return the core that each of `threads` threads is to stay on, () to leave that to the system.

    Threads are pinned where OMP_PROC_BIND or OMP_PLACES asks for it and each can have its own core. By default
    they are not: on a machine with other work a pinned thread waits for its core although another one is free.
    """
    bound = os.environ.get("OMP_PROC_BIND", "true" if os.environ.get("OMP_PLACES") else "false").lower()
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[:threads]) if bound not in ("false", "") and threads <= len(cores) else ()


def _granted_cores() -> int:
    """Whole cores that the control group grants, at least 1; a large number where it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 20


def why_not(dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
    """Return in one line why the native kernels cannot serve such a model, "" if they can."""
    if device.type != "cpu":
        return f"native kernels are for the CPU, not {device}"
    if dtype not in DTYPES:
        return f"native kernels compute in bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return f"native kernels take heads of up to {MAX_HEAD_DIM} dimensions; this model's have {head_dim}"
    if head_dim % 2:
        return f"native kernels take heads of an even number of dimensions; this model's have {head_dim}"
    return ""


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's numbers, which must lie one after the other."""
    if not tensor.is_contiguous():
        raise ValueError("the library takes contiguous tensors")
    return tensor.data_ptr()


def describe_step(
    batch: ForwardBatch, pool: KvPool, pages: PageTable, logits: torch.Tensor | None, *, fixed_order: bool = False
) -> NativeStep:
    """Return a batch as the library wants it; it holds addresses only, so the batch must outlive it.

    fixed_order: a query's attention is summed in the same order, whatever else its row computes.
    """
    return NativeStep(
        tokens=len(batch.token_ids),
        rows=len(batch.counts),
        logit_count=0 if logits is None else len(logits),
        token_ids=address(batch.token_ids),
        positions=address(batch.positions),
        slots=address(batch.slots),
        pool_rows=address(batch.pool_rows),
        starts=batch.starts.ctypes.data,
        counts=batch.counts.ctypes.data,
        logit_tokens=address(batch.logit_tokens),
        page_table=address(pages.tensor),
        page_table_stride=pages.tensor.stride(0),
        page_size=pages.page_size,
        fixed_order=fixed_order,
        logits=None if logits is None else address(logits),
        kv=address(pool.tensor),
        plane_bytes=pool.tensor.stride(1) * pool.tensor.itemsize,
    )


def check(failed: int) -> None:
    """Raise MemoryError where a call of the library ran out of memory, and IndexError where a token id is no token."""
    if failed == NO_SUCH_TOKEN:
        raise IndexError("the plan has a token id that is not in the model's vocabulary")
    if failed:
        raise MemoryError("the native kernels found no memory for their working space")


def int32s(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32]:
    """Return numbers as a C array."""
    return (ctypes.c_int32 * len(values))(*values)
