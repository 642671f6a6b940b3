"""Who gives way when pages run out: orders of running rows, first to go first."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from tokenyard.policy.views import Views, tokens_generated


class VictimRule(Protocol):
    """Orders the rows that run, so that the running ones can be kept alive when pages run out."""

    def victims(self, views: Views) -> Iterator[int]:
        """Running rows, the first to retract first. All rows are yielded."""


class FewestTokens:
    """SGLang's retraction order: the row with the fewest output tokens goes first; among equals the longest prompt."""

    def victims(self, views: Views) -> Iterator[int]:
        """See `VictimRule.victims`."""
        columns, rows = views.columns, views.running
        keys = (columns.seq[rows], -columns.prompt_tokens[rows], tokens_generated(columns, rows))
        return iter(rows[np.lexsort(keys)].tolist())


class Newest:
    """vLLM's order under fcfs: the latest arrival goes first, so the oldest request always moves on."""

    def victims(self, views: Views) -> Iterator[int]:
        """See `VictimRule.victims`."""
        rows = views.running
        return iter(rows[np.argsort(-views.columns.seq[rows], kind="stable")].tolist())
