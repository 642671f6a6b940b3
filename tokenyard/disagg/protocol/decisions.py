"""Decides which prompts another engine computes, and how long to wait for KV. Engines and the simulator share it."""

from tokenyard.base import CostModel, StepWork

MIN_OFFER_TIMEOUT_S = 5.0
MAX_OFFER_TIMEOUT_S = 60.0
OFFER_TIMEOUT_FACTOR = 4.0
"""Timeout of an offer, as a multiple of its predicted time."""

MAX_PREFETCH_S = 60.0
"""Longest wait of prefetch policy wait_complete, unless the settings ask for a longer timeout."""


def should_prefill_remotely(role: str, uncached: int, min_tokens: int, here_s: float, there_s: float) -> bool:
    """Whether another engine computes a prompt with `uncached` tokens to compute.

    In role both it does if `there_s`, the seconds to compute and copy the KV, is less than `here_s`, the seconds to
    compute it here.
    """
    return uncached >= min_tokens and (role == "decode" or there_s < here_s)


def offer_timeout_s(predicted_s: float) -> float:
    """Timeout in seconds of an offer that is predicted to take `predicted_s`."""
    return min(max(OFFER_TIMEOUT_FACTOR * predicted_s, MIN_OFFER_TIMEOUT_S), MAX_OFFER_TIMEOUT_S)


def should_load_kv(cost: CostModel, cached: int, tokens: int, load_s: float) -> bool:
    """Whether loading the KV of tokens `cached` .. `tokens`, which takes `load_s` seconds, is predicted to be faster
    than computing it.
    """
    work = StepWork()
    work.add_chunk(cached, tokens - cached)
    return load_s < cost.step(work)


def prefetch_timeout_s(policy: str, timeout_s: float, timeout_per_1k_tokens_s: float, tokens: int) -> float:
    """Timeout in seconds of a load of `tokens` from the KV store, by prefetch policy."""
    max_s = timeout_s + timeout_per_1k_tokens_s * tokens / 1000
    return max(max_s, MAX_PREFETCH_S) if policy == "wait_complete" else max_s
