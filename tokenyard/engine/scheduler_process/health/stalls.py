"""The log line about requests that wait although no step can be planned."""

import logging
from collections.abc import Mapping, Sequence

from tokenyard.scheduler.snapshot import Snapshot

logger = logging.getLogger(__name__)

HELD_REASONS = {
    "paused": "paused",
    "load": "until an abandoned KV load has ended",
    "group": "until another answer to the same prompt has begun",
}
"""Texts for what requests wait for, by cause of `Scheduler.held_back`; attachments have texts for other causes."""


def log_stall(state: Snapshot, held: Mapping[str, int], texts: Sequence[Mapping[str, str]], retry_s: float) -> None:
    """Log why no step can be planned.

    held: waiting requests by the cause that holds them back. texts: of the attachments, by cause. retry_s: seconds
    between tries.
    """
    ready = state.waiting - sum(held.values())
    if ready or not held:
        reason = f"{ready} of them may start, so this is a defect of the policy {state.policy}"
    else:
        reason = "; ".join(f"{count} {_text(cause, texts)}" for cause, count in held.items())
    logger.warning(
        "no step can be planned although %d requests wait: %s; trying again every %g s", state.waiting, reason, retry_s
    )


def _text(cause: str, texts: Sequence[Mapping[str, str]]) -> str:
    found = [one[cause] for one in (HELD_REASONS, *texts) if cause in one]
    return " or ".join(found) or f"held back ({cause})"
