"""Calls to models in OpenTelemetry's GenAI spans: JSON lines, as a collector or an SDK exports them.

A line is an OTLP document (`resourceSpans`) or one span. Spans with `gen_ai.usage.input_tokens` are calls; others are
skipped. A session is `gen_ai.conversation.id`, or else the span's trace; `gen_ai.agent.id` tells its sub-agents apart.
Read are also the output tokens, the finish reasons (a tool call or not) and the times, and no other attribute. OTLP
documents are detected by `resourceSpans`; lines of one span each are not: name the format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenyard.base import NS_PER_S, ConfigError
from tokenyard.sim.traces.read_options import BadLines, ReadOptions
from tokenyard.sim.traces.recorded_calls import GUESSED_PREFIXES, GrowingPrompts, RecordedCall, sessions_of
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import Turn
from tokenyard.sim.traces.time_stamps import seconds_of
from tokenyard.sim.traces.trace_files import read_json_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload

INPUT, OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
SESSION, AGENT, STOPS = "gen_ai.conversation.id", "gen_ai.agent.id", "gen_ai.response.finish_reasons"
TOOL_STOPS = ("tool_calls", "tool_call", "tool_use")


def read_genai_spans(path: Path, options: ReadOptions) -> Workload:
    """The sessions, chosen and started as `options.sessions` says.

    Spans say when calls began and ended, so the gaps are exact, and calls at the same time fork and join. Contents are
    guessed from the lengths.
    """
    bad, calls = BadLines(options, "spans"), list[RecordedCall]()
    for where, record in read_json_lines(path):
        try:
            spans = [(span, _attributes(span)) for span in _spans(record)]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"{where}: this is no OpenTelemetry span: {error}") from None
        for span, attributes in spans:
            if INPUT in attributes:
                bad.take(lambda where=where, span=span, own=attributes: calls.append(_call(where, span, own)))  # type: ignore[misc]
    if not calls:
        raise ConfigError("; ".join([f"{path.name} holds no span with {INPUT}", *bad.remarks()]))
    prompts = GrowingPrompts()
    for call in sorted(calls, key=lambda call: call.begin_s):
        turn = call.turn
        turn.runs = prompts.runs(f"{call.session}/{turn.agent}", turn.prompt_tokens)
    remarks = (*bad.remarks(), GUESSED_PREFIXES)
    return session_workload(SessionTrace(path.name, sessions_of(calls), 1, remarks=remarks), options.sessions)


def _spans(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of one line."""
    if "resourceSpans" not in record:
        yield record
        return
    for resource in record["resourceSpans"] or ():
        for scope in resource.get("scopeSpans") or ():
            yield from scope.get("spans") or ()


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes by name: OTLP has a list of typed values, an SDK's export an object."""
    found = span.get("attributes") or {}
    if isinstance(found, dict):
        return found
    return {one["key"]: _value(one.get("value") or {}) for one in found if isinstance(one, dict) and "key" in one}


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(one) for one in value["arrayValue"].get("values") or ()]
    return next(iter(value.values()), None)


def _call(where: str, span: dict[str, Any], attributes: dict[str, Any]) -> RecordedCall:
    context = span.get("context")
    trace = span.get("traceId") or (context.get("trace_id") if isinstance(context, dict) else "")
    session = str(attributes.get(SESSION) or trace or "")
    if not session:
        raise ConfigError(f"{where}: the span has neither {SESSION} nor a trace id")
    begin_s = _time_s(span, ("startTimeUnixNano", "start_time"), where)
    end_s = _time_s(span, ("endTimeUnixNano", "end_time"), where)
    stops = attributes.get(STOPS) or ()
    turn = Turn(
        whole(attributes, INPUT, where),
        max(whole(attributes, OUTPUT, where), 1),
        agent=str(attributes.get(AGENT) or ""),
        tool=any(stop in TOOL_STOPS for stop in stops),
    )
    return RecordedCall(where, session, begin_s, max(end_s, begin_s), turn)


def _time_s(span: dict[str, Any], names: tuple[str, str], where: str) -> float:
    """A time in seconds: Unix nanoseconds, as a number or digits, or ISO 8601."""
    found = next((span[name] for name in names if span.get(name) is not None), None)
    if isinstance(found, int | float) and not isinstance(found, bool):
        return found / NS_PER_S
    if isinstance(found, str):
        return int(found) / NS_PER_S if found.isdigit() else seconds_of(found, where)
    raise ConfigError(f"{where}: the span has no {names[0]}")


GENAI_SPANS = TraceFormat("genai-spans", read_genai_spans, fields=(frozenset({"resourceSpans"}),))
