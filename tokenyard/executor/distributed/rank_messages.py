"""The messages of the ranks of a model: lines of JSON on sockets to each rank, and frames in the ring that they share.

One socket is for the start. Another has calls that take long and are answered, such as reading weights while steps run.
The ring has plans, and orders that every rank follows between the same two steps.
"""

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from tokenyard.base import ConfigError, EngineDeadError, ExecutorInfo, StepPlan, WeightGroup, WeightSource
from tokenyard.base.plan_bytes import decode_plan, encode_plan
from tokenyard.base.version import __version__
from tokenyard.executor.distributed.partition import ParallelKind, Range, name_of
from tokenyard.executor.distributed.process_group import Rendezvous
from tokenyard.executor.distributed.shared_kv import KvLayout

OWN_FIELDS = ("num_pages", "device")
"""What may differ between ranks: the least number of pages is agreed on, and each has its own device."""

Line = TypeVar("Line")

SWAP_WEIGHTS, DROP_WEIGHTS, RELEASE_WEIGHTS, RELEASE_KV = b"swap", b"drop", b"free", b"kv"
"""Orders: frames in the ring that are shorter than any plan."""

_RANGE_COUNT = struct.Struct("=q")


class RankSetup(msgspec.Struct):
    """The first message to a rank.

    options: those of `load_executor`.
    meeting: by what the ranks connect.
    place: the rank's column in this machine's heartbeat table; the parent process has column 0.
    places: columns of that table.
    form: how the model is divided.
    share_kv: whether the rank's KV is in memory that rank 0 maps too.
    """

    model_path: str
    options: dict[str, Any]
    rank: int
    size: int
    parent_pid: int
    meeting: Rendezvous
    place: int
    places: int
    form: ParallelKind = "tensor"
    share_kv: bool = False

    @property
    def name(self) -> str:
        """The rank's name in messages and logs."""
        return name_of(self.form, self.rank, self.size)


class RankReport(msgspec.Struct):
    """A rank's report: what it loaded, then that it is ready, or why it failed.

    failure: why it failed, empty if it did not.
    wrong_settings: whether settings or files are the cause.
    lost_peers: whether the cause is that another rank could not be reached.
    version: the version of Tokenyard that it runs.
    info: what it loaded.
    kv: the layout of KV that rank 0 maps, once allocated.
    """

    failure: str = ""
    wrong_settings: bool = False
    lost_peers: bool = False
    version: str = __version__
    info: ExecutorInfo | None = None
    kv: KvLayout | None = None


class RankCall(msgspec.Struct):
    """What a rank does next to its steps, and answers with a RankReply.

    source: weights to read.
    group: a trainer's group to join.
    tensors: tensors to receive in the group `name`, each with dtype and shape; if there are none, it leaves that group.
    """

    source: WeightSource | None = None
    group: WeightGroup | None = None
    name: str = ""
    tensors: list[tuple[str, str, list[int]]] = msgspec.field(default_factory=list)


class RankReply(msgspec.Struct):
    """What a call returned, or why it failed."""

    value: str = ""
    failure: str = ""


class AgreedNumPages(msgspec.Struct, tag=True):
    """The number of pages that every rank has."""

    num_pages: int


class RankSocket:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._end.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; one to a rank that has ended is dropped."""
        try:
            self._end.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            return

    def receive(self, kind: type[Line], timeout_s: float | None = None) -> Line:
        """Wait for a message. Raises TimeoutError, EOFError if the other end is closed, msgspec.MsgspecError."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._end.settimeout(None if end_s is None else max(0.001, end_s - time.monotonic()))
            data = self._end.recv(65536)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """Close it."""
        self._end.close()


def check_report(name: str, report: RankReport, own: ExecutorInfo, may_differ: tuple[str, ...] = OWN_FIELDS) -> int:
    """Return how many pages the rank of this name has room for. may_differ: fields that are not compared with rank 0's.

    Raises ConfigError for wrong settings or ones that differ from rank 0's, EngineDeadError for another failure.
    """
    if report.failure:
        raise (ConfigError if report.wrong_settings else EngineDeadError)(f"{name}: {report.failure}")
    if report.version != __version__:
        raise ConfigError(f"{name} runs Tokenyard {report.version}, rank 0 runs {__version__}")
    if report.info is None:
        raise EngineDeadError(f"{name} does not say what it has loaded")
    theirs, ours = (msgspec.to_builtins(info) for info in (report.info, own))
    for field in ours:
        if field not in may_differ and theirs[field] != ours[field]:
            raise ConfigError(f"{name} has {field} {theirs[field]!r}, but rank 0 has {ours[field]!r}")
    return report.info.num_pages


def encode_step(plan: StepPlan, ranges: Sequence[Range]) -> bytes:
    """Return a plan and the ranges of its tokens for which ranks compute logits, as bytes.

    Log-probabilities of prompts need logits in addition to those that are sampled from. Only rank 0 knows which: it
    alone has the requests. Every rank with a part of the head computes them.
    """
    numbers = np.array(ranges, np.int64).tobytes() if ranges else b""
    return _RANGE_COUNT.pack(len(ranges)) + numbers + encode_plan(plan)


def decode_step(data: bytes) -> tuple[StepPlan, list[Range]]:
    """Return plan and ranges in bytes of `encode_step`. Raises ValueError for other bytes."""
    count = _RANGE_COUNT.unpack_from(data)[0] if len(data) >= _RANGE_COUNT.size else -1
    begin = _RANGE_COUNT.size + 16 * count
    if not 0 <= count <= len(data) // 16:
        raise ValueError(f"a step of {len(data)} bytes is cut off")
    numbers = np.frombuffer(data, np.int64, 2 * count, _RANGE_COUNT.size).tolist()
    return decode_plan(data[begin:]), list(zip(numbers[::2], numbers[1::2], strict=True))
