"""The ceiling of what predicting answers is worth: the same settings, told the true lengths."""

from dataclasses import replace
from typing import Any

from tokenyard.policy.short import ShortFirst
from tokenyard.sim.engine import Setup


def with_oracle(setup: Setup) -> Setup:
    """`setup` where each request's max_new_tokens is its true length, and whatever predicts lengths goes by that.

    That is the headroom, unless none is held back, and the order of short-first.
    """
    settings = setup.settings
    changes: dict[str, Any] = {} if settings.headroom == "none" else {"headroom": "limit"}
    if settings.schedule_policy == ShortFirst.name:
        # The longest answer so far, cut to max_new_tokens: the truth for all but the longest ones.
        changes["policy_options"] = {**settings.policy_options, "quantile": 1.0}
    return replace(setup, settings=replace(settings, **changes), oracle=True)
