"""How long requests wait for a KV store: what processes know of it that run none."""

from dataclasses import dataclass

PREFETCH_POLICIES = ("timeout", "wait_complete", "best_effort")
MAX_PREFETCH_S = 60.0
"""Longest wait of prefetch policy wait_complete, unless the settings ask for a longer timeout."""


@dataclass(frozen=True, slots=True)
class KvStoreLimits:
    """How long requests wait for stored KV, and how fast KV is written."""

    write_mb_s: float = 256.0
    """Most megabytes per second that are written to a disk; 0 for no limit."""
    prefetch_policy: str = PREFETCH_POLICIES[0]
    """How long a request waits: "best_effort" (not at all), "wait_complete", or "timeout"."""
    timeout_s: float = 1.0
    """The timeout, in seconds."""
    timeout_per_1k_tokens_s: float = 0.25
    """What 1,000 tokens add to it, in seconds."""

    def prefetch_timeout_s(self, tokens: int) -> float:
        """Timeout in seconds of a load of `tokens` tokens."""
        max_s = self.timeout_s + self.timeout_per_1k_tokens_s * tokens / 1000
        return max(max_s, MAX_PREFETCH_S) if self.prefetch_policy == "wait_complete" else max_s
