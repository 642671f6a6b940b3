"""Decides which prompts another engine computes, and how long to wait for it. Engines and the simulator share it."""

MIN_OFFER_TIMEOUT_S = 5.0
MAX_OFFER_TIMEOUT_S = 60.0
OFFER_TIMEOUT_FACTOR = 4.0
"""Timeout of an offer, as a multiple of its predicted time."""


def should_prefill_remotely(role: str, uncached: int, min_tokens: int, here_s: float, there_s: float) -> bool:
    """Whether another engine computes a prompt with `uncached` tokens to compute.

    In role both it does if `there_s`, the seconds to compute and copy the KV, is less than `here_s`, the seconds to
    compute it here.
    """
    return uncached >= min_tokens and (role == "decode" or there_s < here_s)


def offer_timeout_s(predicted_s: float) -> float:
    """Timeout in seconds of an offer that is predicted to take `predicted_s`."""
    return min(max(OFFER_TIMEOUT_FACTOR * predicted_s, MIN_OFFER_TIMEOUT_S), MAX_OFFER_TIMEOUT_S)
