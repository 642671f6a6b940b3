"""Clients of a streaming server in a separate process, as cheap as possible: they represent clients on other machines.

Plain sockets and one epoll. The process polls them every `ROUND_S` and reads what has arrived, so that it reads every
stream about once a step and leaves the cores to the server; a token counts from the moment it is read here, so what the
server sends late or this process reads late is late in the same way. Only the end of each piece is parsed: the last
whole chunk names how many tokens the stream has had.
"""

import json
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from mock_server import lag_ms, tokens_so_far

ROUND_S = 0.005
COMES_PER_S = 100
"""So many come a second in the beginning, hardly more than later on."""

NICE = 5
TAIL_BYTES = 2000


class Stream:
    """One request under way, begun when it is made."""

    def __init__(self, address, body):
        self.tokens, self._tail = 0, b""
        self.socket = socket.create_connection(address)
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        self.socket.setblocking(False)

    def read(self):
        """Take what has come; returns how many tokens that is, and the lag in ms if the stream has ended.

        See `lag_ms`. Raises RuntimeError for anything but an answer.
        """
        data = self.socket.recv(1 << 17)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        before, self.tokens = self.tokens, tokens_so_far(self._tail, self.tokens)
        new = self.tokens - before
        if data and b"[DONE]" not in self._tail:
            return new, None
        self.socket.close()
        return new, lag_ms(self._tail)


class Clients:
    """A process in which `count` clients each have one request open; the answer to one is followed by the next.

    `make_body` says for each number, from 0 on, what is asked for (a body of /v1/completions as a dict); it must be a
    function that a fresh process can import.
    """

    def __init__(self, address: tuple[str, int], count: int, make_body: Callable[[int], dict[str, Any]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_play, args=(address, count, make_body, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def take(self) -> tuple[int, list[float], float]:
        """What has happened since the last call: tokens received, the lag in ms of each stream that ended, and the
        CPU seconds of the process. Ends the benchmark if the process died, of an answer that was none for example.
        """
        try:
            self._pipe.send(None)
            return self._pipe.recv()
        except (EOFError, BrokenPipeError):
            sys.exit("the clients died; the reason is above")

    def close(self) -> None:
        """End the process; its streams break off."""
        self._process.kill()
        self._process.join()


def _play(address, count, make_body, pipe):
    os.nice(NICE)
    poll, streams, number = select.epoll(), {}, 0
    begin, tokens, lags, cpu_s = time.monotonic(), 0, [], time.process_time()
    while True:
        time.sleep(ROUND_S)
        wanted = min(count, int(COMES_PER_S * (time.monotonic() - begin)))
        for fd, _ in poll.poll(0):
            new, lag = streams[fd].read()
            tokens += new
            if lag is not None:
                del streams[fd]
                lags.append(lag)
        while len(streams) < wanted:
            stream = Stream(address, json.dumps(make_body(number)).encode())
            number += 1
            streams[stream.socket.fileno()] = stream
            poll.register(stream.socket, select.EPOLLIN)
        if pipe.poll():
            pipe.recv()
            pipe.send((tokens, lags, time.process_time() - cpu_s))
            tokens, lags, cpu_s = 0, [], time.process_time()
