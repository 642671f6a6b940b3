"""Stands in for the process that looks ahead: `odd_lookahead.py MODE [FILE]` answers correctly, or wrongly."""

import math
import os
import struct
import sys
import time
from pathlib import Path

from tokenyard.policy.adaptive import CandidateScore
from tokenyard.scheduler.lookahead_state import LookaheadQuery, LookaheadReply, decode, encode

LENGTH = struct.Struct("<I")


def questions():
    """All questions; what else comes is checked and dropped."""
    while len(head := sys.stdin.buffer.read(LENGTH.size)) == LENGTH.size:
        message = decode(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
        if isinstance(message, LookaheadQuery):
            yield message


def answer(data):
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def scored(ask, met, names=None):
    """An answer in which the last of the wanted candidates is better."""
    names = names or ask.candidates
    scores = [CandidateScore(name, 0.5, 0.1, 10) for name in names[:-1]] + [CandidateScore(names[-1], met, 0.1, 10)]
    return LookaheadReply(ask.number, scores, 0.001)


def main(mode, *arguments):
    if mode == "talks first":
        answer(encode(LookaheadReply(1000, [CandidateScore("fcfs", 0.5, 0.1)], 0.1)))
    if mode == "dies once":
        # The first one to come here finds no file.
        file = Path(arguments[0])
        if not file.exists():
            file.write_text("x")
            return
    for ask in questions():
        match mode:
            case "dies when asked":
                os._exit(3)
            case "sleeps":
                time.sleep(600)
            case "noise":
                answer(b"what?")
            case "endless":
                sys.stdout.buffer.write(b"\xff" * 100)
                sys.stdout.buffer.flush()
            case "not a number":
                answer(encode(scored(ask, math.nan)))
            case "strangers":
                answer(encode(scored(ask, 0.9, ["fcfs", "os:system"])))
            case "another question":
                answer(encode(LookaheadReply(ask.number + 5, scored(ask, 0.9).scores, 0.001)))
            case "worse":
                answer(encode(scored(ask, 0.4)))
            case _:
                answer(encode(scored(ask, 0.9)))


if __name__ == "__main__":
    main(*sys.argv[1:])
