"""Small workloads and setups for the simulator's tests."""

from dataclasses import replace

import numpy as np

from tokenyard.base import SchedulerSettings
from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.simulate import Setup
from tokenyard.sim.traces.prompt_ids import Content, UniqueContent
from tokenyard.sim.traces.workload import Workload, uniform_columns

CONTEXT = 40_000


def workload(*requests: tuple[float, int, int], content: Content | None = None) -> Workload:
    """Requests as (arrival in s, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    return uniform_columns(
        "small",
        arrivals.astype(np.float64),
        prompts.astype(np.int32),
        outputs.astype(np.int32),
        content or UniqueContent(),
    )


def setup(name: str = "sglang-default", settings: dict[str, object] | None = None, **changes: object) -> Setup:
    """An H100 with a preset and changes to its scheduler settings and to the setup."""
    chosen: SchedulerSettings = replace(preset(name, CONTEXT), **(settings or {}))
    return Setup(get_profile("h100", "llama-3-8b"), chosen, **changes)
