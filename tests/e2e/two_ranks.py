"""`tokenyard` with an engine of two ranks, for tests: `python -m tests.e2e.two_ranks serve ...`."""

import sys

from tokenyard.cli import serve
from tokenyard.cli.main import main

one_rank = serve.engine_config


def two_ranks(settings):
    config = one_rank(settings)
    config.ranks = 2
    return config


serve.engine_config = two_ranks

if __name__ == "__main__":
    sys.exit(main())
