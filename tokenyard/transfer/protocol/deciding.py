"""Which prompts go to another engine, and how long an offer may take: the same for engines and for the simulator."""

LEAST_PATIENCE_S = 5.0
LONGEST_PATIENCE_S = 60.0
PATIENCE = 4.0
"""An offer may take so many times as long as is believed."""


def worth_asking(role: str, uncached: int, least: int, here_s: float, there_s: float) -> bool:
    """Whether a prompt with `uncached` tokens to compute goes to another engine. In mode both it does if what waits
    there and the copy take less time than what waits here; the prompt itself takes as long in either place.
    """
    return uncached >= least and (role == "decode" or there_s < here_s)


def patience_s(believed_s: float) -> float:
    """How many seconds an offer is waited for that is believed to take `believed_s`."""
    return min(max(PATIENCE * believed_s, LEAST_PATIENCE_S), LONGEST_PATIENCE_S)
