"""What the ranks of a model tell each other while they start: lines of JSON on a socket to each from rank 0."""

import socket
import time
from typing import Any, TypeVar

import msgspec

from tokenyard.base import ConfigError, EngineDeadError, ExecutorInfo
from tokenyard.base.version import __version__
from tokenyard.executor.distributed.partition import ParallelKind, name_of
from tokenyard.executor.distributed.process_group import Rendezvous
from tokenyard.executor.distributed.shared_kv import KvLayout

OWN_FIELDS = ("num_pages", "device")
"""What may differ between ranks: the least number of pages is agreed on, and each has a device of its own."""

Line = TypeVar("Line")


class RankSetup(msgspec.Struct):
    """What a rank is told first. form: how the model is divided. options: those of `load_executor`. place: its column
    in the table of this machine, which has `places`; the process that starts it has the first one. share_kv: whether
    its KV is in memory that rank 0 maps too.
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
        """What people call this rank."""
        return name_of(self.form, self.rank, self.size)


class RankReport(msgspec.Struct):
    """What a rank says: what it has loaded, later that it is ready, or why it cannot go on.

    wrong_settings: whether the failure is one of settings or files, which its text names. lost_peers: whether it is
    that another rank could not be reached. kv: of KV that rank 0 maps, once it is there.
    """

    failure: str = ""
    wrong_settings: bool = False
    lost_peers: bool = False
    version: str = __version__
    info: ExecutorInfo | None = None
    kv: KvLayout | None = None


class AgreedNumPages(msgspec.Struct, tag=True):
    """How many pages all ranks have."""

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
        """Send a message; one to a rank that has gone is lost."""
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
    """Return how many pages the rank of this name has room for. Raises ConfigError for wrong settings or such that are
    not rank 0's, EngineDeadError for another failure. may_differ: fields that are not compared.
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
