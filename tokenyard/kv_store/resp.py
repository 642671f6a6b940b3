"""A small client for Valkey and Redis: one connection, one command at a time, with a timeout (RESP 2)."""

import socket
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from tokenyard.base import ConfigError

MAX_REPLY_BYTES = 512 << 20
"""The longest value that Redis supports."""

Answer = bytes | int | None
"""A string or a line, a number, or null."""


class RespError(OSError):
    """The store is unreachable, times out, or returns an error."""


class StoreAddress:
    """Address and credentials of a store. `shown` is the address without the password."""

    def __init__(self, url: str, flag: str) -> None:
        """`url`: redis://[[user]:password@]host[:port][/database]. Raises ConfigError, which names `flag`."""
        parts = urlsplit(url)
        try:
            self.host, self.port = parts.hostname or "", parts.port or 6379
            self.database = int(parts.path.strip("/") or 0)
        except ValueError:
            self.host = ""
        if parts.scheme not in ("redis", "valkey") or not self.host:
            raise ConfigError(f"{flag} is no address of a store; give redis://host:port or valkey://host:port")
        self.shown = f"{self.host}:{self.port}"
        self.login = [unquote(word).encode() for word in (parts.username, parts.password) if word]


class RespConnection:
    """A connection to a store. Any failure raises RespError, after which the connection is unusable."""

    def __init__(self, address: StoreAddress, timeout_s: float) -> None:
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            raise RespError(f"the store at {address.shown} cannot be reached: {error}") from error
        self._socket.settimeout(timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies: BinaryIO = self._socket.makefile("rb")
        try:
            if address.login:
                self.command(b"AUTH", *address.login)
            if address.database:
                self.command(b"SELECT", str(address.database).encode())
        except RespError:
            self.close()
            raise

    def command(self, *words: bytes | memoryview) -> Answer:
        """Send a command and return its answer."""
        head = b"*%d\r\n" % len(words)
        try:
            for word in words:
                self._socket.sendall(head + b"$%d\r\n" % len(word))
                self._socket.sendall(word)
                head = b"\r\n"
            self._socket.sendall(head)
            return self._reply()
        except (OSError, ValueError) as error:
            if isinstance(error, RespError):
                raise
            raise RespError(f"the store does not answer: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._replies.close()
        self._socket.close()

    def _reply(self) -> Answer:
        line = self._replies.readline(1024)
        if not line.endswith(b"\r\n"):
            raise RespError("the store has disconnected")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise RespError(f"the store says {rest.decode('utf-8', 'replace')}")
        if kind == b":":
            return int(rest)
        size = int(rest) if kind == b"$" else MAX_REPLY_BYTES + 1
        if size > MAX_REPLY_BYTES:
            raise RespError("the store does not speak RESP")
        if size < 0:
            return None
        value = self._replies.read(size + 2)
        if len(value) < size + 2:
            raise RespError("the store has disconnected")
        return value[:-2]
