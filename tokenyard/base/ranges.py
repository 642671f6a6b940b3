"""The values that a number in the settings may have."""

from dataclasses import dataclass

from tokenyard.base.errors import ConfigError

MOST = 1e12
"""Larger counts and levels are mistakes, and would overflow their columns."""

MOST_S = 1e9
ABOVE_ZERO = 1e-6
MOST_PRIORITY = 2**31 - 1
LONGEST_MS = 1e10
"""Longer deadlines and targets are mistakes."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """From `least` to `most`, or the special value `other` with the meaning `meaning`."""

    least: float
    most: float = MOST
    other: float | None = None
    meaning: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Raise ConfigError, naming the setting, for a value that is not allowed. NaN never is, None (not set) is."""
        if value is None or self.least <= value <= self.most or value == self.other:
            return
        rule = "above 0" if self.least == ABOVE_ZERO else f"at least {self.least:g}"
        if self.most != MOST or not value < self.least:
            rule += f" and at most {self.most:.15g}"
        special = "" if self.other is None else f", or {self.other:g} ({self.meaning})"
        raise ConfigError(f"{name} is {value:.15g}; it must be {rule}{special}")


ANY_COUNT = Allowed(0)
POSITIVE_COUNT = Allowed(1)
POSITIVE = Allowed(ABOVE_ZERO)
SHARE = Allowed(0, 1)
COUNT_OR_NO_LIMIT = Allowed(1, other=-1, meaning="no limit")
SECONDS_OR_NO_LIMIT = Allowed(ABOVE_ZERO, MOST_S, other=-1, meaning="no limit")
TARGET_MS = Allowed(ABOVE_ZERO, LONGEST_MS)
