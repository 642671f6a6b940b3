"""From parsed request bodies to `SamplingParams` and `GenerateReqInput`; refuses unsupported fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenyard.base import InvalidRequestError, SamplingParams, Slo, TextOptions
from tokenyard.engine.frontend.input_processor import check_priority, ns_from_ms
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.server.protocol import (
    ChatRequest,
    NativeRequest,
    OpenAIFields,
    SamplingFields,
    SchedulingFields,
    SloFields,
    UnsupportedFields,
)

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
MAX_LABEL_CHARS = 256
DEFAULT_CLASS = "default"


def new_generate_input(
    fields: SchedulingFields,
    headers: Mapping[str, str],
    targets: Mapping[str, Slo],
    *,
    tenant: str = "",
    rid: str | None = None,
) -> GenerateReqInput:
    """A spec with tenant, id, priority and rank, from the body and the headers X-Request-Id, X-Tenant, X-Priority and
    X-Data-Parallel-Rank.

    The body overrides the headers; the arguments `rid` and `tenant` override both. `user` is the tenant if nothing else
    is. Latency targets that the request does not set come from `targets` of its class, or of the class "default".
    Raises InvalidRequestError for a priority that is neither a number nor a word, and for a deadline, target or number
    that is out of range.
    """
    priority, service_class = _priority(fields.priority if fields.priority is not None else headers.get("x-priority"))
    if fields.service_tier is not None:
        if fields.service_tier not in SERVICE_TIERS:
            raise InvalidRequestError(f"service_tier must be one of {', '.join(SERVICE_TIERS)}", param="service_tier")
        if fields.service_tier != "auto":
            service_class = service_class or fields.service_tier
    check_priority(priority)
    ns_from_ms(fields.deadline_ms, "deadline_ms")
    if rid is None:
        rid = fields.rid if isinstance(fields.rid, str) else headers.get("x-request-id", "")
    return GenerateReqInput(
        rid=_label(rid, "rid"),
        priority=priority,
        service_class=service_class,
        tenant=_label(tenant or fields.tenant or headers.get("x-tenant") or fields.user or "", "tenant"),
        deadline_ms=fields.deadline_ms,
        slo=_slo(fields, targets.get(service_class or DEFAULT_CLASS)),
        cache_salt=_cache_salt(fields),
        routing_key=fields.routing_key,
        rank=_rank(fields, headers),
    )


def _rank(fields: SchedulingFields, headers: Mapping[str, str]) -> int | None:
    """The data-parallel rank for the request, None for any. Whether it exists is not checked here.

    Under PD disaggregation `data_parallel_rank` may be the rank of the other half, so `routed_dp_rank` comes first.
    Raises InvalidRequestError for a header that is not a number.
    """
    for given in (fields.routed_dp_rank, fields.data_parallel_rank):
        if given is not None:
            return given
    header = headers.get("x-data-parallel-rank")
    if header is None:
        return None
    if not header.strip().isdecimal() or len(header) > 9:
        raise InvalidRequestError("X-Data-Parallel-Rank must be a number from 0", param="data_parallel_rank")
    return int(header)


def _cache_salt(fields: SchedulingFields) -> str:
    """The request's namespace in the prefix cache: `cache_salt`, and SGLang's `extra_key` if given."""
    salt, extra = _label(fields.cache_salt or "", "cache_salt"), _label(fields.extra_key or "", "extra_key")
    return f"{salt}\n{extra}" if extra else salt


def _label(text: str, param: str) -> str:
    """`text`, if it is within the length limit. Raises InvalidRequestError otherwise."""
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequestError(f"{param} is longer than {MAX_LABEL_CHARS} characters", param=param)
    return text


def _priority(value: int | str | None) -> tuple[int | None, str | None]:
    """A number as (priority, None), a word such as "high" as (None, class)."""
    if value is None or isinstance(value, int):
        return value, None
    text = value.strip()
    if text.lstrip("+-").isdecimal() and len(text) < 16:
        return int(text), None
    if not text.isalpha() or len(text) > 32:
        raise InvalidRequestError("priority must be a whole number or a word such as high", param="priority")
    return None, text.lower()


def _slo(fields: SchedulingFields, targets: Slo | None) -> Slo | None:
    """Latency targets in nanoseconds: the request's own, else those of its class. The request's own deadline overrides
    the time to first token of its class.
    """
    if fields.slo is None and targets is None:
        return None
    own = fields.slo or SloFields()
    ttft, tpot = ns_from_ms(own.ttft_ms, "slo.ttft_ms"), ns_from_ms(own.tpot_ms, "slo.tpot_ms")
    if targets is not None:
        ttft = targets.ttft_ns if ttft is None and fields.deadline_ms is None else ttft
        tpot = targets.tpot_ns if tpot is None else tpot
    return Slo(ttft, tpot)


def parse_sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, float | int],
    *,
    max_new_tokens: int,
    min_new_tokens: int | None,
) -> SamplingParams:
    """Sampling parameters from a body, and from `defaults` where it leaves a field out.

    Raises InvalidRequestError for values that are out of range or not supported.
    """
    _refuse_constraints(fields)
    given: dict[str, Any] = dict(defaults)
    given |= {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "n",
        )
        if (value := getattr(fields, name)) is not None
    }
    if given.get("top_k") == 0:
        given["top_k"] = -1
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens or 0,
        stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
        logit_bias=_logit_bias(fields.logit_bias),
        **given,
    )
    params.validate()
    return params


def _refuse_constraints(fields: SamplingFields) -> None:
    """Raise InvalidRequestError for unsupported sampling fields."""
    for name in ("stop_regex", "custom_params"):
        if getattr(fields, name):
            raise _unsupported(name, f"{name} is not supported by this server")


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """Logit bias with the token ids, which JSON only has as strings, as numbers."""
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias") from error


def parse_text_options(fields: SamplingFields, *, stream: bool, stream_interval: int, keep_stop: bool) -> TextOptions:
    """Text options from a body; `keep_stop` leaves the stop string in the text."""
    return TextOptions(
        skip_special_tokens=fields.skip_special_tokens is not False,
        no_stop_trim=bool(fields.no_stop_trim) or keep_stop,
        stream=stream,
        stream_interval=stream_interval,
    )


def refuse_unsupported(body: OpenAIFields | NativeRequest) -> None:
    """Raise InvalidRequestError for known but unsupported fields."""
    for field in dataclasses.fields(UnsupportedFields):
        value = getattr(body, field.name)
        if value is not None and value is not False and value not in ("", [], {}):
            raise _unsupported(field.name, f"{field.name} is not supported by this server")
    if isinstance(body, ChatRequest):
        if body.function_call not in (None, "none", "auto"):
            raise _unsupported("function_call", "function_call may only be none or auto; use tools and tool_choice")
        if body.modalities not in (None, [], ["text"]):
            raise _unsupported("modalities", "this server answers with text only")


def _unsupported(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=name, code="unsupported")


def check_max_tokens(value: int | None, param: str, *, least: int) -> None:
    """Raise InvalidRequestError if a given token limit is below `least`."""
    if value is not None and value < least:
        raise InvalidRequestError(f"{param} is {value}; it must be at least {least}", param=param)
