"""Spans of requests, collected in memory."""

import sys

import pytest

from tokenyard.base import ConfigError

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.fake import FakeManager, finish
from tokenyard.server.metrics.tracing import QuietExporter, Tracing, open_tracing, stages

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(start):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = start(FakeManager())
    server.state.observer_factories.append(Tracing(provider).watcher)
    return server, exporter


def test_an_answer_is_a_span_with_its_stages_inside(traced):
    server, exporter = traced
    body = {"prompt": "hello dog", "max_tokens": 3, "rid": "r1", "service_tier": "flex"}
    server.client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    *inner, span = exporter.get_finished_spans()
    assert [one.name for one in inner] == ["queue", "prefill", "decode"]
    assert {one.parent.span_id for one in inner} == {span.context.span_id}
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["gen_ai.request.id"] == "r1"
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["tokenyard.class"] == "low"
    assert inner[0].start_time == span.start_time
    assert inner[-1].end_time == span.end_time
    assert not [value for value in span.attributes.values() if "hello" in str(value)]


def test_a_refused_answer_is_a_failed_span(traced):
    server, exporter = traced
    server.manager.reject = finish("abort", cause="queue_full", message="full")
    server.client.post("/v1/completions", json={"prompt": "hello"})
    span = exporter.get_finished_spans()[-1]
    assert (span.status.is_ok, span.status.description) == (False, "full")
    assert span.parent is None


def test_stages_that_were_not_reached_are_left_out():
    end = finish("abort")
    end.admitted_ns = end.first_token_ns = 0
    assert [name for name, _, _ in stages(end)] == ["queue"]


def test_without_the_packages_the_reason_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"install tokenyard\[otel\]"):
        open_tracing("http://127.0.0.1:9/v1/traces")


class FlakyExporter:
    def __init__(self, *results):
        self.results = list(results)

    def export(self, spans):
        return self.results.pop(0)


def test_an_unreachable_collector_is_logged_once_and_when_it_returns(caplog):
    away, fine = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    exporter = QuietExporter(FlakyExporter(fine, away, away, away, fine, fine, away), "http://c:4318")
    said = []
    for _ in range(7):
        caplog.clear()
        exporter.export([1, 2])
        said.append(" ".join(record.getMessage() for record in caplog.records))
    assert ["does not accept spans" in words for words in said] == [False, True, False, False, False, False, True]
    assert "accepts spans again; 6 were lost" in said[4]
    assert [bool(words) for words in said] == [False, True, False, False, True, False, True]
