"""Penalties on tokens a row has seen, with the counts kept on the device."""

import numpy as np
import torch

from tokenyard.base import Int32Array, RowStart
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.sampling.sampling_batch import SamplingRows

FIRST_CAPACITY = 8


class Penalties:
    """Token counts of the rows that asked for a penalty, and the penalties themselves.

    Counts grow on the device as tokens are sampled, so they hold those of steps still in flight. A row takes
    a place in the counts when it starts, and frees it when a row without penalties starts in its pool row.
    """

    def __init__(self, max_pool_rows: int, vocab_size: int, device: torch.device) -> None:
        self._places = np.full(max_pool_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._vocab_size = vocab_size
        self._sampled = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def take(self, start: RowStart) -> None:
        """Begin to count for a row, from the tokens it already has, or stop counting if it asks for no penalty."""
        row = start.pool_row
        if self._places[row] >= 0 and not start.sampling.penalised:
            self._free.append(int(self._places[row]))
            self._places[row] = -1
        if not start.sampling.penalised:
            return
        if self._places[row] < 0:
            self._places[row] = self._new_place()
        place = int(self._places[row])
        known = to_device(start.known_ids.astype(np.int64), self._sampled.device)
        prompt, answer = known[: start.prompt_tokens], known[start.prompt_tokens :]
        self._in_prompt[place].zero_().index_fill_(0, prompt, True)
        # Not bincount, which on a GPU asks for the largest id and so waits for the device.
        self._sampled[place].zero_().scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def apply(
        self, logits: torch.Tensor, pool_rows: Int32Array, device_rows: torch.Tensor, rows: SamplingRows
    ) -> torch.Tensor:
        """Return float32[n, vocabulary] with the penalties of the rows taken off.

        repetition: logits of tokens in prompt or answer are divided by it if positive, else multiplied (CTRL, Keskar
        et al. 2019, arXiv 1909.05858). frequency: taken off once per time a token is in the answer; presence: once if
        it is in the answer at all (OpenAI's API).
        """
        repetition, frequency, presence = rows.penalties(device_rows)
        places = self._device_places(pool_rows)
        counts = self._sampled[places]
        answered = counts > 0
        seen = answered | self._in_prompt[places]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated, logits) - frequency * counts - presence * answered

    def count(self, pool_rows: Int32Array, tokens: torch.Tensor) -> None:
        """Count the sampled int64[n] tokens of int32[n] rows, each row once."""
        self._sampled[self._device_places(pool_rows), tokens] += 1

    def _device_places(self, pool_rows: Int32Array) -> torch.Tensor:
        return to_device(self._places[pool_rows], self._sampled.device)

    def _new_place(self) -> int:
        if not self._free:
            old = len(self._sampled)
            more = max(FIRST_CAPACITY, old)
            self._sampled = torch.cat((self._sampled, self._sampled.new_zeros(more, self._vocab_size)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size)))
            self._free = list(range(old + more - 1, old - 1, -1))
        return self._free.pop()
