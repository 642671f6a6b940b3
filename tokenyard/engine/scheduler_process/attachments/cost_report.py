"""Reports the scheduler's cost model to those who account for step times: routers, and readers of /server_info."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tokenyard.cost import LinearCost, OnlineCost
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.tape.recorder import Core

LEARNED_STEPS = 1000
"""Measured steps after which terms that began as a guess count as known."""


class CostReport(Attachment):
    """Reports the terms of the cost model where they are known, and how.

    origin: how the first ones are known, "" for the guess that a device without measurements gets.
    devices: how many devices compute a step together.
    """

    name = "cost"

    def __init__(self, core: Core, origin: str, devices: int) -> None:
        self._core, self._origin, self._devices = core, origin, devices

    def describe(self, now: int) -> Mapping[str, Any]:
        """The cost model; nothing while it is a guess."""
        cost, origin, error = self._core.cost, self._origin, None
        if not isinstance(cost, LinearCost | OnlineCost):
            return {}
        if isinstance(cost, OnlineCost) and cost.steps_learned:
            error = cost.relative_error
            if origin:
                origin = f"{origin}, corrected by steps"
            elif cost.steps_learned >= LEARNED_STEPS:
                origin = "learned from steps"
        if not origin:
            return {}
        report = {"origin": origin, "error": error, "devices": self._devices, "terms": asdict(cost.terms)}
        return {"cost_model": report}
