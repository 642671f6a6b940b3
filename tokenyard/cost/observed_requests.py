"""Step times from outside: cost terms fitted to when the tokens of requests arrived, as clients of any engine see it.

An engine that one cannot look into still shows its steps. Between the first and the last token of an answer of n tokens
lie n - 1 steps; what else was computed in that time is known from the other requests of the run. The mean work and the
mean time of these steps are a sample of the cost model, which is linear beyond its floor. A request that was alone
until its first token shows the time of its prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from tokenyard.base import ConfigError, Float64Array
from tokenyard.cost.fit import MIN_SAMPLES, StepSample, fit_terms, relative_errors
from tokenyard.cost.linear import MS_PER_S, LinearTerms

MIN_STEPS = 4
"""Answers with fewer tokens after the first are too short to show a step's time."""

HELD_OUT_EVERY = 4
MAX_FITTED = 100
"""More samples than this are thinned out evenly: they do not make the terms better, only the fit slower."""

MAX_BORDERS = 20
"""Means over many steps have all kinds of numbers of tokens; not each need be tried as the end of the floor."""

OVERHEADS_TRIED = 5
QUEUED_PERCENTILE = 10.0
"""Without requests that were alone, those that waited least show what passes outside the scheduler."""


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """A request as its client saw it. Times are seconds on one clock of the run.

    start_s, first_s, end_s: when it was sent, and when its first and its last token arrived.
    cached_tokens: tokens of the prompt that hit the prefix cache, as far as the engine says so.
    """

    start_s: float
    first_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for times out of order or counts that cannot be."""
        if not -inf < self.start_s <= self.first_s <= self.end_s < inf:
            raise ConfigError("a request's first token is before it was sent, or after its last one")
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ConfigError("a request has no prompt, no answer, or more cached tokens than its prompt has")


@dataclass(frozen=True, slots=True)
class MeanWork:
    """The mean work of several steps; fields as those of `base.StepWork`."""

    tokens: float
    rows: float
    decode_context: float
    chunk_area: float
    adapter_loads: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedFit:
    """What was fitted to requests.

    terms: the cost terms.
    request_ms: what passes outside the scheduler before a first token, per request.
    ttft_errors, tpot_errors: relative errors of a trial fit on held-out samples: of the time to the first token of
        requests that were alone, and of the mean time per further token. Empty where there are none.
    samples: number of samples behind the terms.
    """

    terms: LinearTerms
    request_ms: float
    ttft_errors: Float64Array
    tpot_errors: Float64Array
    samples: int

    @property
    def error(self) -> float:
        """The mean absolute relative error on all held-out samples."""
        return float(np.abs(np.concatenate([self.ttft_errors, self.tpot_errors])).mean())


def fit_requests(runs: Sequence[Sequence[ObservedRequest]]) -> ObservedFit:
    """The terms that explain the requests of `runs`, each on a clock of its own, with their error on held-out samples.

    Raises ConfigError if too few requests show the time of a step.
    """
    prefills = _thinned([sample for run in runs for sample in prefill_samples(run)])
    decodes = _thinned([sample for run in runs for sample in decode_samples(run)])
    count = len(prefills) + len(decodes)
    if count < MIN_SAMPLES + HELD_OUT_EVERY:
        raise ConfigError(
            f"only {count} requests show the time of a step; a fit needs {MIN_SAMPLES + HELD_OUT_EVERY} that were "
            f"alone until their first token or have at least {MIN_STEPS + 1} tokens"
        )
    (some_prefills, other_prefills), (some_decodes, other_decodes) = _split(prefills), _split(decodes)
    trial, overhead_s = _fit(some_prefills, some_decodes, runs)
    seen = [work for work, _ in other_prefills]
    predicted = np.array([overhead_s + trial.step(work) / MS_PER_S for work in seen])
    ttft_errors = predicted / np.array([seconds for _, seconds in other_prefills]) - 1.0
    terms, request_s = _fit(prefills, decodes, runs)
    return ObservedFit(terms, request_s * MS_PER_S, ttft_errors, relative_errors(trial, other_decodes), count)


def prefill_samples(run: Sequence[ObservedRequest]) -> list[StepSample]:
    """The prefill of each request that was alone until its first token, as one step, and its time to first token."""
    samples: list[StepSample] = []
    ordered = sorted(run, key=lambda one: one.start_s)
    busy_until = -np.inf
    for place, one in enumerate(ordered):
        followed = place + 1 < len(ordered) and ordered[place + 1].start_s < one.first_s
        if busy_until <= one.start_s and not followed:
            samples.append((_prefill(one), one.first_s - one.start_s))
        busy_until = max(busy_until, one.end_s)
    return [sample for sample in samples if sample[1] > 0.0]


def _prefill(one: ObservedRequest) -> MeanWork:
    tokens = max(one.prompt_tokens - one.cached_tokens, 1)
    return MeanWork(tokens, 1.0, 0.0, tokens * (one.cached_tokens + tokens / 2))


def decode_samples(run: Sequence[ObservedRequest]) -> list[StepSample]:
    """For each answer the mean work of the steps between its first and its last token, and their mean time.

    A request that was decoding for a part of that time counts with the tokens of this part, at the context it had in
    its middle; a prompt whose first token came in that time counts whole.
    """
    first, end = (np.array([getattr(one, name) for one in run]) for name in ("first_s", "end_s"))
    tokens = np.array([one.output_tokens - 1.0 for one in run])
    prompts = np.array([float(one.prompt_tokens) for one in run])
    prefills = [_prefill(one) for one in run]
    new, areas = np.array([one.tokens for one in prefills]), np.array([one.chunk_area for one in prefills])
    lasting = np.maximum(end - first, 1e-9)
    samples: list[StepSample] = []
    for place in range(len(run)):
        steps, begin, stop = tokens[place], first[place], end[place]
        if steps < MIN_STEPS or stop <= begin:
            continue
        low, high = np.maximum(first, begin), np.minimum(end, stop)
        rows = np.where(high > low, (high - low) / lasting * tokens, 0.0)
        contexts = prompts + ((low + high) / 2 - first) / lasting * tokens
        prefilled = (first > begin) & (first <= stop)
        work = MeanWork(
            tokens=float(rows.sum() + new[prefilled].sum()) / steps,
            rows=float(rows.sum() + np.count_nonzero(prefilled)) / steps,
            decode_context=float((rows * contexts).sum()) / steps,
            chunk_area=float(areas[prefilled].sum()) / steps,
        )
        samples.append((work, float(stop - begin) / steps))
    return samples


def _fit(
    prefills: Sequence[StepSample], decodes: Sequence[StepSample], runs: Sequence[Sequence[ObservedRequest]]
) -> tuple[LinearTerms, float]:
    """The terms, and the seconds per request outside the scheduler that explain the samples best with them."""
    if not prefills:
        terms = fit_terms(decodes, MAX_BORDERS)
        return terms, _least_overhead_s(terms, runs)
    most = min(seconds for _, seconds in prefills)
    tried: list[tuple[float, LinearTerms, float]] = []
    for overhead_s in np.linspace(0.0, most, OVERHEADS_TRIED, endpoint=False).tolist():
        samples = [*((work, seconds - overhead_s) for work, seconds in prefills), *decodes]
        terms = fit_terms(samples, MAX_BORDERS)
        predicted = np.array([overhead_s * MS_PER_S + terms.step(work) for work, _ in prefills])
        off = predicted / np.array([seconds * MS_PER_S for _, seconds in prefills]) - 1.0
        error = float(np.square(off).sum())
        if decodes:
            error += float(np.square(relative_errors(terms, decodes)).sum())
        tried.append((error, terms, overhead_s))
    _, terms, overhead_s = min(tried, key=lambda one: one[0])
    return terms, overhead_s


def _least_overhead_s(terms: LinearTerms, runs: Sequence[Sequence[ObservedRequest]]) -> float:
    """What the requests that waited least took to their first token beyond their own prefill, in seconds."""
    beyond = [one.first_s - one.start_s - terms.step(_prefill(one)) / MS_PER_S for run in runs for one in run]
    return max(float(np.percentile(beyond, QUEUED_PERCENTILE)), 0.0)


def _thinned(samples: list[StepSample]) -> list[StepSample]:
    """At most `MAX_FITTED` of the samples, evenly over the amount of work."""
    ordered = sorted(samples, key=lambda sample: (sample[0].tokens, sample[0].decode_context))
    return ordered[:: -(-len(ordered) // MAX_FITTED)] if ordered else ordered


def _split(samples: list[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """The samples of a trial fit, and every fourth, which it does not see."""
    held_out = samples[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return [one for place, one in enumerate(samples) if place % HELD_OUT_EVERY != HELD_OUT_EVERY // 2], held_out
