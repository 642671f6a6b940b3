"""Which request is next, how much one step does, which request is preempted. Policies order; they never allocate."""

from tokenyard.policy.base import Option, Policy
from tokenyard.policy.eviction_value import CachedPrefix, EvictionValue
from tokenyard.policy.queue_orders import best_first, in_groups
from tokenyard.policy.registry import POLICIES, create_policy
from tokenyard.policy.views import NO_DEADLINE, NO_PRIORITY, Columns, PrefixBranch, SessionState, Views

__all__ = [
    "NO_DEADLINE",
    "NO_PRIORITY",
    "POLICIES",
    "CachedPrefix",
    "Columns",
    "EvictionValue",
    "Option",
    "Policy",
    "PrefixBranch",
    "SessionState",
    "Views",
    "best_first",
    "create_policy",
    "in_groups",
]
