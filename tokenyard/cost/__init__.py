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
from tokenyard.cost.step_table import Column, Grid, StepTable, TableCost, closest_terms, lower_terms

__all__ = [
    "Column",
    "Grid",
    "LinearCost",
    "LinearTerms",
    "Link",
    "OnlineCost",
    "Profile",
    "StepTable",
    "TableCost",
    "closest_terms",
    "find_profile",
    "fit_terms",
    "get_profile",
    "load_profile",
    "lower_terms",
    "profile_names",
    "relative_errors",
    "save_profile",
    "unknown_cpu",
    "unloaded_prefill_s",
]
