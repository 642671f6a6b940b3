"""How many examples a search tries: all of them in `make test-all`, half of them in CI, a part in `make test`."""

import os

ALL = os.environ.get("TOKENYARD_TEST_ALL") == "1"
CI = bool(os.environ.get("CI"))
"""Hypothesis draws the same examples each time where it is set, so more of them are no further search."""

PART = 6
FEWEST = 5


def examples(count: int) -> int:
    """`count` in `make test-all`, half of it in CI; otherwise a sixth of it. At least five."""
    part = PART if not ALL else 2 if CI else 1
    return max(count // part, FEWEST)
