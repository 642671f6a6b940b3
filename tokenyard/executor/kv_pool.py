"""The tensors that hold keys and values, indexed by slot."""

import ctypes
import logging
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenyard.base import ConfigError, ExecutorInfo, Int32Array, KvPieces, WindowGroup
from tokenyard.executor.models.config import ModelConfig

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14
CPU_DEFAULT_TOKENS = 32768
CPU_DEFAULT_BYTES = 1 << 30
MIN_WINDOW_TOKENS, MIN_WINDOW_PAGES = 128, 8
"""What the pool of the window layers holds at least in addition to two windows, for chunked prefill."""


KV_BYTES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Types of keys and values of one byte, by their names in --kv-cache-dtype."""
SCALE_BYTES = 4
"""Of the float32 that the bytes of a head of a token are multiplied by; it lies behind them."""


class KvPool:
    """Keys and values of all tokens in the cache: [layer, 2, slot, kv head, head_dim]; of latents, which are both, 1.

    Where dtype is one of KV_BYTES, the last dimension is of head_dim + SCALE_BYTES uint8.

    slot = page * page_size + offset. Page 0 is padding: padded positions read and write it, requests never own it.
    windows: the separate pool of the layers with a sliding window, if they have pages of their own, or another
    shape. Layers are counted within their pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        windows: WindowGroup | None = None,
        layers: Sequence[int] | None = None,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """windows: the group of the layers with a window, if these have a separate pool.
        layers: which layers the pool holds, of one shape; None for all with KV that are not in a separate pool.
        memory: allocates the pool, uint8[bytes]; None for torch's allocator.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows: KvPool | None = None
        self._two_shapes = layers is None and config.two_kv_shapes
        if windows is not None or self._two_shapes:
            local = window_layers(config)
            local_pages = num_pages if windows is None else windows.num_pages
            self.windows = KvPool(config, local_pages, page_size, device, dtype, layers=local)
            layers = [layer for layer in config.kv_layers if layer not in local]
        layers = config.kv_layers if layers is None else layers
        self.kind = dtype if dtype.itemsize == 1 else None
        """The type of the numbers of a pool of bytes, None where they are stored as they are."""
        slots = (num_pages + 1) * page_size
        kv_shape = config.kv_shape(layers[0]) if layers else (config.num_kv_heads, config.head_dim)
        shape = (len(layers), config.kv_planes, slots, *kv_shape)
        self.head_dim = shape[-1]
        if dtype.itemsize == 1:
            shape, dtype = (*shape[:-1], shape[-1] + SCALE_BYTES), torch.uint8
        # Zeros, because a masked slot counts as 0 * value, which must never be 0 * NaN.
        if memory is None:
            self.tensor = _zeros(shape, device, dtype)
        else:
            self.tensor = memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape).zero_()
        self._layers = [(layer[0], layer[-1]) for layer in self.tensor]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer, each [slot, kv head, head_dim]."""
        return self._layers[index]

    def give_back(self) -> None:
        """Give the memory back until it is written again. No page may be in use."""
        give_back_pages(self.tensor)
        if self.windows is not None:
            self.windows.give_back()

    @property
    def num_pieces(self) -> int:
        """Pieces of memory that a page consists of."""
        return self.tensor.shape[0] * self.tensor.shape[1]

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Return where the KV of pages lies: a piece per layer for keys and one for values, in that order, or one for
        latents.

        Raises ConfigError where layers with a window have a separate pool, which does not hold all tokens.
        """
        if self._two_shapes:
            raise ConfigError(
                "KV of layers of two shapes (Gemma 4) cannot be moved; start without --disaggregation-mode and "
                "--enable-hierarchical-cache"
            )
        if self.windows is not None:
            raise ConfigError("KV of layers with a window cannot be moved; set --swa-full-tokens-ratio 0")
        page_bytes = self.page_size * self.tensor.stride(2) * self.tensor.itemsize
        planes = np.arange(self.num_pieces) * (self.tensor.stride(1) * self.tensor.itemsize)
        begin = self.tensor.data_ptr() + planes
        return KvPieces(begin + pages.astype(np.int64)[:, None] * page_bytes, page_bytes, str(self.tensor.device))


def make_pool(
    config: ModelConfig,
    info: ExecutorInfo,
    device: torch.device,
    dtype: torch.dtype,
    memory: Callable[[int], torch.Tensor] | None = None,
) -> KvPool:
    """Make the pool of an executor; see KvPool. Raises ConfigError where the memory does not suffice."""
    try:
        return KvPool(config, info.num_pages, info.page_size, device, dtype, info.windows, memory=memory)
    except (RuntimeError, OSError, OverflowError) as error:  # on a GPU an OutOfMemoryError; the last two are mmap's
        tokens = info.num_pages * info.page_size
        raise ConfigError(
            f"a KV pool of {tokens} tokens takes {tokens * info.kv_bytes_per_token / 2**30:.1f} GiB, more than {device}"
            " has free; lower max_total_tokens or mem_fraction_static"
        ) from error


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on Linux memory that is zero before it is written, so that a large pool takes no time at the start."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or not nbytes:
        return torch.zeros(shape, device=device, dtype=dtype)
    lazy = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(lazy, dtype=torch.uint8).view(dtype).view(shape)
    advise_huge_pages(made)
    return made


def give_back_pages(tensor: torch.Tensor) -> None:
    """Give the memory of a tensor on a CPU back to Linux; its address stays, and its numbers become 0. Does nothing
    elsewhere.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and tensor.device.type == "cpu" and end > begin:
        libc, place, size = ctypes.CDLL(None), ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        # The first is for memory that other processes map too, where the second gives nothing back.
        if libc.madvise(place, size, ctypes.c_int(mmap.MADV_REMOVE)):
            libc.madvise(place, size, ctypes.c_int(mmap.MADV_DONTNEED))


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux for huge pages under a tensor that nothing was written to yet; does nothing elsewhere.

    The slots of a row lie anywhere in the pool: with pages of 4 KiB nearly each of them costs a walk of page tables.
    """
    if sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin < end:
        # The result is ignored: without huge pages the pool works too, only slower.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(MADV_HUGEPAGE))


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the pool, over all layers. dtype: of the pool, see KvPool."""
    scales = SCALE_BYTES if dtype.itemsize == 1 else 0
    shapes = [config.kv_shape(layer) for layer in config.kv_layers]
    return sum(config.kv_planes * heads * (dim * dtype.itemsize + scales) for heads, dim in shapes)


def window_layers(config: ModelConfig) -> list[int]:
    """The layers that have a window, and keys and values of their own."""
    return [layer for layer in config.kv_layers if config.windows[layer]]


def choose_swa_pool(config: ModelConfig, num_pages: int, page_size: int, ratio: float) -> WindowGroup | None:
    """Return the group of the layers with a window for a pool of `num_pages`, None where all layers keep all tokens.

    ratio: pages of the group per page of the pool (SGLang's swa_full_tokens_ratio), 0 for no group. A model with
    windows of several sizes has one group with the largest of them. A group that would need as many pages as the pool
    is not made.
    """
    window = max(config.windows)
    if not ratio or not window:
        return None
    least = -(-(2 * window + MIN_WINDOW_TOKENS) // page_size) + MIN_WINDOW_PAGES
    pages = max(int(ratio * num_pages), least)
    if pages >= num_pages:
        return None
    local = len(window_layers(config))
    logger.info(
        "KV pool: %d tokens in %d layers, %d in the %d layers with a window of %d",
        *(num_pages * page_size, len(config.kv_layers) - local, pages * page_size, local, window),
    )
    return WindowGroup(window, pages)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The device memory of recurrent states.

    fixed_bytes: what they take however large the KV pool is. ratio: what checkpoints take per byte of the KV pool.
    """

    fixed_bytes: int
    ratio: float


def choose_num_pages(
    config: ModelConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_total_tokens: int | None,
    mem_fraction_static: float,
    sharing: int = 1,
    window_ratio: float = 0.0,
    draft_bytes_per_token: int = 0,
    states: StateBytes | None = None,
    reserved_bytes: int = 0,
) -> int:
    """Return how many usable pages the pool gets.

    `max_total_tokens` decides where given. Else a CUDA device gives what is free now, with the weights loaded, less
    the share `1 - mem_fraction_static` of all its memory, which is left to others, and less `reserved_bytes`, which
    steps, graphs and page tables take (vLLM's rule; see device_memory.py); a CPU gives a modest fixed amount. Of
    either, `sharing` processes on the same device get equal parts. window_ratio: the layers with a window keep only
    this part of the tokens, 0 for all. draft_bytes_per_token: of a pool with as many pages, such as the draft
    model's. states: the memory of recurrent states, None for a model without.

    Raises ConfigError if not even one page fits.
    """
    per_token = kv_bytes_per_token(config, dtype)
    if window_ratio and any(config.windows):
        local = dtype.itemsize * sum(config.kv_values(layer) for layer in window_layers(config))
        per_token = max(per_token - local + int(local * window_ratio), 1)
    per_token += draft_bytes_per_token
    if max_total_tokens is None:
        fixed, ratio = (states.fixed_bytes, states.ratio) if states is not None else (0, 0.0)
        max_total_tokens = _default_tokens(
            int(per_token * (1 + ratio)), device, mem_fraction_static, sharing, fixed + reserved_bytes
        )
    num_pages = max_total_tokens // page_size
    if num_pages < 1:
        raise ConfigError(
            f"the KV pool would hold {max_total_tokens} tokens, less than one page of {page_size};"
            " raise max_total_tokens or mem_fraction_static"
            + ("" if states is None else ", or lower max_running_requests, each of which has a recurrent state")
        )
    return num_pages


def default_cpu_tokens(per_token: int, sharing: int = 1) -> int:
    """Return how many tokens of so many bytes a pool on a CPU gets where no setting says it."""
    return min(CPU_DEFAULT_TOKENS, CPU_DEFAULT_BYTES // per_token) // sharing


def _default_tokens(
    per_token: int, device: torch.device, mem_fraction_static: float, sharing: int, taken: int = 0
) -> int:
    """`taken`: bytes of the device that are not for the pool. A CPU gives them as they are used, out of the rest."""
    if device.type == "cuda":
        if not 0.0 < mem_fraction_static <= 1.0:
            raise ConfigError(f"mem_fraction_static is {mem_fraction_static}; it must be above 0 and at most 1")
        # Memory that loading left in torch's allocator counts as used until it is released.
        torch.cuda.empty_cache()
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        if sharing > 1:
            # Other ranks may not have loaded yet, so take a share of the total, not of what is free.
            own = all_bytes * mem_fraction_static / sharing - torch.cuda.memory_reserved(device)
            return max(0, int(min(own, free_bytes)) - taken) // per_token
        return max(0, int(free_bytes - all_bytes * (1.0 - mem_fraction_static)) - taken) // per_token
    tokens = default_cpu_tokens(per_token, sharing)
    logger.info(
        "KV pool: %d tokens (%.0f MiB), the default on a CPU; set max_total_tokens to change it",
        tokens,
        tokens * per_token / 2**20,
    )
    return tokens
