"""Lengths of answers whose end is unknown: refused requests, and those whose client disconnected."""

import numpy as np

from tokenyard.base import BoolArray, Float64Array, Int32Array

MIN_SIMILAR = 20
"""A tenant and class with fewer known lengths than this draws from its class, then from all requests."""


def survival_weights(lengths: Int32Array, ended: BoolArray) -> Float64Array:
    """float64[n], the probability of each length by the product-limit estimate (Kaplan and Meier 1958).

    `ended` False marks a length that is only a lower bound: its probability goes to longer ones. Its own weight is 0.
    The weights add up to less than 1 where the largest length is such a bound.
    """
    count = len(lengths)
    order = np.lexsort((~ended, lengths))
    at_risk = count - np.arange(count)
    share_ended = np.where(ended[order], 1.0 / np.maximum(at_risk, 1), 0.0)
    before = np.concatenate(([1.0], np.cumprod(1.0 - share_ended)[:-1])) if count else np.zeros(0)
    weights = np.zeros(count)
    weights[order] = before * share_ended
    return weights


def draw_lengths(seen: Int32Array, lengths: Int32Array, groups: list[Int32Array], seed: int) -> Int32Array:
    """int32[n], `lengths` with each unknown one drawn.

    A draw is longer than the part that was seen. If no similar answer was longer, the length is the number of tokens
    seen.

    seen: int32[n], tokens seen of an answer of unknown length, -1 where the length is known.
    groups: columns of small numbers, such as class and tenant, the coarsest first. An answer is drawn from those that
        agree in all of them, or in fewer where too few lengths are known.
    """
    unknown = seen >= 0
    drawn = np.where(unknown, np.maximum(seen, 1), lengths).astype(np.int32)
    if not unknown.any() or unknown.all():
        return drawn
    rng, ended = np.random.default_rng(seed), ~unknown
    for column, mask in _groups(ended, groups):
        weights = survival_weights(drawn[mask], ended[mask])
        order = np.argsort(drawn[mask], kind="stable")
        values, above = drawn[mask][order], np.cumsum(weights[order])
        rows = np.flatnonzero(column & unknown)
        begin = np.concatenate(([0.0], above))[np.searchsorted(values, seen[rows], side="right")]
        points = begin + rng.random(len(rows)) * (above[-1] - begin)
        places = np.minimum(np.searchsorted(above, points, side="right"), len(values) - 1)
        found = np.where(above[-1] - begin > 0.0, values[places], 0)
        drawn[rows] = np.maximum(found, np.maximum(seen[rows], 1))
    return drawn


def _groups(ended: BoolArray, columns: list[Int32Array]) -> list[tuple[BoolArray, BoolArray]]:
    """Pairs of masks, (whose lengths are drawn, what they are drawn from), which together cover every row."""
    pairs: list[tuple[BoolArray, BoolArray]] = []
    everything = np.ones(len(ended), np.bool_)

    def split(rows: BoolArray, source: BoolArray, level: int) -> None:
        if level == len(columns):
            pairs.append((rows, source))
            return
        for value in np.unique(columns[level][rows]):
            finer = rows & (columns[level] == value)
            enough = int((finer & ended).sum()) >= MIN_SIMILAR
            if enough:
                split(finer, finer, level + 1)
            else:
                pairs.append((finer, source))

    split(everything, everything, 0)
    return pairs
