"""What a request took of an engine's devices, by the engine's cost model. Pure.

An engine reports the terms of its cost model if they were measured: by a calibration, at its start, or by its steps.
The estimate counts what the request added to steps: its prompt's tokens that were not cached, and for each token of the
answer a share of a decode step, as one of the rows that were there. Nothing is counted where no model is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tokenyard.base import ConfigError
from tokenyard.cost import LinearTerms
from tokenyard.cost.linear import MS_PER_S


@dataclass(frozen=True, slots=True)
class EngineCost:
    """The cost model that an engine reports.

    terms: of a step, in milliseconds.
    devices: how many devices compute a step together.
    origin: how the terms are known.
    error: the mean relative error of its steps against it; None where none were compared.
    """

    terms: LinearTerms
    devices: int
    origin: str
    error: float | None = None

    @classmethod
    def from_report(cls, report: object) -> Self | None:
        """The cost model in a worker's /server_info; None without a usable one."""
        if not isinstance(report, Mapping) or not isinstance(report.get("terms"), Mapping):
            return None
        devices, error, origin = report.get("devices"), report.get("error"), report.get("origin")
        if type(devices) is not int or devices < 1 or not isinstance(origin, str) or not origin:
            return None
        try:
            terms = LinearTerms.from_mapping(report["terms"], "a worker")
        except ConfigError:
            return None
        known = type(error) in (int, float) and math.isfinite(float(str(error)))
        return cls(terms, devices, origin, float(str(error)) if known else None)

    def seconds(self, prompt: int, cached: int, answer: int, rows: int) -> float:
        """Device seconds of a request. rows: how many requests shared its decode steps, itself included."""
        terms, rows = self.terms, max(rows, 1)
        step = terms.step_ms + max(terms.floor_ms, terms.dense_ms + terms.token_ms * rows)
        step += terms.tp_step_ms + terms.tp_token_ms * rows
        decode = step / rows + terms.row_ms + terms.context_ms * (prompt + answer / 2)
        prefill = terms.chunk_ms(cached, max(prompt - cached, 0))
        return self.devices * (prefill + decode * answer) / MS_PER_S


@dataclass(slots=True)
class TenantUsage:
    """What the requests of a tenant for a model have used.

    gpu_seconds: of those whose engine reports a cost model.
    unknown_gpu_requests: how many others there are.
    origins: how these engines know their cost models.
    error: the largest mean error that any of them reported.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    gpu_seconds: float = 0.0
    unknown_gpu_requests: int = 0
    origins: set[str] = field(default_factory=set)
    error: float | None = None

    def add(self, prompt: int, cached: int, answer: int, cost: EngineCost | None, rows: int) -> None:
        """Count a request that has ended at an engine with this cost model, None if it reports none."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.answer_tokens += answer
        if cost is None:
            self.unknown_gpu_requests += bool(prompt or answer)
            return
        self.gpu_seconds += cost.seconds(prompt, cached, answer, rows)
        self.origins.add(cost.origin)
        if cost.error is not None:
            self.error = max(self.error or 0.0, cost.error)

    def row(self) -> dict[str, Any]:
        """The same for a report. Without a known cost model there are no GPU-seconds."""
        known = self.requests > self.unknown_gpu_requests
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "answer_tokens": self.answer_tokens,
            "gpu_seconds": round(self.gpu_seconds, 6) if known else None,
            "unknown_gpu_requests": self.unknown_gpu_requests,
            "cost_model": ", ".join(sorted(self.origins)) or "unknown",
            "step_time_error": None if self.error is None else round(self.error, 4),
        }
