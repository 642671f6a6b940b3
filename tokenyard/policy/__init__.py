"""Who is next, how much a step does, who gives way. Policies order and judge; they never allocate."""

from tokenyard.policy.base import Policy
from tokenyard.policy.registry import POLICIES, create_policy
from tokenyard.policy.views import NO_DEADLINE, NO_PRIORITY, Columns, Views

__all__ = ["NO_DEADLINE", "NO_PRIORITY", "POLICIES", "Columns", "Policy", "Views", "create_policy"]
