"""Formats shares as percentages."""


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage, without the sign. A share below 1 is never shown as 100."""
    text = f"{100 * share:.{digits}f}"
    return f"{100 - 10**-digits:.{digits}f}" if share < 1 and float(text) == 100 else text
