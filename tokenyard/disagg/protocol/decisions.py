"""Which prompts go to another engine, and how long KV is waited for: the same for engines and for the simulator."""

from tokenyard.base import CostModel, StepWork

MIN_OFFER_TIMEOUT_S = 5.0
MAX_OFFER_TIMEOUT_S = 60.0
OFFER_TIMEOUT_FACTOR = 4.0
"""An offer may take this many times the predicted time."""

MAX_PREFETCH_S = 60.0
"""Prefetch policy wait_complete waits no longer either."""


def should_prefill_remotely(role: str, uncached: int, min_tokens: int, here_s: float, there_s: float) -> bool:
    """Whether a prompt with `uncached` tokens to compute goes to another engine. In mode both it does if it is computed
    and copied in `there_s`, less than the `here_s` in which it is computed here.
    """
    return uncached >= min_tokens and (role == "decode" or there_s < here_s)


def offer_timeout_s(predicted_s: float) -> float:
    """How many seconds an offer is waited for that is predicted to take `predicted_s`."""
    return min(max(OFFER_TIMEOUT_FACTOR * predicted_s, MIN_OFFER_TIMEOUT_S), MAX_OFFER_TIMEOUT_S)


def should_load_kv(cost: CostModel, cached: int, tokens: int, load_s: float) -> bool:
    """Whether loading the KV of tokens `cached` .. `tokens`, which takes `load_s` seconds, is predicted to be faster
    than computing it.
    """
    work = StepWork()
    work.add_chunk(cached, tokens - cached)
    return load_s < cost.step(work)


def prefetch_timeout_s(policy: str, timeout_s: float, timeout_per_1k_tokens_s: float, tokens: int) -> float:
    """How many seconds KV of `tokens` is waited for from the KV store, by prefetch policy."""
    max_s = timeout_s + timeout_per_1k_tokens_s * tokens / 1000
    return max(max_s, MAX_PREFETCH_S) if policy == "wait_complete" else max_s
