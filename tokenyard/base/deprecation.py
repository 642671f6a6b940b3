"""Old names that are still accepted for one release."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("tokenyard")


def warn_renamed(old: str, new: str) -> None:
    """Log a warning that `old` is deprecated in favour of `new`."""
    log.warning("%s is deprecated and will be removed in the next release; use %s", old, new)


def accept_old_keys(given: Mapping[Any, Any], renamed: Mapping[str, str], where: str) -> dict[Any, Any]:
    """`given` with its keys renamed from old to new by `renamed`, and a warning for each old key.

    An old key next to its new one stays under its old name, so that the caller's check for unknown keys refuses it.
    `where` names the file in the warning.
    """
    found: dict[Any, Any] = {}
    for key, value in given.items():
        new = renamed.get(key) if isinstance(key, str) else None
        if new is None or new in given:
            found[key] = value
            continue
        warn_renamed(f"{where}: {key}", new)
        found[new] = value
    return found
