"""The cost model in closed form: a step's time is a floor-or-line in its tokens plus what attention reads.

    time = step + max(floor, dense + token * N) + context * C + area * A + row * R + adapter * L + tp

with N all tokens of the step, C the KV tokens that decoding rows read, A the sum over prefill chunks of x * (prefix + x
/ 2), R the rows, and L the LoRA adapters loaded into slots of the device; tp is tp_step + tp_token * N. The floor is
the time to read the weights once. The form follows DistServe (Zhong et al. 2024) and the operator tables of Vidur
(Agrawal et al. 2024).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol, Self

import numpy as np

from tokenyard.base import ConfigError, CostModel, Float64Array, Int64Array, StepWork

MS_PER_S = 1000.0
UNLOADED_CHUNK_TOKENS = 8192
UNBOUNDED_TOKENS = 2**31 - 1


class WorkSums(Protocol):
    """The sums of a step's work that the formula reads: those of a `StepWork`, or means over many steps."""

    @property
    def tokens(self) -> float:
        """All tokens computed."""

    @property
    def rows(self) -> float:
        """All rows."""

    @property
    def decode_context(self) -> float:
        """KV tokens read by decoding rows."""

    @property
    def chunk_area(self) -> float:
        """Sum over chunks of x tokens of x * (prefix + x / 2)."""

    @property
    def adapter_loads(self) -> float:
        """LoRA adapters loaded into slots of the device."""


@dataclass(frozen=True, slots=True)
class LinearTerms:
    """The factors of the formula, all in milliseconds.

    step_ms: every step.
    floor_ms: reading the weights.
    dense_ms, token_ms: the line in N.
    context_ms: per KV token read by a decode.
    area_ms: per unit of chunk area.
    row_ms: per row.
    tp_step_ms, tp_token_ms: what tensor parallelism adds (all-reduces) per step and per token.
    adapter_ms: per LoRA adapter loaded into a slot.
    """

    step_ms: float
    floor_ms: float
    dense_ms: float
    token_ms: float
    context_ms: float
    area_ms: float
    row_ms: float = 0.0
    tp_step_ms: float = 0.0
    tp_token_ms: float = 0.0
    adapter_ms: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a term that is negative or not a finite number, and if a step would take no time."""
        for term in fields(self):
            value = getattr(self, term.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"cost term {term.name} is {value!r}; it must be a number of milliseconds")
            if not math.isfinite(value) or value < 0.0:
                raise ConfigError(f"cost term {term.name} is {value!r}; it must be finite and not negative")
        if self.step_ms + max(self.floor_ms, self.dense_ms + self.token_ms) <= 0.0:
            raise ConfigError("the cost terms make a step take no time; step_ms, floor_ms or token_ms must be above 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], source: str) -> "LinearTerms":
        """Terms from a parsed file. Raises ConfigError, naming `source`, for missing, unknown or bad terms."""
        known = {term.name for term in fields(cls)}
        required = known - {"row_ms", "tp_step_ms", "tp_token_ms", "adapter_ms"}
        missing = sorted(required - values.keys())
        unknown = sorted(values.keys() - known)
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has unknown terms {', '.join(unknown)}"
            raise ConfigError(f"{source}: the cost profile {what}; it needs {', '.join(sorted(required))}")
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.message}") from None

    def scaled(self, factor: float) -> "LinearTerms":
        """The terms of a device that takes `factor` times as long for everything."""
        return LinearTerms(*(getattr(self, term.name) * factor for term in fields(self)))

    def step(self, work: WorkSums) -> float:
        """Milliseconds that a step with this work takes."""
        tokens = work.tokens
        return (
            self.step_ms
            + max(self.floor_ms, self.dense_ms + self.token_ms * tokens)
            + self.context_ms * work.decode_context
            + self.area_ms * work.chunk_area
            + self.row_ms * work.rows
            + self.tp_step_ms
            + self.tp_token_ms * tokens
            + self.adapter_ms * work.adapter_loads
        )

    def decodes(self, rows: int, contexts: Int64Array) -> Float64Array:
        """Milliseconds of decode steps over `rows` rows, the i-th of which reads `contexts[i]` tokens of KV.

        float64[n], bit for bit the values of `step`.
        """
        before = self.step_ms + max(self.floor_ms, self.dense_ms + self.token_ms * rows)
        reading = before + self.context_ms * contexts.astype(np.float64)
        times: Float64Array = reading + self.row_ms * rows + self.tp_step_ms + self.tp_token_ms * rows
        return times

    def chunk_ms(self, prefix: int, tokens: int) -> float:
        """What a chunk of `tokens` after `prefix` adds to a step that is past the floor, in milliseconds."""
        return tokens * (self.token_ms + self.tp_token_ms + self.area_ms * (prefix + tokens / 2))

    def chunk_tokens(self, prefix: int, budget_ms: float) -> int:
        """The most tokens after `prefix` whose `chunk_ms` is at most `budget_ms` (the positive root of a parabola)."""
        if budget_ms <= 0.0:
            return 0
        slope = self.token_ms + self.tp_token_ms + self.area_ms * prefix
        if self.area_ms == 0.0:
            return int(budget_ms / slope) if slope else UNBOUNDED_TOKENS
        # This form of the root stays exact when area_ms is tiny compared with slope.
        return int(2.0 * budget_ms / (slope + math.sqrt(slope * slope + 2.0 * self.area_ms * budget_ms)))


@dataclass(frozen=True, slots=True)
class Link:
    """A way to move KV: bytes per second and the time before the first byte."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a speed that is not above 0 or a negative latency."""
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0.0):
            raise ConfigError(f"a link's bytes_per_s is {self.bytes_per_s!r}; it must be above 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0.0):
            raise ConfigError(f"a link's latency_s is {self.latency_s!r}; it must not be negative")


@dataclass(slots=True)
class LinearCost:
    """A fixed cost model (see `base.CostModel`): `terms` for steps and one `Link` per name for copies."""

    terms: LinearTerms
    links: dict[str, Link] = field(default_factory=dict)
    learns: ClassVar[bool] = False

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""
        return self.terms.step(work) / MS_PER_S

    def decodes(self, rows: int, contexts: Int64Array) -> Float64Array:
        """`step` for decode steps over `rows` rows that read `contexts` (int64[n]) tokens of KV each: float64[n]."""
        return self.terms.decodes(rows, contexts) / MS_PER_S

    def scaled(self, factor: float) -> Self:
        """The cost model of a device that takes `factor` times as long for everything."""
        return type(self)(self.terms.scaled(factor), dict(self.links))

    def copy(self, num_bytes: int, link: str) -> float:
        """Seconds to move `num_bytes` over `link`. Raises ConfigError for a link that the profile does not name."""
        if link not in self.links:
            raise ConfigError(
                f"the cost profile has no link {link!r}; it has {', '.join(sorted(self.links)) or 'none'}"
            )
        way = self.links[link]
        return way.latency_s + num_bytes / way.bytes_per_s

    def learn(self, work: StepWork, seconds: float) -> None:
        """Do nothing: the model is fixed. `OnlineCost` learns."""


def unloaded_prefill_s(cost: CostModel, prompt_tokens: int, chunk_tokens: int = UNLOADED_CHUNK_TOKENS) -> float:
    """Seconds to prefill a whole prompt alone on an idle device, nothing cached, in chunks of `chunk_tokens`.

    Latency targets that scale with the prompt's length are multiples of it.
    """
    seconds = 0.0
    for prefix in range(0, prompt_tokens, chunk_tokens):
        work = StepWork()
        work.add_chunk(prefix, min(chunk_tokens, prompt_tokens - prefix))
        seconds += cost.step(work)
    return seconds
