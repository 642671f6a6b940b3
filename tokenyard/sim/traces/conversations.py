"""Finds earlier answers in later prompts, so that a simulated prefix cache has the same hits as a real one.

A simulated answer has generated token ids (see `sim.traces.prompt_ids`). If a recorded prompt continues an earlier
conversation, the generated ids replace the recorded ids of that conversation's answers.
"""

import numpy as np
import numpy.typing as npt

from tokenyard.base import Int32Array
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, stream_tokens

UInt64Array = npt.NDArray[np.uint64]

_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)


class PrefixHashes:
    """A rolling hash of every prefix of token ids (Karp and Rabin 1987), modulo 2**64."""

    def __init__(self) -> None:
        self._powers: UInt64Array = np.ones(1, np.uint64)

    def of(self, ids: Int32Array) -> UInt64Array:
        """uint64[n], the hashes of the first 1, 2, ... n ids."""
        missing = len(ids) - len(self._powers)
        if missing > 0:
            factors = np.concatenate((self._powers[-1:], np.full(missing, _BASE)))
            self._powers = np.concatenate((self._powers[:-1], np.multiply.accumulate(factors)))
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * _MIX
        mixed ^= mixed >> np.uint64(29)
        hashes: UInt64Array = np.cumsum(mixed * self._powers[: len(ids)], dtype=np.uint64)
        return hashes


class Conversations:
    """Prompts and answers so far, found by the hash of the prompt."""

    def __init__(self) -> None:
        self._hashes = PrefixHashes()
        self._answers: dict[int, list[tuple[int, Int32Array]]] = {}

    def add(self, index: int, prompt: Int32Array, answer: Int32Array) -> Int32Array:
        """Add request `index` and return its prompt, int32[n], with earlier answers replaced by simulated ones."""
        hashes: list[int] = self._hashes.of(prompt).tolist()
        ids = prompt.copy()
        for place, key in enumerate(hashes[:-1], start=1):
            if key in self._answers:
                self._put(ids, prompt, place, self._answers[key])
        if len(answer):
            self._answers.setdefault(hashes[-1], []).append((index, answer))
        return ids

    def _put(self, ids: Int32Array, prompt: Int32Array, place: int, answers: list[tuple[int, Int32Array]]) -> None:
        """Replace the longest match of one of the `answers` in `prompt` at `place`."""
        lengths = [common_tokens(prompt[place:], answer) for _, answer in answers]
        best = int(np.argmax(lengths))
        positions = np.arange(lengths[best])
        ids[place : place + lengths[best]] = stream_tokens(ANSWER_STREAM + answers[best][0], positions)


def common_tokens(left: Int32Array, right: Int32Array) -> int:
    """How many leading ids two arrays share."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
