"""The sampling parameters of all pool rows, as columns on the host and on the device."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import Int32Array, RowStart, SamplingParams
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.sampling.noise import signed_seed

RANDOM = 1
RANKED = 2
MIN_P = 4
PENALISED = 8
EDITED = 16
LOGPROBS = 32

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")

NEVER = np.iinfo(np.int64).min


class TokenEdits:
    """Edits of single logits of a row: logit_bias, and -inf on tokens that would end the answer before min_new_tokens.

    ids, values: logit_bias. ends: ids that are banned before position `until`, which is NEVER without a minimum.
    """

    def __init__(self, start: RowStart, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        sampling = start.sampling
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        self.ids = np.array(list(bias), dtype=np.int64)
        self.values = np.array(list(bias.values()), dtype=np.float64)
        eos = () if sampling.ignore_eos else eos_token_ids
        ends = sorted({token for token in (*eos, *sampling.stop_token_ids) if 0 <= token < vocab_size})
        self.ends = np.array(ends, dtype=np.int64)
        self.until = start.prompt_tokens + sampling.min_new_tokens if sampling.min_new_tokens and ends else NEVER

    def __bool__(self) -> bool:
        return bool(len(self.ids)) or self.until != NEVER


class SamplingRows:
    """Parameters by pool row, written when a row starts.

    kinds: uint8[rows] on the host, which of the flags above hold, so that a step does only what some row needs.
    floats: float32[rows, 6] (in the order of _FLOATS) and integers: int64[rows, 2] (top_k, seed) on the device.
    top_k: int64[rows] on the host.
    """

    def __init__(
        self, max_pool_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self.kinds = np.zeros(max_pool_rows, dtype=np.uint8)
        self.top_k = np.zeros(max_pool_rows, dtype=np.int64)
        self.starts: dict[int, RowStart] = {}
        self.edits: dict[int, TokenEdits] = {}
        self.floats = torch.zeros(max_pool_rows, len(_FLOATS), device=device)
        self.integers = torch.zeros(max_pool_rows, 2, dtype=torch.int64, device=device)

    def take(self, starts: list[RowStart]) -> None:
        """Write the parameters of rows that start."""
        if not starts:
            return
        floats = np.empty((len(starts), len(_FLOATS)), dtype=np.float32)
        integers = np.empty((len(starts), 2), dtype=np.int64)
        for i, start in enumerate(starts):
            sampling = start.sampling
            floats[i] = [getattr(sampling, name) for name in _FLOATS]
            integers[i] = self._take_row(start), signed_seed(sampling.seed)
        rows = to_device(np.array([start.pool_row for start in starts], dtype=np.int64), self._device)
        self.floats[rows] = to_device(floats, self._device)
        self.integers[rows] = to_device(integers, self._device)

    def _take_row(self, start: RowStart) -> int:
        """Write what the host keeps of a row; returns its top_k, the vocabulary's size for "all"."""
        row, sampling = start.pool_row, start.sampling
        edits = TokenEdits(start, self._eos_token_ids, self._vocab_size)
        top_k = self._vocab_size if sampling.top_k < 1 else min(sampling.top_k, self._vocab_size)
        self.kinds[row] = _kind(sampling, top_k < self._vocab_size)
        self.top_k[row] = top_k
        self.edits.pop(row, None)
        if edits:
            self.edits[row] = edits
            self.kinds[row] |= EDITED
        self.starts.pop(row, None)
        if start.logprobs is not None and (start.logprobs.output or start.logprobs.prompt_from >= 0):
            self.starts[row] = start
            self.kinds[row] |= LOGPROBS
        return top_k

    def temperature(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32[n] of int64[n] pool rows."""
        return self.floats[rows, 0]

    def top_p(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32[n] of int64[n] pool rows."""
        return self.floats[rows, 1]

    def min_p(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32[n] of int64[n] pool rows."""
        return self.floats[rows, 2]

    def penalties(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return repetition, frequency and presence penalty, each float32[n, 1], of int64[n] pool rows."""
        chosen = self.floats[rows]
        return chosen[:, 3:4], chosen[:, 4:5], chosen[:, 5:6]

    def device_top_k(self, rows: torch.Tensor) -> torch.Tensor:
        """Return int64[n] of int64[n] pool rows."""
        return self.integers[rows, 0]

    def seeds(self, rows: torch.Tensor) -> torch.Tensor:
        """Return int64[n] of int64[n] pool rows."""
        return self.integers[rows, 1]

    def edits_of(
        self, pool_rows: Int32Array, positions: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return (row of logits, token id, value to add) of all edits that the rows at `places` need."""
        rows, ids, values = [], [], []
        for place in places.tolist():
            edit = self.edits[int(pool_rows[place])]
            ends = edit.ends if positions[place] < edit.until else edit.ends[:0]
            # A token under both rules is out: its bias would otherwise be added twice to one place.
            free = ~np.isin(edit.ids, ends)
            ids += [edit.ids[free], ends]
            values += [edit.values[free], np.full(len(ends), -np.inf)]
            rows.append(np.full(int(free.sum()) + len(ends), place))
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(values)


def _kind(sampling: SamplingParams, limited: bool) -> int:
    kind = PENALISED if sampling.penalised else 0
    if sampling.greedy:
        return kind
    kind |= RANDOM
    if limited or sampling.top_p < 1.0:
        kind |= RANKED
    if sampling.min_p > 0.0:
        kind |= MIN_P
    return kind
