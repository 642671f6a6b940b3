"""The upper bound on the gain from predicting answers: the same settings, with the true lengths."""

from dataclasses import replace
from typing import Any

from tokenyard.policy.registry import canonical_name
from tokenyard.policy.sjf import ShortestJobFirst
from tokenyard.sim.simulate import Setup


def with_oracle(setup: Setup) -> Setup:
    """`setup` with each request's max_new_tokens set to its true length, which all predictions then use.

    The headroom predicts lengths, unless it is `none`, and so does the policy `short-first` (`sjf`).
    """
    settings = setup.settings
    changes: dict[str, Any] = {} if settings.headroom == "none" else {"headroom": "limit"}
    if canonical_name(settings.schedule_policy) == ShortestJobFirst.name:
        # The longest answer so far, cut to max_new_tokens: the truth for all but the longest ones.
        changes["policy_options"] = {**settings.policy_options, "quantile": 1.0}
    return replace(setup, settings=replace(settings, **changes), oracle=True)
