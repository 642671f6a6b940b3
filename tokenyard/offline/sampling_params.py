"""`SamplingParams` of `LLM`, with the other fields that a request may have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenyard import base
from tokenyard.server.protocol import (
    ConstraintFields,
    SchedulingFields,
    SessionFields,
    StructuredOutputFields,
    TemplateFields,
    UnsupportedFields,
)

Params = base.SamplingParams | Mapping[str, Any] | None
"""Sampling params, or their fields as a dict; None for the model's defaults."""

_SAMPLING_FIELDS = {item.name for item in fields(base.SamplingParams)}
_OF_HTTP = (
    *(SchedulingFields, SessionFields, ConstraintFields, StructuredOutputFields, TemplateFields),
    UnsupportedFields,
)
REQUEST_FIELDS = {item.name for kind in _OF_HTTP for item in fields(kind)} | {
    *("logprobs", "top_logprobs", "skip_special_tokens", "no_stop_trim", "include_stop_str_in_output", "prediction"),
    *("parallel_tool_calls", "separate_reasoning"),
}
"""Fields of an HTTP body that `LLM` takes besides those of `base.SamplingParams`."""


@dataclass(init=False)
class SamplingParams(base.SamplingParams):
    """How tokens are sampled and when to stop: the fields of `base.SamplingParams`, in the forms a caller may give.

    `max_tokens` and `min_tokens` are other names for `max_new_tokens` and `min_new_tokens`, and `stop` may be a single
    string. A field that is None counts as not given. Without a `seed` each request draws one, so that equal prompts get
    different answers unless sampling is greedy.

    others: further fields of a request, with the names and values that they have over HTTP: `REQUEST_FIELDS`, such as
        json_schema, regex, structured_outputs, tools, logprobs, priority or session_id.
    """

    others: dict[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        stop: str | Sequence[str] | None = (),
        seed: int | None = None,
        others: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Raises TypeError for a field that does not exist."""
        if unknown := (given.keys() - _SAMPLING_FIELDS | (others or {}).keys()) - REQUEST_FIELDS:
            raise TypeError(f"there is no sampling parameter or request field {min(unknown)!r}")
        given = without_none(given)
        given |= {"max_new_tokens": max_tokens} if max_tokens is not None else {}
        given |= {"min_new_tokens": min_tokens} if min_tokens is not None else {}
        own = {name: given.pop(name) for name in _SAMPLING_FIELDS & given.keys()}
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        super().__init__(stop=stops, seed=seed, **own)  # type: ignore[arg-type]
        self.others = {**(others or {}), **given}


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are given."""
    return {name: value for name, value in given.items() if value is not None}
