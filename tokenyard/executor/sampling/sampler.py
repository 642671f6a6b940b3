"""Samples one token for each row of a step by the parameters of its request."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import Int32Array, RowStart
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.forward_batch import upload
from tokenyard.executor.grammar import VocabMasks
from tokenyard.executor.sampling import top_k_top_p
from tokenyard.executor.sampling.penalties import Penalties
from tokenyard.executor.sampling.sampling_batch import EDITED, MIN_P, PENALISED, RANDOM, RANKED, SamplingRows

Int64Array = npt.NDArray[np.int64]


class Sampler:
    """Turns logits into tokens on the device, with the parameters kept by pool row.

    The order is: logit_bias and the ban on early ends, penalties, what a grammar allows, then for rows that are not
    greedy temperature, top_k, top_p, min_p and the draw. A draw depends on the row's logits, its seed and the position
    of the token alone. A step whose rows are all greedy and plain costs one argmax.
    """

    def __init__(
        self,
        max_pool_rows: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        sampling_backend: top_k_top_p.SamplingBackend | None = None,
    ) -> None:
        """Start with no rows. sampling_backend: None to sample by torch."""
        self.sampling_backend = sampling_backend
        self.likeliest = top_k_top_p.likeliest if sampling_backend is None else sampling_backend.likeliest
        self.rows = SamplingRows(max_pool_rows, vocab_size, eos_token_ids, device)
        self._penalties = Penalties(max_pool_rows, vocab_size, device)
        self._device = device

    def take(self, starts: list[RowStart]) -> None:
        """Take over rows that start."""
        self.rows.take(starts)
        for start in starts:
            self._penalties.take(start)

    def sample(
        self, logits: torch.Tensor, pool_rows: Int32Array, positions: Int64Array, masks: VocabMasks | None = None
    ) -> torch.Tensor:
        """Choose tokens: int64[n] on the device.

        logits: float32[n, vocabulary], which this changes. pool_rows: int32[n] and positions: int64[n], on the host;
        a position is that of the token being sampled. masks: what grammars allow.
        """
        kinds = self.rows.kinds[pool_rows]
        needed = int(np.bitwise_or.reduce(kinds, initial=0))
        if needed & EDITED:
            self._edit(logits, pool_rows, positions, np.flatnonzero(kinds & EDITED))
        if needed & PENALISED:
            self._penalise(logits, pool_rows, np.flatnonzero(kinds & PENALISED))
        if masks is not None:
            masks.apply(logits)
        tokens = self.likeliest(logits)
        if needed & RANDOM:
            self._draw(logits, tokens, pool_rows, positions, np.flatnonzero(kinds & RANDOM))
        if needed & PENALISED:
            penalised = np.flatnonzero(kinds & PENALISED)
            self._penalties.count(pool_rows[penalised], tokens[upload((penalised,), self._device)[0]])
        return tokens

    def is_greedy(self, pool_rows: Int32Array) -> bool:
        """Whether rows (int32[n]) take their likeliest tokens as they are, without bias or penalty."""
        return not self.rows.kinds[pool_rows].any()

    def guess(self, logits: torch.Tensor, pool_rows: Int32Array, positions: Int64Array) -> torch.Tensor:
        """What rows would sample at positions by the logits of another model, int64[n]: with their own temperature and
        the noise of these positions, without penalties, bias and grammar. Nothing is counted.
        """
        kinds = self.rows.kinds[pool_rows]
        tokens = self.likeliest(logits)
        if int(np.bitwise_or.reduce(kinds, initial=0)) & RANDOM:
            self._draw(logits, tokens, pool_rows, positions, np.flatnonzero(kinds & RANDOM))
        return tokens

    def sample_runs(
        self,
        logits: torch.Tensor,
        pool_rows: Int32Array,
        positions: Int64Array,
        drafts: Int32Array,
        masks: VocabMasks | None = None,
    ) -> torch.Tensor:
        """`sample` where rows sample at several positions, each of which confirms a draft: int64[n] on the device.

        drafts: int32[n] on the host, -1 behind a row's last draft, DRAFT for one that its grammar has withdrawn, which
        no token confirms. A row with penalties samples one position after the other, as long as its drafts are right,
        because each token changes the penalties of the next. Behind a draft that is wrong its tokens are -1.
        """
        follows = np.append(False, drafts[:-1] != -1)
        waits = follows & (self.rows.kinds[pool_rows] & PENALISED != 0)
        if not waits.any():
            return self.sample(logits, pool_rows, positions, masks)
        now = np.flatnonzero(~waits)
        index = upload((now,), self._device)[0]
        tokens = torch.full((len(pool_rows),), -1, dtype=torch.int64, device=self._device)
        tokens[index] = self.sample(logits[index], pool_rows[now], positions[now], masks and masks.among(now))
        while True:
            right = tokens.cpu().numpy() == drafts
            now = np.flatnonzero(waits & np.append(False, right[:-1]))
            if not len(now):
                return tokens
            index = upload((now,), self._device)[0]
            tokens[index] = self.sample(logits[index], pool_rows[now], positions[now], masks and masks.among(now))
            waits[now] = False

    def _edit(self, logits: torch.Tensor, pool_rows: Int32Array, positions: Int64Array, places: Int64Array) -> None:
        rows, ids, values = self.rows.edits_of(pool_rows, positions, places)
        index = upload((rows, ids), self._device)
        logits[index[0], index[1]] += to_device(values.astype(np.float32), self._device)

    def _penalise(self, logits: torch.Tensor, pool_rows: Int32Array, places: Int64Array) -> None:
        own = pool_rows[places]
        index = upload((places, own), self._device)
        logits[index[0]] = self._penalties.apply(logits[index[0]], own, index[1], self.rows)

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        pool_rows: Int32Array,
        positions: Int64Array,
        places: Int64Array,
    ) -> None:
        """Replace the tokens of the rows at `places` by drawn ones."""
        own = pool_rows[places]
        index = upload((places, own, positions[places]), self._device)
        draws = top_k_top_p.SamplingInputs(index[0], index[1], index[2], tokens, self.rows)
        if self.sampling_backend is not None:
            tokens[index[0]] = self.sampling_backend.draw(logits, draws)
            return
        scaled = logits[index[0]] / self.rows.temperature(index[1])[:, None]
        self._drop_by_rank(scaled, own)
        if (self.rows.kinds[own] & MIN_P).any():
            scaled = top_k_top_p.apply_min_p(scaled, self.rows.min_p(index[1]))
        tokens[index[0]] = top_k_top_p.draw(scaled, draws.uniforms())

    def _drop_by_rank(self, scaled: torch.Tensor, pool_rows: Int32Array) -> None:
        """Apply top_k and top_p, in place, to the rows that have one; ranking the others would be for nothing."""
        places = np.flatnonzero(self.rows.kinds[pool_rows] & RANKED)
        if not len(places):
            return
        own = pool_rows[places]
        index = upload((places, own), self._device)
        max_k = int(self.rows.top_k[own].max())
        scaled[index[0]] = top_k_top_p.apply_top_k_top_p(
            scaled[index[0]], self.rows.device_top_k(index[1]), self.rows.top_p(index[1]), max_k
        )
