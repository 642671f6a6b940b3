"""What one paper of the zoo claims, and how our experiment differs from it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One paper.

    name: of its policy.
    paper: title and where it is.
    claim: the figure in its abstract or first experiment.
    differs: in what our setting is another one.
    measure: runs the experiment; returns our figure in words. Virtual time, so the same on every machine.
    """

    name: str
    paper: str
    claim: str
    differs: str
    measure: Callable[[], str]
