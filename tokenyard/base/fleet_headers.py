"""Headers by which a router tells an engine what it knows of a request.

An engine believes them from its fleet's router: from requests that do not carry a tenant's key. A router drops those
that clients send and writes its own.
"""

from tokenyard.base.settings import NS_PER_MS

AGE_HEADER = "x-tokenyard-age-ms"
"""Milliseconds since the request arrived at the router. An age, as the clocks of two machines differ."""

TENANT_HEADER = "x-tokenyard-tenant"
"""The tenant whose key the request carried at the router."""

BATCH_LINE_HEADER = "x-tokenyard-batch-line"
"""Of a line of a batch that a router keeps: other requests go first."""

MAX_AGE_MS = 24 * 3600 * 1e3


def age_text(age_ns: int) -> bytes:
    """The value of `AGE_HEADER`."""
    return b"%.3f" % (max(age_ns, 0) / NS_PER_MS)


def read_age_ns(text: str) -> int:
    """The age in ns that a header names, at most a day; 0 for none and for what is no age."""
    try:
        age_ms = float(text) if text else 0.0
    except ValueError:
        return 0
    return round(min(age_ms, MAX_AGE_MS) * NS_PER_MS) if age_ms > 0.0 else 0
