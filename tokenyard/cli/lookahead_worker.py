"""The process that runs forecasts for a scheduler with policy `adaptive` (`python -m tokenyard.cli.lookahead_worker`).

It reads queries, and the arrivals and ends of requests, from its standard input and writes replies to its standard
output. Each is a frame: length (uint32, little-endian), then a message of `scheduler.lookahead_state`. The process ends
with its parent.
"""

import os
import signal
import struct
import time
from typing import BinaryIO

import setproctitle

from tokenyard.engine.processes.child import die_with_parent
from tokenyard.scheduler.lookahead_state import LookaheadQuery, LookaheadReply, decode, encode
from tokenyard.sim.engine.forecast import RecentTraffic
from tokenyard.sim.engine.lookahead import look_ahead

LENGTH = struct.Struct("<I")
NICE = 10
"""About a tenth of another process's CPU share, so that a forecast does not take minutes on a busy machine."""

STDOUT, STDERR = 1, 2


def answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer every query until the input ends. Raises ValueError for bytes that are not a message."""
    traffic, counted_s = RecentTraffic(), 0.0
    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        message = decode(questions.read(LENGTH.unpack(head)[0]))
        if not isinstance(message, LookaheadQuery):
            traffic.take(message)
            continue
        scores = look_ahead(traffic, message.state, message.candidates, message.horizon_s, message.number)
        spent_s = time.process_time()
        data = encode(LookaheadReply(message.number, scores, spent_s - counted_s))
        counted_s = spent_s
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


def main() -> None:
    """Answer the queries on standard input."""
    setproctitle.setproctitle("tokenyard: lookahead")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    # Other output of this process must not mix with the answers.
    answers = os.fdopen(os.dup(STDOUT), "wb")
    os.dup2(STDERR, STDOUT)
    with os.fdopen(0, "rb") as questions, answers:
        answer_all(questions, answers)


if __name__ == "__main__":
    main()
