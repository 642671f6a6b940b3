"""Distributions of BLIS's workload specifications (github inference-sim/inference-sim, sim/workload/distribution.go,
arrival.go): gaps between arrivals, and lengths in tokens.
"""

from collections.abc import Callable
from math import gamma, inf, sqrt
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Float64Array
from tokenyard.sim.traces.spec_fields import known_fields
from tokenyard.sim.traces.trace_files import name_of, number
from tokenyard.sim.traces.workload import MAX_TOKENS

US_PER_S = 1e6
MIN_GAMMA_SHAPE = 0.01
"""BLIS draws a gamma process that is burstier than this as a Poisson process."""

Rng = np.random.Generator
Draw = Callable[[Rng, int], Float64Array]


def gaps(value: Any, where: str) -> tuple[Draw, float | None]:
    """Gaps with a mean of 1, and their mean in seconds if shape and scale fix it, else None: the rate does.

    Raises ConfigError for an unknown process and numbers out of range.
    """
    spec = known_fields(value, where, {"process", "cv", "shape", "scale"})
    process = name_of(spec, "process", where)
    cv = number(spec, "cv", where) if spec.get("cv") is not None else 1.0
    fitted = spec.get("shape") is not None and spec.get("scale") is not None
    shape, scale_us = (number(spec, key, where) if fitted else 1.0 for key in ("shape", "scale"))
    if not (cv > 0.0 and shape > 0.0 and scale_us > 0.0):
        raise ConfigError(f"{where}: cv, shape and scale must be above 0")
    if process == "constant":
        return lambda rng, n: np.ones(n), None
    if process == "poisson" or (process == "gamma" and not fitted and cv**-2 < MIN_GAMMA_SHAPE):
        return lambda rng, n: rng.exponential(1.0, n), None
    if process == "gamma":
        k = shape if fitted else cv**-2
        return lambda rng, n: rng.gamma(k, 1.0 / k, n), k * scale_us / US_PER_S if fitted else None
    if process == "weibull":
        k = shape if fitted else weibull_shape(cv)
        mean = gamma(1.0 + 1.0 / k)
        return lambda rng, n: rng.weibull(k, n) / mean, mean * scale_us / US_PER_S if fitted else None
    raise ConfigError(f"{where}: process is {process!r}; it must be poisson, gamma, weibull or constant")


def weibull_shape(cv: float) -> float:
    """The shape of a Weibull distribution with this coefficient of variation, by bisection from 0.1 to 100."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = (low + high) / 2.0
        one, two = gamma(1.0 + 1.0 / middle), gamma(1.0 + 2.0 / middle)
        low, high = (middle, high) if sqrt(two / one**2 - 1.0) > cv else (low, middle)
    return low


def lengths(value: Any, where: str) -> Draw:
    """Lengths in tokens, at least 1. Raises ConfigError for an unknown type and parameters that are missing."""
    spec = known_fields(value, where, {"type", "params", "file"})
    kind, params = name_of(spec, "type", where), spec.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"{where}: params must be fields with numbers")

    def get(name: str) -> float:
        return number(params, name, where)

    low = get("min") if "min" in params else 1.0
    high = get("max") if "max" in params else float(MAX_TOKENS - 1)

    def clamped(draw: Draw) -> Draw:
        return lambda rng, n: np.clip(np.rint(draw(rng, n)), max(low, 1.0), max(high, 1.0))

    if kind == "constant":
        fixed = get("value")
        return clamped(lambda rng, n: np.full(n, fixed))
    if kind == "gaussian":
        mean, deviation = get("mean"), get("std_dev")
        return clamped(lambda rng, n: rng.normal(mean, max(deviation, 0.0), n))
    if kind == "exponential":
        mean = get("mean")
        return clamped(lambda rng, n: rng.exponential(max(mean, 0.0), n))
    if kind == "lognormal":
        mu, sigma = get("mu"), get("sigma")
        return clamped(lambda rng, n: rng.lognormal(mu, max(sigma, 0.0), n))
    if kind == "pareto_lognormal":
        alpha, least, weight, mu, sigma = (get(key) for key in ("alpha", "xm", "mix_weight", "mu", "sigma"))
        if not (alpha > 0.0 and least > 0.0 and sigma >= 0.0):
            raise ConfigError(f"{where}: alpha and xm must be above 0, sigma at least 0")
        return clamped(
            lambda rng, n: np.where(
                rng.random(n) < weight, least * np.exp(rng.exponential(1.0 / alpha, n)), rng.lognormal(mu, sigma, n)
            )
        )
    if kind == "empirical" and params:
        return _empirical(params, where)
    if kind == "empirical":
        raise ConfigError(
            f"{where}: a distribution in a file is not read, by BLIS neither; write its values into params"
        )
    raise ConfigError(
        f"{where}: type is {kind!r}; it must be constant, gaussian, exponential, lognormal, pareto_lognormal or "
        "empirical"
    )


def _empirical(params: dict[str, Any], where: str) -> Draw:
    try:
        values = np.array([int(str(key)) for key in params], np.float64)
        shares = np.array([float(share) for share in params.values()])
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: params must be shares by number of tokens") from None
    if not (shares.min() >= 0.0 and 0.0 < shares.sum() < inf and values.min() > 0 and values.max() < MAX_TOKENS):
        raise ConfigError(f"{where}: shares must be at least 0, numbers of tokens from 1 to {MAX_TOKENS - 1}")
    return lambda rng, n: rng.choice(values, n, p=shares / shares.sum())


PARTS = ("image", "audio", "video")


def parts_of_a_prompt(value: Any, where: str) -> Draw:
    """Prompts of text, images, sounds and videos: the tokens of all parts together, at least 1, as BLIS counts them."""
    keys = {"text_distribution", *(f"{part}{end}_distribution" for part in PARTS for end in ("", "_count"))}
    spec = known_fields(value, where, keys)

    def of(key: str) -> Draw | None:
        return lengths(spec[key], f"{where}, {key}") if spec.get(key) else None

    text = of("text_distribution")
    parts = [(of(f"{part}_count_distribution"), of(f"{part}_distribution")) for part in PARTS]

    def draw(rng: Rng, n: int) -> Float64Array:
        total = text(rng, n) if text else np.zeros(n)
        for count, tokens in parts:
            if count is not None and tokens is not None:
                counts = count(rng, n).astype(np.int64)
                ends = np.cumsum(counts)
                sums = np.concatenate(([0.0], np.cumsum(tokens(rng, int(ends[-1]) if n else 0))))
                total = total + sums[ends] - sums[ends - counts]
        return np.maximum(total, 1.0)

    return draw
