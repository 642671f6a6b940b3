"""A store of KV blocks that several engines share: Valkey or Redis, behind a circuit breaker.

A value is the checksum of a block and its bytes. Its key is made of `BlockFormat` and the block's digest. The server
evicts (`maxmemory-policy allkeys-lru`). After a few failures the store is not used for a while, and KV is computed
instead.
"""

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from tokenyard.base.blocks import touch_all
from tokenyard.kv_store.resp import Answer, RespConnection, RespError, StoreAddress
from tokenyard.kv_store.store import (
    Block,
    BlockFormat,
    SingleStore,
    StoreCounters,
    StoreFullError,
    block_checksum,
    padded,
)

VERSION = 1
CHECK = struct.Struct("<Q")
TIMEOUT_S = 1.0
MAX_FAILURES = 3
PAUSE_S = 30.0
MAX_KNOWN = 1 << 20
"""Most blocks that this process remembers as stored."""
PIPELINE_BLOCKS = 256
"""Keys in one command."""


class StoreCircuitBreaker:
    """A circuit breaker: opens after consecutive failures, and allows one attempt when the pause is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether the store may be used."""
        return self._clock() >= self._until

    def succeeded(self) -> None:
        """Record a success."""
        self._failures = 0

    def failed(self) -> None:
        """Record a failure. The pause begins at the third consecutive failure, and again at each further one."""
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._until = self._clock() + PAUSE_S


class RemoteStore(SingleStore):
    """Blocks in Valkey or Redis. See `store.BlockStore`.

    `count_stored`, `blocks` and `touch` use the blocks that this process knows to be stored, without a request. `clear`
    deletes those.
    """

    def __init__(self, url: str, form: BlockFormat, breaker: StoreCircuitBreaker | None = None) -> None:
        """Connects at first use. Raises ConfigError for a malformed address."""
        self.counters = StoreCounters()
        self._address = StoreAddress(url, "--hicache-storage-url")
        self._prefix = f"tokenyard:kv{VERSION}:".encode() + blake2b(msgspec.json.encode(form), digest_size=8).digest()
        self._bytes = padded(form.block_bytes)
        self._breaker = breaker or StoreCircuitBreaker()
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._idle: list[RespConnection] = []

    @property
    def blocks(self) -> int:
        """How many blocks are known to be stored."""
        return len(self._known)

    @property
    def stored_bytes(self) -> int:
        """How many bytes the known blocks take."""
        return len(self._known) * (self._bytes + CHECK.size)

    @property
    def unavailable(self) -> bool:
        """Whether the circuit breaker keeps the store from being used."""
        return not self._breaker.closed

    def count_stored(self, digests: list[bytes]) -> int:
        """Length of the longest prefix of `digests` that is known to be stored."""
        if self.unavailable:
            return 0
        with self._lock:
            return next((i for i, digest in enumerate(digests) if digest not in self._known), len(digests))

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """All of `digests`, as other engines may have stored them; 0 while the store is unavailable."""
        return 0 if self.unavailable else len(digests)

    def find_slow(self, digests: list[bytes]) -> list[int]:
        """All places: no block is in host memory."""
        return list(range(len(digests)))

    def lacks(self, digest: bytes) -> bool:
        """Whether a block is not known to be stored."""
        return digest not in self._known

    def touch(self, digests: list[bytes]) -> None:
        """Mark the blocks as used in this process. The server's eviction uses its own reads."""
        with self._lock:
            touch_all(self._known, digests)

    def put(self, digest: bytes, block: Block) -> bool:
        """Write a block (`padded` bytes); False if it was known to be stored. Raises RespError, or StoreFullError if
        the server is full.
        """
        with self._lock:
            if digest in self._known:
                return False
        try:
            self._command(b"SET", self._prefix + digest, CHECK.pack(block_checksum(block)) + block.tobytes())
        except RespError as error:
            if "OOM" in str(error):
                raise StoreFullError("the shared store is full (see maxmemory-policy of its settings)") from error
            raise
        self._remember(digest)
        return True

    def get(self, digest: bytes, block: Block) -> bool:
        """Read a block into `block` (`padded` bytes); False, and `block` undefined, if it is missing or damaged, or the
        store is unavailable. Raises RespError if the store fails during the read.
        """
        if self.unavailable:
            return False
        value = self._command(b"GET", self._prefix + digest)
        if not isinstance(value, bytes):
            self._forget(digest)
            return False
        if len(value) == CHECK.size + self._bytes:
            block.data[:] = memoryview(value)[CHECK.size :]
            if block_checksum(block) == CHECK.unpack_from(value)[0]:
                self._remember(digest)
                return True
        self.counters.damaged += 1
        self._command(b"DEL", self._prefix + digest)
        self._forget(digest)
        return False

    def prefetch(self, digest: bytes) -> bool:
        """Whether a block is stored. Raises RespError."""
        if self.unavailable:
            return False
        found = self._command(b"EXISTS", self._prefix + digest) == 1
        if not found:
            # The server evicted it; it is stored again with the next offer.
            self._forget(digest)
        return found

    def clear(self) -> None:
        """Delete the blocks that this process knows to be stored. Raises RespError."""
        with self._lock:
            known = list(self._known)
            self._known.clear()
        for start in range(0, len(known), PIPELINE_BLOCKS):
            self._command(b"DEL", *(self._prefix + digest for digest in known[start : start + PIPELINE_BLOCKS]))

    def close(self) -> None:
        """Close the connections. The blocks stay."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _command(self, *words: bytes) -> Answer:
        """Run a command on a free or a new connection. Raises RespError, immediately while the store is unavailable."""
        if self.unavailable:
            raise RespError(f"the store at {self._address.shown} is away")
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = RespConnection(self._address, TIMEOUT_S)
            answer = connection.command(*words)
        except RespError:
            if connection is not None:
                connection.close()
            self._breaker.failed()
            if self.unavailable:
                # It may have lost blocks when it is available again.
                with self._lock:
                    self._known.clear()
            raise
        self._breaker.succeeded()
        with self._lock:
            self._idle.append(connection)
        return answer

    def _remember(self, digest: bytes) -> None:
        with self._lock:
            self._known[digest] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._known.pop(digest, None)
