"""OpenTelemetry spans: one per answer, with child spans for its stages. Needs the extra `tokenyard[otel]`.

A `traceparent` header makes the span part of the caller's trace (W3C Trace Context). Attributes that start with
`gen_ai.` follow the semantic conventions for generative AI.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tokenyard.base import ConfigError, Finish
from tokenyard.engine.frontend.input_processor import level_name
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta

log = logging.getLogger(__name__)

SERVICE_NAME = "tokenyard"
SPAN_NAME = "llm_request"


class Tracing:
    """Sends spans to a collector in the background. One per server; `watcher` makes an observer per request."""

    def __init__(self, provider: Any) -> None:
        """`provider` is an `opentelemetry.sdk.trace.TracerProvider`; it is shut down by `close`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE_NAME)
        self._propagator = TraceContextTextMapPropagator()
        # Stages have monotonic timestamps, spans have wall-clock ones.
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def watcher(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> "SpanObserver":
        """An observer for a request with these headers (lower-case names)."""
        return SpanObserver(self, spec, headers)

    def close(self) -> None:
        """Send the remaining spans and shut the provider down."""
        self._provider.shutdown()

    def write(self, spec: GenerateReqInput, headers: Mapping[str, str], index: int, finish: Finish) -> None:
        """Make the spans of a finished answer."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        parent = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes(spec, index, finish),
            start_time=finish.arrival_ns + self._wall_offset_ns,
        )
        inside = set_span_in_context(span)
        for name, begin_ns, end_ns in stages(finish):
            stage = self._tracer.start_span(name, context=inside, start_time=begin_ns + self._wall_offset_ns)
            stage.end(end_ns + self._wall_offset_ns)
        if finish.reason == "abort":
            span.set_status(Status(StatusCode.ERROR, finish.message))
        span.end(finish.finished_ns + self._wall_offset_ns)


class QuietExporter:
    """An exporter that logs once when its collector fails, and once with the number of lost spans when it recovers.

    It has the methods of an `opentelemetry.sdk.trace.export.SpanExporter`.
    """

    def __init__(self, inner: Any, endpoint: str) -> None:
        self._inner, self._endpoint = inner, endpoint
        self._lost = 0

    def export(self, spans: Sequence[Any]) -> Any:
        """Send some spans; they are dropped if that fails."""
        result = self._inner.export(spans)
        if result.value == 0 and self._lost:
            log.warning("the trace collector at %s accepts spans again; %d were lost", self._endpoint, self._lost)
            self._lost = 0
        elif result.value != 0:
            if not self._lost:
                log.warning(
                    "the trace collector at %s does not accept spans; they are dropped until it does", self._endpoint
                )
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send the remaining spans."""
        return bool(self._inner.force_flush(timeout_millis))


class SpanObserver:
    """Writes the spans of one request's answers as they finish."""

    def __init__(self, tracing: Tracing, spec: GenerateReqInput, headers: Mapping[str, str]) -> None:
        self._tracing = tracing
        self._spec = spec
        self._headers = headers

    def delta(self, delta: OutputDelta) -> None:
        """Write spans once an answer has finished."""
        if delta.finish is not None:
            self._tracing.write(self._spec, self._headers, delta.index, delta.finish)


def stages(finish: Finish) -> list[tuple[str, int, int]]:
    """(name, begin, end) of each stage that an answer reached, in monotonic nanoseconds."""
    marks = (("queue", finish.arrival_ns), ("prefill", finish.admitted_ns), ("decode", finish.first_token_ns))
    reached = [(name, begin_ns) for name, begin_ns in marks if begin_ns]
    ends = [begin_ns for _, begin_ns in reached[1:]] + [finish.finished_ns]
    return [(name, begin_ns, end_ns) for (name, begin_ns), end_ns in zip(reached, ends, strict=True)]


def attributes(spec: GenerateReqInput, index: int, finish: Finish) -> dict[str, Any]:
    """Attributes of an answer's span: ids and sizes, never text."""
    return {
        "gen_ai.request.id": spec.rid,
        "gen_ai.response.finish_reasons": [finish.reason],
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "tokenyard.answer": index,
        "tokenyard.class": level_name(spec.service_class),
        "tokenyard.cached_tokens": finish.cached_tokens,
        "tokenyard.prefill_chunks": finish.timings.prefill_chunks,
        "tokenyard.retractions": finish.retractions,
    }


def open_tracing(endpoint: str) -> Tracing:
    """Tracing to an OTLP collector over HTTP. Raises ConfigError if the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-traces-endpoint needs the package {error.name}; install tokenyard[otel]") from error
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}))
    # The SDK logs several lines for every batch that it cannot send; `QuietExporter` logs one.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter: Any = QuietExporter(OTLPSpanExporter(endpoint=endpoint), endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
