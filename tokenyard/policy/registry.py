"""Names of policies, as `--schedule-policy` takes them."""

import difflib

from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.policy import deadline, order
from tokenyard.policy.base import Policy

_ALL: list[type[Policy]] = [
    Policy,
    *order.POLICIES,
    *deadline.POLICIES,
]
POLICIES = {policy.name: policy for policy in _ALL}
"""Each module of policies lists its own in `POLICIES`."""


def create_policy(name: str, settings: SchedulerSettings) -> Policy:
    """The policy called `name`. Raises ConfigError with the nearest names if there is none."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(POLICIES))}"
        raise ConfigError(f"there is no schedule policy {name!r}; {hint}")
    return POLICIES[name](settings)
