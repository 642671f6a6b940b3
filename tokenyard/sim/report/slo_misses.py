"""Which target a request missed, and which kinds of requests missed most."""

from collections.abc import Iterator

import numpy as np

from tokenyard.base import BoolArray
from tokenyard.sim.report.summary import length_classes
from tokenyard.sim.simulate import REJECTED, Outcome

MISSES = {
    "any": "missed its targets",
    "first": "the first token or the end was late",
    "token": "the time per token was too long",
    "both": "both",
    "refused": "refused",
    "unfinished": "not finished",
}
MAX_KINDS = 12
"""More classes or tenants than this are not listed one by one."""


def missed(outcome: Outcome) -> dict[str, BoolArray]:
    """Masks over the requests by what they missed, keys of `MISSES`; also "unserved": refused or not finished."""
    served = outcome.served
    with np.errstate(invalid="ignore"):
        first: BoolArray = served & (outcome.late_s > 0.0)
        token: BoolArray = served & ~(outcome.tpot_s <= outcome.setup.slo.per_token_s(outcome.workload))
    refused: BoolArray = outcome.status == REJECTED
    return {
        "any": ~outcome.met,
        "first": first,
        "token": token,
        "both": first & token,
        "refused": refused,
        "unfinished": ~served & ~refused,
        "unserved": ~served,
    }


def kinds_of(outcome: Outcome) -> Iterator[tuple[str, dict[str, BoolArray]]]:
    """Ways to group requests: a title, and masks by name.

    Always by prompt length; by other properties where there are several values.
    """
    lengths = length_classes(outcome)
    shown = {key.replace("_percent", " %").replace("_", " "): mask for key, mask in lengths.items() if mask.any()}
    yield "By prompt length", shown
    workload = outcome.workload
    for title, names, column in (
        ("By class", workload.classes, workload.service_class),
        ("By tenant", workload.tenants, workload.tenant),
    ):
        present = np.unique(column)
        if 2 <= len(present) <= MAX_KINDS:
            yield title, {names[index] or "none": column == index for index in present}
