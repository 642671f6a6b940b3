"""Time stamps of traces: Unix seconds or ISO 8601, with all their digits."""

from contextlib import suppress
from datetime import UTC, datetime

from tokenyard.base import ConfigError

LAST_UNIX_SECOND = 1e11
"""Larger stamps count something smaller than seconds."""


def seconds_of(stamp: str, where: str) -> float:
    """Seconds of a plain number, or of a stamp like `2023-11-16 18:15:46.6805900` with all its digits."""
    with suppress(ValueError):
        return in_seconds(float(stamp), where)
    whole_part, _, fraction = stamp.partition(".")
    zone = fraction.lstrip("0123456789")
    try:
        moment = datetime.fromisoformat(whole_part + zone)
        digits = fraction[: len(fraction) - len(zone)]
        part = float(f"0.{digits}") if digits else 0.0
    except ValueError:
        raise ConfigError(f"{where}: {stamp!r} is no time stamp") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + part


def in_seconds(stamp: float, where: str) -> float:
    """`stamp` itself. Raises ConfigError if its unit is smaller than seconds."""
    if stamp > LAST_UNIX_SECOND:
        raise ConfigError(f"{where}: the time stamp is {stamp:.15g}; Unix seconds are needed, not milliseconds or less")
    return stamp
