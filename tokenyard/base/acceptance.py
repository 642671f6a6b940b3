"""How likely drafts are to be right (speculative decoding): what executors tell the scheduler."""

from dataclasses import dataclass

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 2.0
DECAY = 0.9
"""What a row's record begins with, how many observations that is worth, and what is left of an old one in each step."""

MAX_ACCEPTANCE_RATE = 990
"""In thousandths: no draft is taken for certain."""


@dataclass(slots=True)
class AcceptanceRate:
    """How often a row's drafts were right, with old observations fading. Drafts count whether they were verified or
    not: a sampled token says either way whether the draft in its place was right.
    """

    right: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT

    def observe(self, right: int, refused: bool) -> None:
        """Take in that `right` drafts in a row were what the row sampled, and whether the next one was not."""
        if right or refused:
            self.right = DECAY * self.right + right
            self.tried = DECAY * self.tried + right + refused

    @property
    def chance(self) -> int:
        """The chance of a draft whose predecessors are right, in thousandths."""
        return min(MAX_ACCEPTANCE_RATE, round(1000 * self.right / self.tried))
