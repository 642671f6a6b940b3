"""Token ids of simulated prompts and answers, computed on demand and deterministic.

A stream is an endless sequence of token ids identified by a number. A prompt is a chain of segments, each a prefix of
one stream, so two prompts share a prefix exactly as far as their chains agree. The answer to request `i` is the stream
`ANSWER_STREAM + i`, which a later turn of the same conversation can name.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tokenyard.base import Int32Array, Int64Array

UInt64Array = npt.NDArray[np.uint64]

VOCAB_SIZE = 2**31 - 1
EOS_TOKEN = 0
UNIQUE_STREAM = 1 << 40
ANSWER_STREAM = 1 << 41

STREAM_TOKENS = 1 << 20

_POSITION_BITS = np.uint64(20)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def stream_tokens(stream: npt.ArrayLike, position: npt.ArrayLike) -> Int32Array:
    """Token ids at `position` of `stream`, elementwise: a counter-based hash (the finaliser of SplitMix64).

    Ids run from 1 to `VOCAB_SIZE - 1`; the end-of-sequence token is never one of them. Streams are below 2**43. A
    stream has `STREAM_TOKENS` positions; those beyond are the next stream's.
    """
    return hashed((np.asarray(stream, np.uint64) << _POSITION_BITS) + np.asarray(position, np.uint64))


def hashed(x: UInt64Array) -> Int32Array:
    """Token ids of counters (stream * `STREAM_TOKENS` + position), elementwise."""
    x = (x ^ (x >> _SHIFT_1)) * _MIX_1
    x = (x ^ (x >> _SHIFT_2)) * _MIX_2
    x ^= x >> _SHIFT_3
    ids: Int32Array = (x % np.uint64(VOCAB_SIZE - 1)).astype(np.int32) + np.int32(1)
    return ids


class Content(Protocol):
    """The source of the token ids of prompts."""

    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        """The `tokens` ids of request `index`'s prompt, int32[tokens]."""


class BlankContent(Content):
    """All prompts are zeros: for runs that do not use the ids (no prefix cache). Costs no memory per request."""

    def __init__(self) -> None:
        self._zeros: Int32Array = np.zeros(1 << 16, np.int32)

    @override
    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        if tokens > len(self._zeros):
            self._zeros = np.zeros(2 * tokens, np.int32)
        return self._zeros[:tokens]


class UniqueContent(Content):
    """No two prompts share a prefix."""

    @override
    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        return stream_tokens(UNIQUE_STREAM + index, np.arange(tokens, dtype=np.uint64))


class SegmentContent(Content):
    """Prompts as chains of segments: request `i` owns the entries `offsets[i] : offsets[i + 1]` of all columns.

    streams: int64[m].
    lengths: int32[m], tokens of each segment; the last one is cut to the prompt's length.
    """

    def __init__(self, streams: Int64Array, lengths: Int32Array, offsets: Int64Array) -> None:
        self._streams, self._lengths, self._offsets = streams, lengths, offsets

    @override
    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        here = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        lengths = self._lengths[here]
        streams = np.repeat(self._streams[here], lengths)[:tokens]
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)[:tokens]
        return stream_tokens(streams, np.arange(len(streams)) - begins)


class SlicedContent(Content):
    """Prompts as a few long slices of streams: request `i` owns the entries `offsets[i] : offsets[i + 1]` of all
    columns.

    streams: int64[m].
    begins: int64[m], the position in the stream at which each slice begins; may exceed `STREAM_TOKENS`.
    lengths: int32[m], tokens of each slice; the last one is cut to the prompt's length.
    """

    def __init__(self, streams: Int64Array, begins: Int64Array, lengths: Int32Array, offsets: Int64Array) -> None:
        self._counters: Int64Array = streams * STREAM_TOKENS + begins
        self._lengths, self._offsets = lengths, offsets

    @override
    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        here = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        slices = zip(self._counters[here].tolist(), self._lengths[here].tolist(), strict=True)
        counters = np.concatenate([np.arange(begin, begin + length, dtype=np.uint64) for begin, length in slices])
        return hashed(counters[:tokens])


class TokenContent(Content):
    """Prompts with known ids: int32 arrays, one per request."""

    def __init__(self, prompts: Sequence[Int32Array]) -> None:
        self._prompts = prompts

    @override
    def prompt_ids(self, index: int, tokens: int) -> Int32Array:
        return self._prompts[index][:tokens]
