"""Spans for OpenTelemetry: one for each answer, with its stages inside. Needs the extra `tokenyard[otel]`.

A `traceparent` header makes the span part of the caller's trace (W3C Trace Context). Names of attributes follow the
semantic conventions for generative AI.
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
    """Sends spans to a collector, in the background. Made once; `watcher` follows one request."""

    def __init__(self, provider: Any) -> None:
        """`provider` is an `opentelemetry.sdk.trace.TracerProvider`; it is shut down by `close`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE_NAME)
        self._propagator = TraceContextTextMapPropagator()
        # Stages are stamped by the monotonic clock, spans by that of the wall.
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def watcher(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> "SpanObserver":
        """What follows a request that came with these headers (lower-case names)."""
        return SpanObserver(self, spec, headers)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def write(self, spec: GenerateReqInput, headers: Mapping[str, str], index: int, finish: Finish) -> None:
        """Make the spans of an answer that has ended."""
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
    """An exporter that says once that its collector is away, and once that it is back and how many spans were lost.

    It has the methods of an `opentelemetry.sdk.trace.export.SpanExporter`.
    """

    def __init__(self, inner: Any, endpoint: str) -> None:
        self._inner, self._endpoint = inner, endpoint
        self._lost = 0

    def export(self, spans: Sequence[Any]) -> Any:
        """Send some spans; they are dropped if that fails."""
        result = self._inner.export(spans)
        if result.value == 0 and self._lost:
            log.warning("the trace collector at %s takes spans again; %d were lost", self._endpoint, self._lost)
            self._lost = 0
        elif result.value != 0:
            if not self._lost:
                log.warning("the trace collector at %s takes no spans; they are dropped until it does", self._endpoint)
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """End it."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is left."""
        return bool(self._inner.force_flush(timeout_millis))


class SpanObserver:
    """Follows one request; writes spans at the end of each of its answers."""

    def __init__(self, tracing: Tracing, spec: GenerateReqInput, headers: Mapping[str, str]) -> None:
        self._tracing = tracing
        self._spec = spec
        self._headers = headers

    def delta(self, delta: OutputDelta) -> None:
        """Take in news of one answer."""
        if delta.finish is not None:
            self._tracing.write(self._spec, self._headers, delta.index, delta.finish)


def stages(finish: Finish) -> list[tuple[str, int, int]]:
    """The stages that an answer reached: name, begin and end in monotonic nanoseconds."""
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
    """Tracing to an OTLP collector over HTTP, which may come and go. Raises ConfigError where the extra is not
    installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-traces-endpoint needs the package {error.name}; install tokenyard[otel]") from error
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}))
    # It writes several lines about every batch that it cannot send; `QuietExporter` says what there is to know.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter: Any = QuietExporter(OTLPSpanExporter(endpoint=endpoint), endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
