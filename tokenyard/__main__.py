"""`python -m tokenyard` is the same as `tokenyard`."""

import sys

from tokenyard.cli.main import main

sys.exit(main())
