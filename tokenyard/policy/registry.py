"""The policies by the names that `--schedule-policy` takes, and the wrappers that settings put around them."""

import difflib
from copy import deepcopy

from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.policy import adaptive, deadline, fair, hits_first, mlfq, programs, queue_orders, session, sjf
from tokenyard.policy.base import Policy
from tokenyard.policy.priority import Priority
from tokenyard.policy.priority_function import load_object
from tokenyard.policy.service_levels import ServiceLevels
from tokenyard.policy.user_policy import GuardedPolicy
from tokenyard.policy.wrappers import BoundedOvertaking

_LISTED: list[type[Policy]] = [
    Policy,
    *queue_orders.POLICIES,
    *sjf.POLICIES,
    *hits_first.POLICIES,
    *session.POLICIES,
    *programs.POLICIES,
    *mlfq.POLICIES,
    *deadline.POLICIES,
    *fair.POLICIES,
    *adaptive.POLICIES,
]
POLICIES = {policy.name: policy for policy in _LISTED}
"""Each module of policies lists its own in `POLICIES`. "priority" is fcfs with priority scheduling on."""

ALIASES = {"sjf": sjf.ShortestJobFirst.name}
"""Other names that `--schedule-policy` accepts, and the name in `POLICIES` that each stands for."""


def canonical_name(name: str) -> str:
    """The name in `POLICIES` that `name` stands for; any other name as it is."""
    return ALIASES.get(name, name)


def create_policy(name: str, settings: SchedulerSettings) -> Policy:
    """The policy called `name`, inside the wrappers that the settings ask for.

    From the inside out: the order itself, priorities, levels, the bound on overtaking. `my_pkg:MyPolicy` loads a
    user-defined policy. Raises ConfigError with the nearest names for an unknown name, and for a class that cannot be
    imported or made.
    """
    policy = _order(name, settings)
    if settings.uses_priorities and not policy.ranks_priorities:
        policy = Priority(settings, policy)
    if settings.enable_service_levels:
        policy = ServiceLevels(settings, policy)
    if settings.max_overtaken_tokens >= 0:
        policy = BoundedOvertaking(settings, policy)
    return policy


def _order(name: str, settings: SchedulerSettings) -> Policy:
    name = canonical_name(name)
    if ":" in name:
        return _guarded(load_policy(name), settings, name)
    if name == "priority":
        return Policy(settings)
    if name not in POLICIES:
        known = [*POLICIES, *ALIASES, "priority"]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(known))}"
        raise ConfigError(f"there is no schedule policy {name!r}; {hint}")
    return POLICIES[name](settings)


def load_policy(path: str) -> type[Policy]:
    """The class at `my_pkg:MyPolicy`. Raises ConfigError if it cannot be imported or is not a subclass of `Policy`."""
    found = load_object(path, "--schedule-policy")
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"--schedule-policy {path}: it is not a subclass of tokenyard.policy.Policy")
    return found


def _guarded(policy: type[Policy], settings: SchedulerSettings, path: str) -> Policy:
    try:
        return GuardedPolicy(settings, policy(deepcopy(settings)), path)
    except ConfigError:
        raise
    except BaseException as error:
        raise ConfigError(f"--schedule-policy {path}: making it failed: {error}") from error
