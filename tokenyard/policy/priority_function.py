"""User-defined priority functions (`--priority-function module:name`): the part that needs no clock.

A function gets two read-only views and returns how many levels of urgency to add. It is called outside the core, on
arrival and at intervals, and its time is measured. Its result enters as `Update(boost=...)`, so a tape replays without
the function.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import ConfigError

MAX_BOOST = 10**6
"""The most levels of urgency that a priority function can add or subtract."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a priority function sees of a request.

    prompt_tokens: tokens of its prompt.
    max_new_tokens: tokens of its longest possible answer.
    waited_s: seconds since its arrival.
    """

    priority: int | None
    tenant: str
    service_class: str | None
    prompt_tokens: int
    max_new_tokens: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class SystemView:
    """What a priority function sees of the system.

    waiting: number of waiting requests.
    running: number of running requests.
    kv_free: free share of the KV pool.
    attainment: per service class, the share of recent requests that met their targets.
    """

    waiting: int
    running: int
    kv_free: float
    attainment: dict[str, float] = field(default_factory=dict)


PriorityFunction = Callable[[RequestView, SystemView], float]


def load_priority_function(path: str) -> PriorityFunction:
    """The function at `module:name`. Raises ConfigError if it cannot be imported or is not callable."""
    found = load_object(path, "--priority-function")
    if not callable(found):
        raise ConfigError(f"--priority-function {path}: it is not callable")
    function: PriorityFunction = found
    return function


def to_boost(answer: object) -> int:
    """A function's result as whole levels, cut to `MAX_BOOST`. Raises ValueError unless it is a finite number."""
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
        raise ValueError(f"a priority function must return a finite number, not {answer!r}")
    return max(-MAX_BOOST, min(MAX_BOOST, round(answer)))


def load_object(path: str, flag: str) -> Any:
    """The object at `module:name`. Raises ConfigError, naming `flag`, if it cannot be imported."""
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f"{flag} {path}: write it as module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: importing {module_name} failed: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{flag} {path}: {module_name} has no {name}")
    return getattr(module, name)


def by_service_class(request: RequestView, system: SystemView) -> float:
    """Ten levels more for the class "high", ten less for "low"."""
    return {"high": 10.0, "low": -10.0}.get(request.service_class or "", 0.0)


def shed_long_prompts(request: RequestView, system: SystemView) -> float:
    """When the KV pool is nearly full, one level less for each doubling of the prompt beyond 1,024 tokens."""
    if system.kv_free > 0.1:
        return 0.0
    return -math.floor(math.log2(max(1.0, request.prompt_tokens / 1024)))


def close_target_gap(request: RequestView, system: SystemView) -> float:
    """Up to ten levels more for a service class that misses its targets, in proportion to the share it misses."""
    return 10.0 * (1.0 - system.attainment.get(request.service_class or "normal", 1.0))
