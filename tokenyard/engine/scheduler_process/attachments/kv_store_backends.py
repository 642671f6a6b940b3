"""Opens the stores that the settings name, and the KV pool to copy from and to."""

import logging

import numpy as np

from tokenyard.base import BlockPool, ConfigError, DeviceExecutor, Executor, StateSlots
from tokenyard.base.blocks import tokens_per_block
from tokenyard.engine.processes.engine_config import EngineConfig, KvStoreConfig
from tokenyard.engine.scheduler_process.attachments.disagg import weights_digest
from tokenyard.kv_layout.layout import PoolView, StateView, map_pages
from tokenyard.kv_store.layered import LayeredStore
from tokenyard.kv_store.remote import RemoteStore
from tokenyard.kv_store.slab import SlabStore
from tokenyard.kv_store.store import BlockFormat, BlockStore, MemoryStore

logger = logging.getLogger(__name__)

GB = 10**9
STAGING_BYTES = 1 << 28
"""Host memory in front of a shared store, where what it sends waits for its pages."""
LINKS = {"disk": "disk", "valkey": "network", "none": "host"}
"""The link of each backend (`CostModel.copy`)."""


def open_pool(executor: Executor) -> BlockPool:
    """The KV pool of an executor, to copy from and to. Raises ConfigError where that cannot be."""
    if executor.pieces(np.arange(3, dtype=np.int32)).device == "cpu":
        return PoolView(map_pages(executor.pieces), executor.info.num_pages)
    if isinstance(executor, DeviceExecutor):
        return executor.device_blocks()
    raise ConfigError("--enable-hierarchical-cache: the KV of this executor cannot be copied to host memory")


def open_states(executor: Executor) -> StateSlots | None:
    """The recurrent states of an executor, to copy from and to; None for a model without."""
    if executor.info.states is None:
        return None
    if executor.state_pieces(np.zeros(1, np.int32)).device != "cpu":
        assert isinstance(executor, DeviceExecutor)
        return executor.device_states()
    return StateView(map_pages(executor.state_pieces))


def blocks_of_states(states: StateSlots | None, block_bytes: int) -> int:
    """How many blocks of a store the recurrent states of one prefix take; 0 for a model without."""
    return 0 if states is None else max(1, -(-states.slot_bytes // max(block_bytes, 1)))


def open_store(
    config: EngineConfig, executor: Executor, pool: BlockPool, rank: int, states: StateSlots | None = None
) -> BlockStore:
    """The stores that the settings ask for, with the one in host memory in front.

    Raises ConfigError for a folder or an address that cannot be used, for a shared store of recurrent states, and if
    the settings leave no store.
    """
    kv_store, info = config.kv_store, executor.info
    tokens, found = tokens_per_block(info.page_size), executor.pieces(np.arange(1, dtype=np.int32))
    form = BlockFormat(
        model=weights_digest(config, info),
        dtype=info.dtype,
        block_tokens=tokens,
        pieces=found.addresses.shape[1],
        block_bytes=tokens // info.page_size * pool.page_bytes,
        state_bytes=0 if states is None else states.slot_bytes,
    )
    host = _host_blocks(kv_store, form, info.num_pages * pool.page_bytes, on_device=found.device != "cpu")
    if kv_store.backend == "disk":
        folder = kv_store.folder if not rank else f"{kv_store.folder}/rank-{rank}"
        lower: BlockStore = SlabStore(folder, form, round(kv_store.max_gb * GB), round(kv_store.min_free_gb * GB))
        logger.info("KV store %s: %d blocks of %d tokens found", folder, lower.blocks, tokens)
    elif kv_store.backend == "valkey" and states is not None:
        raise ConfigError(
            "--hicache-storage-backend valkey does not take models with recurrent states, as an engine does not know"
            " which prefixes have one there; choose disk"
        )
    elif kv_store.backend == "valkey":
        lower = RemoteStore(kv_store.url, form)
        host = max(host, STAGING_BYTES // max(form.block_bytes, 1))
    elif host:
        return MemoryStore(host)
    else:
        raise ConfigError(
            "--enable-hierarchical-cache: on a CPU the KV pool is in host memory already; give"
            " --hicache-storage-backend disk, or raise --max-total-tokens"
        )
    return LayeredStore(MemoryStore(host), lower, form.block_bytes) if host else lower


def _host_blocks(kv_store: KvStoreConfig, form: BlockFormat, pool_bytes: int, *, on_device: bool) -> int:
    """How many blocks the host memory store holds. Raises ConfigError for a size of less than one."""
    if not on_device:
        if kv_store.host_gb or kv_store.host_ratio is not None:
            logger.warning(
                "--hicache-ratio and --hicache-size have no effect on a CPU: its KV pool is in host memory already"
            )
        return 0
    ratio = 2.0 if kv_store.host_ratio is None else kv_store.host_ratio
    blocks = int((kv_store.host_gb * GB or ratio * pool_bytes) // max(form.block_bytes, 1))
    if blocks < 1:
        raise ConfigError(f"--hicache-size is less than one block of KV, {form.block_bytes} bytes")
    return blocks
