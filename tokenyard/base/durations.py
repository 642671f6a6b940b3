"""Durations as Ollama's `keep_alive` writes them: seconds, or numbers with units such as 1h30m. Pure."""

import re

from tokenyard.base.errors import InvalidRequestError
from tokenyard.base.settings import NS_PER_S

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
MAX_S = 1e9


def parse_keep_alive(value: object) -> int | None:
    """Nanoseconds of a `keep_alive`; None for a negative one, which means for ever.

    Raises InvalidRequestError for anything else than a number of seconds or a duration such as "10m".
    """
    seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _seconds(value)
    if seconds is None or seconds != seconds:
        what = 'keep_alive must be a number of seconds or a duration such as "10m"; negative is for ever'
        raise InvalidRequestError(what, param="keep_alive")
    return None if seconds < 0 else round(min(seconds, MAX_S) * NS_PER_S)


def _seconds(value: object) -> float | None:
    if not isinstance(value, str) or not value.isascii():
        return None
    text = value.strip()
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d+(\.\d+)?", digits):
        return sign * float(digits)
    if not re.fullmatch(f"(?:{_PART.pattern})+", digits):
        return None
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(digits))
