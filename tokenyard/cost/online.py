"""A cost model that corrects itself from measured steps."""

import math
from dataclasses import replace

from tokenyard.base import ConfigError, StepWork
from tokenyard.cost.linear import MS_PER_S, LinearCost, LinearTerms

REFIT_STEPS = 32
SWEEPS = 32
MIN_TERM_RATIO, MAX_TERM_RATIO = 0.2, 2.0
MIN_STEP_S, MAX_STEP_S = 1e-9, 1e6
"""A measured time outside these bounds comes from a broken clock, and would overflow the floats of the fit."""

FITTED_TERMS = ("floor_ms", "dense_ms", "token_ms", "context_ms", "area_ms", "row_ms")
TYPICAL_MS = (5.0, 2.0, 0.02, 5e-5, 1e-6, 0.01)
"""Sizes of the fitted terms where the prior says zero, so that they can still be learnt."""


class OnlineCost:
    """Least squares with forgetting over the terms of `LinearCost`, starting from a prior.

    Errors count relative to the predicted time, so short decode steps weigh as much as long prefills. (Relative to the
    measured time, delayed steps would count less than others, and predictions for a busy device would be too short on
    average.) A prediction below `MIN_TERM_RATIO` or above `MAX_TERM_RATIO` of the measured time, from terms that are
    far off or for a step that stalled, counts relative to that share of it. Old steps fade by `forgetting` per step
    (recursive least squares with forgetting). The prior enters as a ridge of `prior_weight`, in units of squared shares
    of a step's time, so a term that hardly matters in the measured steps stays as it is. Every `REFIT_STEPS` steps the
    normal equations are solved by coordinate descent that keeps terms above or at zero. `relative_error` is the running
    mean of |predicted - measured| / measured, each step predicted before it is learnt.

    A fit by which steps would take no time is rejected: the last good terms stay, the measurements are dropped, and
    learning starts again from those terms. `rejected_fits` counts these.

    Only Python floats are used, in a fixed order, so that a tape replays alike anywhere.
    """

    learns = True

    def __init__(self, prior: LinearCost, forgetting: float = 0.995, prior_weight: float = 0.01) -> None:
        """Start from `prior`. Raises ConfigError unless 0 < forgetting <= 1 and prior_weight > 0."""
        if not 0.0 < forgetting <= 1.0 or not prior_weight > 0.0:
            raise ConfigError("forgetting must be above 0 and at most 1, prior_weight above 0")
        self._links = prior
        self._forgetting = forgetting
        self._ridge = prior_weight
        self.terms = _folded(prior.terms)
        self._prior = [float(getattr(self.terms, name)) for name in FITTED_TERMS]
        self._unit = [value or typical for value, typical in zip(self._prior, TYPICAL_MS, strict=True)]
        self._clear_statistics()
        self._since_refit = 0
        self.rejected_fits = 0
        self.steps_learned = 0
        self.relative_error = 0.0

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes by the present terms."""
        return self.terms.step(work) / MS_PER_S

    def copy(self, num_bytes: int, link: str) -> float:
        """Seconds to move `num_bytes` over `link`, by the prior."""
        return self._links.copy(num_bytes, link)

    def learn(self, work: StepWork, seconds: float) -> None:
        """Update the terms with a measured step. Empty steps and impossible times are ignored."""
        if not MIN_STEP_S <= seconds <= MAX_STEP_S or work.tokens <= 0:
            return
        measured_ms = seconds * MS_PER_S
        predicted_ms = self.terms.step(work)
        self._note_error(abs(predicted_ms - measured_ms) / measured_ms)
        self._accumulate(work, measured_ms, _scale(predicted_ms, measured_ms))
        self._since_refit += 1
        if self._since_refit >= REFIT_STEPS:
            self._since_refit = 0
            self.refit()

    def _note_error(self, error: float) -> None:
        self.steps_learned += 1
        share = max(1.0 / self.steps_learned, 1.0 - self._forgetting)
        self.relative_error += share * (error - self.relative_error)

    def _accumulate(self, work: StepWork, measured_ms: float, scale_ms: float) -> None:
        """Add one observation to the normal equations, everything as shares of `scale_ms`."""
        explained = (measured_ms - self.terms.tp_token_ms * work.tokens) / scale_ms
        features = _features(self.terms, work)
        shares = [x * unit / scale_ms for x, unit in zip(features, self._unit, strict=True)]
        keep = self._forgetting
        for i, x in enumerate(shares):
            row = self._gram[i]
            for j, y in enumerate(shares):
                row[j] = keep * row[j] + x * y
            self._moment[i] = keep * self._moment[i] + x * explained

    def refit(self) -> None:
        """Solve for the terms now: non-negative least squares from the present ones, with a ridge towards the prior.

        Terms that are not believable are rejected, and the present ones stay.
        """
        unit, gram = self._unit, self._gram
        prior = [value / one for value, one in zip(self._prior, unit, strict=True)]
        x = [getattr(self.terms, name) / one for name, one in zip(FITTED_TERMS, unit, strict=True)]
        for _ in range(SWEEPS):
            for i, row in enumerate(gram):
                others = sum(row[j] * x[j] for j in range(len(x)) if j != i)
                best = (self._moment[i] + self._ridge * prior[i] - others) / (row[i] + self._ridge)
                x[i] = max(best, 0.0)
        fitted = {name: value * one for name, value, one in zip(FITTED_TERMS, x, unit, strict=True)}
        if _is_plausible(fitted):
            self.terms = replace(self.terms, **fitted)
        else:
            self.rejected_fits += 1
            self._clear_statistics()

    def _clear_statistics(self) -> None:
        """Drop all measurements; the terms stay."""
        self._gram = [[0.0] * len(FITTED_TERMS) for _ in FITTED_TERMS]
        self._moment = [0.0] * len(FITTED_TERMS)


def _is_plausible(fitted: dict[str, float]) -> bool:
    """Whether all terms are finite and make a step of one token take some time."""
    one_token_ms = max(fitted["floor_ms"], fitted["dense_ms"] + fitted["token_ms"])
    return one_token_ms / MS_PER_S > MIN_STEP_S and all(map(math.isfinite, fitted.values()))


def _folded(terms: LinearTerms) -> LinearTerms:
    """The same times with the constant terms moved into floor and dense: a measurement cannot tell them apart."""
    constant = terms.step_ms + terms.tp_step_ms
    return replace(
        terms, step_ms=0.0, tp_step_ms=0.0, floor_ms=terms.floor_ms + constant, dense_ms=terms.dense_ms + constant
    )


def _scale(predicted_ms: float, measured_ms: float) -> float:
    """The time in ms that an error is relative to."""
    return min(max(predicted_ms, MIN_TERM_RATIO * measured_ms), MAX_TERM_RATIO * measured_ms)


def _features(terms: LinearTerms, work: StepWork) -> tuple[float, ...]:
    """The factor of each fitted term; the present terms decide whether a step is on the floor or on the line."""
    above = terms.dense_ms + terms.token_ms * work.tokens > terms.floor_ms
    line = (0.0, 1.0, float(work.tokens)) if above else (1.0, 0.0, 0.0)
    return (*line, float(work.decode_context), work.chunk_area, float(work.rows))
