"""What the scripts of all clients share: the target on the command line, and one line of result.

A script is run by its client's own Python as `python check_NAME.py URL MODEL TOKENIZER`, where URL is the server's root
and TOKENIZER the folder that the model's tokenizer is in. It uses the client as its documentation says.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is tried."""

    url: str
    model: str
    tokenizer: str

    @property
    def v1(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.url}/v1"


Check = Callable[[Target], str | None]


def try_client(package: str, checks: Sequence[Check]) -> None:
    """Run all checks in order, print `PASS ...` or `FAIL ...` and exit with 0 or 1."""
    target = Target(*sys.argv[1:4])
    notes = []
    for check in checks:
        try:
            notes.append(check(target) or check.__name__.replace("_", " "))
        except Exception as error:
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAIL {package} {version(package)}: {check.__name__}: {reason[:300]}")
            sys.exit(1)
    print(f"PASS {package} {version(package)}: {', '.join(notes)}")


def expect(holds: object, what: str) -> None:
    """Raise AssertionError saying `what` unless `holds`."""
    if not holds:
        raise AssertionError(what)
