"""What the holder of an API key may do, and how much of it in a minute. Pure.

A limit is a token bucket (RFC 2697): it starts full with one minute's worth and refills steadily. A request takes its
prompt when it is admitted, and its answer when it has ended, so the bucket of tokens can be overdrawn by the answers
that are open; nothing is admitted until it is positive again.
"""

from dataclasses import dataclass, field

from tokenyard.base import NS_PER_S

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What one API key allows. A limit of 0 is none."""

    tenant: str
    """Whose key it is. Keys of one tenant share its limits only if they are the same key."""
    expires_s: float = 0.0
    """Unix time from which on it is refused; 0 for never."""
    requests_per_minute: float = 0.0
    """Requests admitted in a minute."""
    tokens_per_minute: float = 0.0
    """Prompt and answer tokens in a minute."""
    max_open_requests: int = 0
    """Requests that are open at a time, queued or sent."""
    max_priority: int | None = None
    """The highest priority that its requests may have; None for any."""
    models: frozenset[str] = frozenset()
    """Models and adapters that it may name; empty for all."""


@dataclass(slots=True)
class Bucket:
    """A token bucket."""

    per_minute: float
    level: float = 0.0
    filled_ns: int = 0

    def refill(self, now: int) -> float:
        """The level at `now` (ns)."""
        if not self.filled_ns:
            self.level = self.per_minute
        else:
            grown = (now - self.filled_ns) / NS_PER_S * self.per_minute / MINUTE_S
            self.level = min(self.level + grown, self.per_minute)
        self.filled_ns = now
        return self.level


@dataclass(slots=True, weakref_slot=True)
class KeyUsage:
    """The limits and the open requests of one key."""

    grant: KeyGrant
    requests: Bucket = field(init=False)
    tokens: Bucket = field(init=False)
    open_requests: int = 0

    def __post_init__(self) -> None:
        self.requests, self.tokens = Bucket(self.grant.requests_per_minute), Bucket(self.grant.tokens_per_minute)

    def admit(self, prompt_tokens: int, now: int) -> str:
        """Count a request, or return what it would exceed, "" for nothing. Times are ns of one clock from above 0."""
        grant = self.grant
        if grant.max_open_requests and self.open_requests >= grant.max_open_requests:
            return f"{grant.max_open_requests} open requests"
        if grant.requests_per_minute and self.requests.refill(now) < 1.0:
            return f"{grant.requests_per_minute:g} requests a minute"
        if grant.tokens_per_minute and self.tokens.refill(now) <= 0.0:
            return f"{grant.tokens_per_minute:g} tokens a minute"
        self.requests.level -= 1.0
        self.tokens.level -= prompt_tokens
        self.open_requests += 1
        return ""

    def ended(self, more_tokens: int) -> None:
        """A counted request has ended with so many tokens beyond those that were taken for it."""
        self.open_requests -= 1
        self.tokens.level -= more_tokens
