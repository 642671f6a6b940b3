"""The interfaces between rooms, as protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tokenyard.base.request import Int32Array, Int64Array, UInt8Array
from tokenyard.base.step_plan import StepPlan, StepResult, StepWork


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Layers with a sliding window that keep KV in a pool of their own. window: tokens that a token sees there, its own
    included. num_pages: usable pages of that pool, ids from 1 on; page 0 is padding.
    """

    window: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the rest of the system needs to know of a loaded model. `num_pages` counts usable pages of `page_size`
    tokens; page 0 is the executor's own padding page and never given out, so ids run from 1 to `num_pages`. `kernels`
    describes what computes the steps, for logs. adapter_bytes: what a LoRA adapter takes on the device, 0 where none
    are served. windows: the layers that keep KV only for what their window reaches; None where all layers keep all.
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


@dataclass(frozen=True, slots=True)
class KvPieces:
    """The addresses of the KV of some pages. addresses: int64[pages, pieces], in memory of `device`; each piece has
    `nbytes`.

    The pieces of a page always come in the same order, so that they can be copied to those of another page or executor.
    """

    addresses: Int64Array
    nbytes: int
    device: str


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
        """Make a grammar ready for rows that start; may take seconds and be called from several threads.

        `tokenizer` gives the text of tokenizer.json. Raises InvalidRequestError for a grammar that cannot be used.
        """

    def load_adapter(self, adapter: str, folder: str) -> None:
        """Read a LoRA adapter into memory for rows that start; may take seconds and be called from a thread of its own.

        `adapter` is what requests name (`Request.lora`). Raises ConfigError, in one line, for one that cannot be
        served.
        """

    def unload_adapter(self, adapter: str) -> None:
        """Free the memory of an adapter that no row has any more; unknown ones are ignored."""

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Say where the KV of pages (int32[n]) lies, for transfer and stores. Steps in flight may still write it."""

    def close(self) -> None:
        """Release the device."""


@runtime_checkable
class DistributedExecutor(Executor, Protocol):
    """An executor whose model is divided among several processes. Raises DeviceLostError when one of them has gone."""

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, with the reason when a process has gone; it may end this one."""

    def describe_ranks(self) -> list[dict[str, Any]]:
        """What people should know of each process: tp_rank, pid, step (the latest), silent_s (since a heartbeat)."""


class BlockPool(Protocol):
    """A KV pool to gather blocks from and to scatter them into, wherever it is."""

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""

    def gather(self, pages: Int32Array, block: UInt8Array) -> None:
        """Copy `pages` (int32[n]) into `block` (uint8[at least n * page_bytes])."""

    def scatter(self, block: UInt8Array, pages_in_block: int, first: int, pages: Int32Array) -> None:
        """Copy pages `first`, `first + 1`, ... of a block of `pages_in_block` into `pages` (int32[n])."""


@runtime_checkable
class DeviceExecutor(Executor, Protocol):
    """An executor whose KV pool is not in this process's memory."""

    def device_blocks(self) -> BlockPool:
        """Copies between the pool and host memory. Raises ConfigError where that cannot be."""


class CostModel(Protocol):
    """How long steps and copies take (`cost.LinearCost` and `cost.OnlineCost` implement it)."""

    @property
    def learns(self) -> bool:
        """Whether `learn` has an effect."""

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""

    def copy(self, num_bytes: int, link: str) -> float:
        """Seconds to move `num_bytes` over a link ("host", "disk", "network")."""

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take in a measured step."""


class PrefixListener(Protocol):
    """Called by the radix tree on each change, so that hit lengths of waiting requests stay right without matching
    again.

    Nodes are opaque to the listener except for their identity.
    """

    def inserted(self, parent: Any, node: Any) -> None:
        """`node` became a new child of `parent`."""

    def split(self, upper: Any, lower: Any) -> None:
        """`lower` was cut in two: `upper` is the new node above it and holds the front part of its tokens."""

    def evicted(self, node: Any) -> None:
        """The leaf `node` left the tree."""


class UsableListener(PrefixListener, Protocol):
    """A PrefixListener that also hears when a row may begin behind more or less of a prefix than before, although the
    tree has not changed: the token after a prefix needs more than the KV that the tree keeps.
    """

    def usable_changed(self, pages: Int32Array) -> None:
        """What the prefixes with `pages` (int32[n]) lack for that has come or gone."""
