"""The cost model: `StepWork` to seconds, in one form for simulator, deadlines, budgets and router."""

from tokenyard.cost.fit import fit_terms, relative_errors
from tokenyard.cost.linear import LinearCost, LinearTerms, Link, unloaded_prefill_s
from tokenyard.cost.online import OnlineCost
from tokenyard.cost.profiles import (
    Profile,
    find_profile,
    get_profile,
    load_profile,
    profile_names,
    save_profile,
    unknown_cpu,
)

__all__ = [
    "LinearCost",
    "LinearTerms",
    "Link",
    "OnlineCost",
    "Profile",
    "find_profile",
    "fit_terms",
    "get_profile",
    "load_profile",
    "profile_names",
    "relative_errors",
    "save_profile",
    "unknown_cpu",
    "unloaded_prefill_s",
]
