"""Attention by the kernels of the package flashinfer, straight over the page table (Ye et al. 2025, arXiv 2501.01005).

Arguments are those of flashinfer-python 0.7.2.post1, and 0.6.18 has the same. The package itself has never been run
with this code: the tests replace it by a module with the same signatures.
"""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.attention.backend import AttentionSpec, FusedKvWriteAttention, KvSlots
from tokenyard.executor.cuda_streams import pinned
from tokenyard.executor.forward_batch import ForwardBatch, PageTable, upload
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.models.config import ModelConfig

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 128 << 20
"""What the package recommends."""
CAPTURED_PLAN_BYTES = 8 << 20
"""Of a wrapper's plan, as in the package."""
PLANS = 2
"""Plans that are kept: a step is planned while the one before still runs by its own."""
CUDA_CORE_GROUPS = (1, 2)
"""Query heads per key-value head for which decodes do without tensor cores, which waste most of a tile then."""


def why_not(device: torch.device, dtype: torch.dtype, config: ModelConfig) -> str:
    """Return why flashinfer cannot serve a model, "" if it can."""
    if device.type != "cuda":
        return f"flashinfer needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed (pip install 'tokenyard[flashinfer]')"
    if importlib.util.find_spec("flashinfer_jit_cache") is None and not _can_compile():
        return (
            "flashinfer compiles its kernels as it first uses them, and finds no nvcc or no C++ compiler (install the"
            " CUDA toolkit and g++, or set CUDA_HOME, or install flashinfer-jit-cache, which has them compiled)"
        )
    if config.latent is not None:
        return "it is not used for latent attention"
    others = [size for _, size in map(config.kv_shape, config.kv_layers) if size not in HEAD_DIMS]
    if others:
        return f"flashinfer takes heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {others[0]}"
    if dtype not in DTYPES:
        return f"flashinfer takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if config.sinks:
        return "its kernels that choose by themselves know no attention sinks, which this model has"
    return ""


def _can_compile() -> bool:
    """Whether the package finds what it compiles with. Its package flashinfer-cubin has kernels that are not used."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").is_file()
    return nvcc and any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "c++"))


@dataclass(slots=True)
class _Plan:
    """The wrappers of a step.

    decode, extend: by window.
    taken: recorded when the device has read the plan, None on a CPU and before the first plan of a captured step.
    """

    decode: dict[int, Any]
    extend: dict[int, Any]
    taken: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What the captured steps of one window read, on the device.

    indptr, last, pages: see _Keys.
    plan: how the package divides the work.
    """

    indptr: torch.Tensor
    last: torch.Tensor
    pages: torch.Tensor
    plan: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Keys:
    """Which pages rows read.

    indptr: int32 on the host, where the pages of each row begin.
    pages: int32 on the device.
    last: int32 on the host, how many tokens the last page of each row has.
    """

    indptr: torch.Tensor
    pages: torch.Tensor
    last: torch.Tensor


class FlashInferAttention(FusedKvWriteAttention):
    """A FusedKvWriteAttention by flashinfer: decodes by its decode wrapper, all other rows by that of prompts on a
    prefix.

    A step is planned on the host once for each size of window. A captured step has wrappers of its own, whose plans
    lie where the graph reads them (the package's `use_cuda_graph`), and is planned before each replay.
    """

    def __init__(self, pool: KvPool, pages: PageTable, spec: AttentionSpec, heads: int) -> None:
        # Imported here, because it compiles and loads much, and is not installed everywhere.
        import flashinfer

        self._pool, self._pages, self._spec, self._heads = pool, pages, spec, heads
        self._kv_heads, self._head_dim = pool.tensor.shape[3:]
        device = pool.tensor.device
        # Zeros, as the decode wrapper requires. Launches of one stream run in order, so all may share it.
        workspace = self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        cores = heads // self._kv_heads not in CUDA_CORE_GROUPS

        decode = partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper, workspace, "NHD", use_tensor_cores=cores)
        extend = partial(flashinfer.BatchPrefillWithPagedKVCacheWrapper, workspace, "NHD")

        self._decode = decode
        windows = self._windows = tuple(dict.fromkeys(spec.windows))
        self.plans = [
            _Plan({window: decode() for window in windows}, {window: extend() for window in windows}, self._event())
            for _ in range(PLANS)
        ]
        self.current = self.plans[0]
        self._captured: dict[int, _Plan] = {}
        self._buffers: dict[int, _Buffers] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan the step for each window, unless it is captured; see AttentionBackend."""
        if batch.captured:
            self.current = self._captured[batch.captured]
            return
        self.plans.append(self.plans.pop(0))
        plan = self.current = self.plans[-1]
        if plan.taken is not None:
            # A plan is copied from its wrapper's pinned memory, which the next plan overwrites: wait for that copy.
            plan.taken.synchronize()
        decodes, firsts = batch.decode_rows, np.cumsum(batch.counts) - batch.counts
        for window in plan.decode:
            options = self._options(window)
            if decodes:
                keys = self._keys(batch, firsts, slice(0, decodes), window)
                plan.decode[window].plan(keys.indptr, keys.pages, keys.last, *self._shape(), **options)
            if decodes < len(firsts):
                keys = self._keys(batch, firsts, slice(decodes, None), window)
                queries = self._host(_offsets(batch.counts[decodes:]))
                plan.extend[window].plan(
                    *(queries, keys.indptr, keys.pages, keys.last), *self._shape(), causal=True, **options
                )
        if plan.taken is not None:
            plan.taken.record()

    def plan_captured(self, batch: ForwardBatch, size: int) -> None:
        """Plan a captured step for each window; see PlansCapturedSteps."""
        if size not in self._captured:
            self._captured[size] = _Plan({window: self._wrapper(window, size) for window in self._windows}, {}, None)
        plan, rows = self._captured[size], len(batch.counts)
        if plan.taken is not None:
            plan.taken.synchronize()
        for window, wrapper in plan.decode.items():
            keys = self._keys(batch, np.arange(rows), slice(0, rows), window, size - rows)
            wrapper.plan(keys.indptr, keys.pages, keys.last, *self._shape(), **self._options(window))
        plan.taken = plan.taken or self._event()
        if plan.taken is not None:
            plan.taken.record()

    def _wrapper(self, window: int, size: int) -> Any:
        """Return a decode wrapper of a captured step: steps of all sizes share buffers, as each is planned anew."""
        if window not in self._buffers:
            rows, device = len(self._pages.tensor), self._pool.tensor.device
            self._buffers[window] = _Buffers(
                torch.zeros(rows + 1, dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
                torch.zeros(self._pages.tensor.numel(), dtype=torch.int32, device=device),
                torch.zeros(CAPTURED_PLAN_BYTES, dtype=torch.uint8, device=device),
            )
        own = self._buffers[window]
        wrapper = self._decode(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=own.indptr[: size + 1],
            paged_kv_indices_buffer=own.pages,
            paged_kv_last_page_len_buffer=own.last[:size],
        )
        # Each wrapper would have 8 MiB of the device otherwise.
        wrapper.reset_workspace_buffer(self._workspace, own.plan)
        return wrapper

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._pool.tensor.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def place(self, layer: int, batch: ForwardBatch) -> KvSlots:
        """Return where a layer's keys and values of a batch go; see FusedKvWriteAttention."""
        return KvSlots(batch.slots, *self._pool.layer(layer))

    def attend(self, layer: int, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend with keys and values that are in the pool; see FusedKvWriteAttention."""
        q, decodes, plan, window = q.contiguous(), batch.decode_rows, self.current, self._spec.windows[layer]
        shape = (-1, self._pages.page_size, self._kv_heads, self._head_dim)
        keys, values = (side.view(shape) for side in self._pool.layer(layer))
        out = torch.empty_like(q)
        if decodes:
            plan.decode[window].run(q[:decodes], (keys, values), out=out[:decodes])
        if decodes < len(q):
            plan.extend[window].run(q[decodes:], (keys, values), out=out[decodes:])
        return out.flatten(1)

    def _shape(self) -> tuple[int, int, int, int]:
        return self._heads, self._kv_heads, self._head_dim, self._pages.page_size

    def _options(self, window: int) -> dict[str, Any]:
        dtype = self._pool.tensor.dtype
        # flashinfer's window does not count the token itself, and -1 means none.
        return {
            "window_left": window - 1,
            "logits_soft_cap": self._spec.softcap or None,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": self._spec.scale,
        }

    def _keys(
        self, batch: ForwardBatch, firsts: npt.NDArray[np.int64], rows: slice, window: int, padding: int = 0
    ) -> _Keys:
        """Return the pages that some rows read, from the first that the window of their first query reaches.

        padding: further rows, each of which reads a token of page 0.
        """
        page_size, device = self._pages.page_size, batch.positions.device
        starts, ends = batch.starts[rows], (batch.starts + batch.counts)[rows]
        first_page = np.maximum(starts - (window - 1), 0) // page_size if window else np.zeros_like(starts)
        counts = -(-ends // page_size) - first_page
        indptr = _offsets(counts)
        columns = upload((firsts[rows], counts, first_page - indptr[:-1]), device)
        total = int(indptr[-1])
        # The size is given, as the host would wait for it.
        row = torch.repeat_interleave(columns[1], output_size=total)
        column = torch.arange(total, device=device) + columns[2][row]
        pages = self._pages.tensor[batch.pool_rows[columns[0]][row], column]
        last = (ends - 1) % page_size + 1
        if padding:
            indptr, last = _offsets(np.pad(counts, (0, padding), constant_values=1)), np.pad(last, (0, padding))
            last[-padding:] = 1
            pages = torch.nn.functional.pad(pages, (0, padding))
        return _Keys(self._host(indptr), pages, self._host(last))

    def _host(self, column: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return numbers as int32 on the host, in pinned memory if the device is a GPU."""
        return pinned(column.astype(np.int32), self._pool.tensor.device)


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where each of some runs begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts)))
