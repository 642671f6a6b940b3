"""The values that a number in the settings may have."""

from dataclasses import dataclass

from tokenyard.base.errors import ConfigError

MAX_COUNT = 1e12
"""Larger counts are mistakes and would overflow their columns."""

MAX_SECONDS = 1e9
ABOVE_ZERO = 1e-6
MAX_PRIORITY = 2**31 - 1
MAX_MS = 1e10
"""Longer deadlines and targets are mistakes."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers from `least` to `most`, and the special value `other`, which means `meaning`."""

    least: float
    most: float = MAX_COUNT
    other: float | None = None
    meaning: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Raise ConfigError, naming the setting, for a value that is not allowed. NaN never is, None (not set) is."""
        if value is None or self.least <= value <= self.most or value == self.other:
            return
        rule = "above 0" if self.least == ABOVE_ZERO else f"at least {self.least:g}"
        if self.most != MAX_COUNT or not value < self.least:
            rule += f" and at most {self.most:.15g}"
        special = "" if self.other is None else f", or {self.other:g} ({self.meaning})"
        raise ConfigError(f"{name} is {value:.15g}; it must be {rule}{special}")


ANY_COUNT = NumberRange(0)
POSITIVE_COUNT = NumberRange(1)
POSITIVE = NumberRange(ABOVE_ZERO)
SHARE = NumberRange(0, 1)
COUNT_OR_NO_LIMIT = NumberRange(1, other=-1, meaning="no limit")
SECONDS_OR_NO_LIMIT = NumberRange(ABOVE_ZERO, MAX_SECONDS, other=-1, meaning="no limit")
TARGET_MS = NumberRange(ABOVE_ZERO, MAX_MS)
