"""The acceptance rate of drafts (speculative decoding), which executors report to the scheduler."""

from dataclasses import dataclass

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 2.0
DECAY = 0.9
"""The prior acceptance rate of a row, its weight in observations, and the factor by which old observations decay."""

MAX_ACCEPTANCE_RATE = 990
"""In thousandths. No draft counts as certain."""


@dataclass(slots=True)
class AcceptanceRate:
    """How often a row's drafts were right; old observations decay.

    Drafts count whether they were verified or not, because the sampled token shows in both cases whether the draft in
    its place was right.
    """

    right: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT

    def observe(self, right: int, refused: bool) -> None:
        """Record that the first `right` drafts match what the row sampled; `refused`: the next draft does not."""
        if right or refused:
            self.right = DECAY * self.right + right
            self.tried = DECAY * self.tried + right + refused

    @property
    def chance(self) -> int:
        """The probability, in thousandths, that a draft is right if those before it are."""
        return min(MAX_ACCEPTANCE_RATE, round(1000 * self.right / self.tried))
