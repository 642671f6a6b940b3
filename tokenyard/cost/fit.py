"""Fits the terms of the cost model to a set of measured steps; `OnlineCost` does it step by step while serving."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tokenyard.base import ConfigError
from tokenyard.cost.linear import MS_PER_S, LinearTerms, WorkSums

StepSample = tuple[WorkSums, float]
"""A step's work and the seconds it took."""

FITTED_TERMS = ("floor_ms", "dense_ms", "token_ms", "context_ms", "area_ms", "row_ms")
MIN_FLOOR_MS = 1e-6
MIN_SAMPLES = len(FITTED_TERMS) + 2


def fit_terms(samples: Sequence[StepSample], max_borders: int | None = None) -> LinearTerms:
    """The terms with the least squared relative error on `samples`, none below 0 (step_ms and the tp terms stay 0).

    Every number of tokens that occurs, or `max_borders` of them evenly, is tried as the border between steps on the
    floor and steps on the line in N. For a given border the terms are those of non-negative least squares. Its solution
    is the plain least-squares one on the terms above 0, so with six terms it is found by trying every subset. Raises
    ConfigError for fewer than `MIN_SAMPLES` samples or a time that is not above 0.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(
            f"{len(samples)} measured steps are too few to fit the cost terms; measure at least {MIN_SAMPLES}"
        )
    if not all(seconds > 0.0 for _, seconds in samples):
        raise ConfigError("a measured step took no time; step times must be above 0")
    borders = sorted({work.tokens for work, _ in samples})
    tried = [
        _fit_with_floor_below(samples, tokens)
        for tokens in borders[:: -(-len(borders) // (max_borders or len(borders)))]
    ]
    return min(tried, key=lambda terms: float(np.square(relative_errors(terms, samples)).sum()))


def relative_errors(terms: LinearTerms, samples: Sequence[StepSample]) -> npt.NDArray[np.float64]:
    """float64[n], by how much each sample is predicted too long (above 0) or too short, as a share of its time."""
    return np.array([terms.step(work) / (seconds * MS_PER_S) - 1.0 for work, seconds in samples])


def _fit_with_floor_below(samples: Sequence[StepSample], tokens: float) -> LinearTerms:
    """The fit if steps of fewer than `tokens` tokens are on the floor."""
    rows = [_features(work, work.tokens < tokens) for work, _ in samples]
    shares = np.array(rows) / np.array([[seconds * MS_PER_S] for _, seconds in samples])
    found = dict(zip(FITTED_TERMS, _non_negative(shares, np.ones(len(samples))).tolist(), strict=True))
    # The floor is at least where the line begins, and exactly there if no step is on the floor.
    found["floor_ms"] = max(found["floor_ms"], found["dense_ms"] + found["token_ms"], MIN_FLOOR_MS)
    return LinearTerms(step_ms=0.0, **found)


def _features(work: WorkSums, on_floor: bool) -> tuple[float, ...]:
    line = (1.0, 0.0, 0.0) if on_floor else (0.0, 1.0, float(work.tokens))
    return (*line, float(work.decode_context), work.chunk_area, float(work.rows))


def _non_negative(matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x >= 0 with the least |matrix @ x - wanted|, by trying every set of columns that may be above 0."""
    size = np.linalg.norm(matrix, axis=0)
    usable = np.flatnonzero(size > 0.0).tolist()
    best, best_error = np.zeros(matrix.shape[1]), float(wanted @ wanted)
    for count in range(1, len(usable) + 1):
        for chosen in map(list, combinations(usable, count)):
            scaled = matrix[:, chosen] / size[chosen]
            x = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
            error = float(np.square(scaled @ x - wanted).sum())
            if (x >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[chosen] = x / size[chosen]
    return best
