"""Routing policies by name."""

import difflib
import warnings
from collections.abc import Callable

from tokenyard.base import ConfigError
from tokenyard.routing.policies import (
    CacheAware,
    ConsistentHash,
    KvUsage,
    LeastLoad,
    LMetric,
    PolicyOptions,
    PowerOfTwo,
    PredictedTtft,
    PrefixHash,
    Random,
    RoundRobin,
    RoutePolicy,
    SessionAffinity,
    ShortestQueue,
    TotalTokens,
)
from tokenyard.routing.user_policy import load_route_policy

POLICIES: dict[str, Callable[[PolicyOptions], RoutePolicy]] = {
    kind.name: kind
    for kind in (
        PredictedTtft,
        LMetric,
        CacheAware,
        RoundRobin,
        Random,
        PowerOfTwo,
        LeastLoad,
        ShortestQueue,
        TotalTokens,
        KvUsage,
        PrefixHash,
        ConsistentHash,
    )
}
DEFAULT_POLICY = PredictedTtft.name
DEPRECATED_POLICIES = {"kv_room": KvUsage.name}
"""Old names of policies, accepted for one more release."""

POLICY_NAMES = (*POLICIES, *DEPRECATED_POLICIES)
"""Every name that `make_policy` accepts."""


def make_policy(
    name: str,
    options: PolicyOptions | None = None,
    *,
    sticky: bool = False,
    failed: Callable[[str], None] | None = None,
) -> RoutePolicy:
    """The policy called `name`, behind `SessionAffinity` if `sticky`.

    `module:Class` loads a user-defined policy; `failed` is called with the reason when it is replaced.
    Warns (FutureWarning) about a deprecated name. Raises ConfigError for an unknown one, and suggests similar names.
    """
    if name in DEPRECATED_POLICIES:
        current = DEPRECATED_POLICIES[name]
        warnings.warn(f"router policy {name!r} is deprecated; use {current!r}", FutureWarning, stacklevel=2)
        name = current
    options = options or PolicyOptions()
    if ":" in name:
        policy = load_route_policy(name, options, failed)
        return SessionAffinity(options, policy) if sticky else policy
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(sorted(POLICIES))}"
        raise ConfigError(f"unknown router policy {name!r}; {hint}")
    policy = POLICIES[name](options)
    return SessionAffinity(options, policy) if sticky else policy
