"""How many examples a search tries: all of them in `make test-all`, a part in `make test`."""

import os

ALL = os.environ.get("TOKENYARD_TEST_ALL") == "1"
PART = 6
FEWEST = 5


def examples(count: int) -> int:
    """`count` in `make test-all`; otherwise a sixth of it, but at least five."""
    return count if ALL else max(count // PART, FEWEST)
