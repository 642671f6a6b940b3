"""The interfaces between rooms, as protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tokenyard.base.errors import ConfigError
from tokenyard.base.request import Int32Array, Int64Array, UInt8Array
from tokenyard.base.step_plan import StepPlan, StepResult, StepWork


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Sliding-window layers whose KV is in a separate pool.

    window: tokens that a token attends to, itself included.
    num_pages: usable pages of that pool, with ids from 1 on; page 0 is padding.
    """

    window: int
    num_pages: int


MAX_STATE_SAVES = 16
"""Checkpoints of prompts that a step saves at most where they are in pages of the KV pool: the executor keeps so many
states until it has copied them there. Those of answers are copied from the working states.
"""

MIN_CHECKPOINTS = 8
"""Of recurrent states, so that a small KV pool caches anything at all."""


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers with a recurrent state instead of KV (Mamba, gated delta net).

    The executor keeps a working state for each pool row, and `num_slots` checkpoints after them.

    num_slots: checkpoints, which the scheduler numbers from 1 on and the executor from `max_pool_rows` on.
    slot_bytes: device memory of one checkpoint, over all layers; 0 for unknown.
    track_interval: a decoding row saves its state every so many tokens (SGLang's `mamba_track_interval`).
    slot_pages: pages of the KV pool whose memory a checkpoint takes; 0 where checkpoints have memory of their own.
    """

    num_slots: int
    slot_bytes: int = 0
    track_interval: int = 256
    slot_pages: int = 0

    @classmethod
    def fitting(
        cls, slot_bytes: int, kv_bytes: int, pool_rows: int, *, max_slots: int | None, ratio: float, track_interval: int
    ) -> "StateGroup":
        """The group where one slot takes `slot_bytes`.

        max_slots: all slots, working ones of the `pool_rows` rows among them (SGLang's max_mamba_cache_size); None for
        checkpoints of `ratio` times the `kv_bytes` of the KV pool (SGLang's mamba_full_memory_ratio) and no fewer than
        MIN_CHECKPOINTS. Without a ratio there are none.
        """
        if track_interval < 1:
            raise ConfigError(f"mamba_track_interval is {track_interval}; it must be at least 1")
        if max_slots is not None and max_slots < pool_rows:
            raise ConfigError(
                f"max_mamba_cache_size is {max_slots}; {pool_rows} running requests need a slot each, so raise it or "
                "lower max_running_requests"
            )
        if not ratio:
            checkpoints = 0
        elif max_slots is not None:
            checkpoints = max_slots - pool_rows
        else:
            checkpoints = max(int(ratio * kv_bytes / slot_bytes), MIN_CHECKPOINTS)
        return cls(checkpoints, slot_bytes, track_interval)

    @classmethod
    def sharing(cls, slot_bytes: int, page_bytes: int, num_pages: int, track_interval: int) -> "StateGroup | None":
        """The group whose checkpoints take pages of the KV pool; None if that has room for too few of them."""
        slot_pages = -(-slot_bytes // page_bytes)
        slots = num_pages // slot_pages
        return cls(slots, slot_bytes, track_interval, slot_pages) if slots >= MIN_CHECKPOINTS else None


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the rest of the system needs to know of a loaded model.

    page_size: tokens of a page.
    num_pages: usable pages, with ids from 1 to `num_pages`; page 0 is padding and never allocated.
    max_pool_rows: rows of the page table.
    kernels: what computes the steps, for logs.
    adapter_bytes: device memory of one LoRA adapter; 0 if none are served.
    windows: the layers that keep KV for their window only; None if all layers keep KV of all tokens.
    states: the layers that keep a recurrent state; None if there are none.
    """

    model: str
    device: str
    dtype: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    max_pool_rows: int
    kv_bytes_per_token: int = 0
    kernels: str = ""
    adapter_bytes: int = 0
    windows: WindowGroup | None = None
    states: StateGroup | None = None


@dataclass(frozen=True, slots=True)
class KvPieces:
    """The addresses of the KV of some pages.

    The pieces of a page are always in the same order, so they can be copied to those of another page or executor.

    addresses: int64[pages, pieces], in memory of `device`.
    nbytes: bytes of each piece.
    """

    addresses: Int64Array
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where new weights are.

    folder: a checkpoint; "" for the one in use.
    files: safetensors files with tensors that replace those of the checkpoint and of earlier updates, the latest last.
    received: whether tensors that were received since the last update replace them as well.
    draft_folder: a checkpoint of the draft model; "" for the one in use.
    """

    folder: str = ""
    files: tuple[str, ...] = ()
    received: bool = False
    draft_folder: str = ""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group of processes in which a trainer, its rank 0, broadcasts weights.

    address, port: where the trainer's store listens.
    rank_offset: the rank in the group of the engine's first process; the others follow it.
    dp_rank: the data-parallel rank that joins, with all processes that its model is divided among.
    size: of the group.
    backend: gloo or nccl.
    """

    name: str
    address: str
    port: int
    rank_offset: int
    dp_rank: int
    size: int
    backend: str


class Executor(Protocol):
    """Runs plans. Plans are launched in order and collected in the same order; several may be in flight."""

    info: ExecutorInfo

    def launch(self, plan: StepPlan) -> Any:
        """Start a step and return its ticket without waiting for the device."""

    def sample(self, ticket: Any) -> None:
        """Sample a step that was launched with `delay_sampling`."""

    def collect(self, ticket: Any) -> StepResult:
        """Wait for a launched step and return its result."""

    def compile_grammar(self, text: str, tokenizer: Callable[[], str]) -> None:
        """Compile a grammar for rows that start. May take seconds; may be called from several threads.

        `tokenizer` returns the text of tokenizer.json. Raises InvalidRequestError for a grammar that cannot be used.
        """

    def load_adapter(self, adapter: str, folder: str) -> None:
        """Read a LoRA adapter into memory for rows that start. May take seconds; may be called from another thread.

        `adapter` is the value of `Request.lora`. Raises ConfigError, in one line, for one that cannot be served.
        """

    def unload_adapter(self, adapter: str) -> None:
        """Free the memory of an adapter that no row uses any more; unknown adapters are ignored."""

    def prepare_weights(self, source: WeightSource) -> str:
        """Read other weights of the same model into memory, next to those in use; returns their digest.

        May take minutes; called from another thread, while steps run. Raises ConfigError, in one line, for weights that
        do not fit the model, are damaged or find no room; those in use are then unchanged.
        """

    def swap_weights(self) -> None:
        """Use the weights that were prepared last from the next launch on. No step is in flight."""

    def drop_weights(self) -> None:
        """Free weights that were prepared and are not wanted; nothing happens if there are none."""

    def release_memory(self, *, weights: bool, kv_cache: bool) -> None:
        """Give memory back while no row is there, until weights are swapped in again and KV is written.

        Raises ConfigError for what cannot be given back.
        """

    def join_weight_group(self, group: WeightGroup) -> None:
        """Join a trainer's group; waits for its other members. From another thread. Raises ConfigError."""

    def receive_weights(self, group: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Receive tensors, given as (name, dtype, shape), which the next update uses. Raises ConfigError."""

    def leave_weight_group(self, group: str) -> None:
        """Leave a group. Raises ConfigError for one that is not there."""

    def weight(self, name: str, rows: int) -> Any:
        """The first `rows` rows of the tensor of this name in the checkpoint in use, as nested lists of numbers.

        Raises ConfigError if there is none.
        """

    def pieces(self, pages: Int32Array) -> KvPieces:
        """The addresses of the KV of pages (int32[n]), for transfer and stores. Steps in flight may still write it."""

    def state_pieces(self, slots: Int32Array) -> KvPieces:
        """The addresses of the recurrent states in slots (int32[n]), as `pieces` has those of KV; of a model without
        there are no pieces.
        """

    def close(self) -> None:
        """Release the device."""


@runtime_checkable
class DistributedExecutor(Executor, Protocol):
    """An executor whose model is divided among several processes. Raises DeviceLostError when one of them has ended."""

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason, from another thread, when a process has ended. `tell` may end this process."""

    def describe_ranks(self) -> list[dict[str, Any]]:
        """The state of each process: tp_rank, pid, step (the latest), silent_s (since its last heartbeat)."""


class BlockPool(Protocol):
    """A KV pool, in any memory, from which blocks are gathered and into which they are scattered."""

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""

    def gather(self, pages: Int32Array, block: UInt8Array) -> None:
        """Copy `pages` (int32[n]) into `block` (uint8[at least n * page_bytes])."""

    def scatter(self, block: UInt8Array, pages_in_block: int, first: int, pages: Int32Array) -> None:
        """Copy pages `first`, `first + 1`, ... of a block of `pages_in_block` into `pages` (int32[n])."""


class StateSlots(Protocol):
    """The slots of recurrent states, in any memory, whose bytes are copied out and in."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states in one slot."""

    def read(self, slot: int, content: UInt8Array) -> None:
        """Copy the states in a slot into `content` (uint8[at least slot_bytes])."""

    def write(self, slot: int, content: UInt8Array) -> None:
        """Set the states in a slot from the bytes that `read` gave."""


@runtime_checkable
class DeviceExecutor(Executor, Protocol):
    """An executor whose KV pool is not in this process's memory."""

    def device_blocks(self) -> BlockPool:
        """Copies between the pool and host memory. Raises ConfigError if the executor does not support them."""

    def device_states(self) -> StateSlots:
        """The same of recurrent states, which the model has."""


class CostModel(Protocol):
    """Predicts how long steps and copies take. `cost.LinearCost` and `cost.OnlineCost` implement it."""

    @property
    def learns(self) -> bool:
        """Whether `learn` has an effect."""

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""

    def copy(self, num_bytes: int, link: str) -> float:
        """Seconds to move `num_bytes` over a link ("host", "disk", "network")."""

    def learn(self, work: StepWork, seconds: float) -> None:
        """Update the model with a measured step."""


class PrefixListener(Protocol):
    """Called by the radix tree on each change, so that hit lengths of waiting requests stay current without a match."""

    def inserted(self, parent: Any, node: Any) -> None:
        """`node` is a new child of `parent`."""

    def split(self, upper: Any, lower: Any) -> None:
        """`lower` was split: `upper` is the new node above it and holds the front part of its tokens."""

    def evicted(self, node: Any) -> None:
        """The leaf `node` was removed from the tree."""


class UsableListener(PrefixListener, Protocol):
    """A PrefixListener that is also called when a different part of a prefix becomes usable while the tree is
    unchanged.

    The token after a prefix may need more than the KV in the tree: layers with a window need their window pages.
    """

    def usable_changed(self, pages: Int32Array) -> None:
        """What a row needs in addition to `pages` (int32[n]) of the tree was added or freed."""
