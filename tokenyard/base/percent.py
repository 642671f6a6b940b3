"""How shares are shown."""


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a number of percent, without the sign. Only a share of 1 or more is shown as 100."""
    text = f"{100 * share:.{digits}f}"
    return f"{100 - 10**-digits:.{digits}f}" if share < 1 and float(text) == 100 else text
