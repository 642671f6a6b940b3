"""Reads what benchmark clients write about each request: vLLM, SGLang, GuideLLM, GenAI-Perf, AIPerf and our own.

Each form is found by its fields. What the client did not record about single requests, such as a summary without
details, cannot show the time of a step, and is refused with the flag that makes the client record it.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from tokenyard.base import ConfigError
from tokenyard.cost.observed_requests import ObservedRequest

Run = list[ObservedRequest]
NS_PER_S = 1e9
MS_PER_S = 1e3


def read_result_file(path: Path) -> list[Run]:
    """The runs of a file, each with the requests that succeeded, on a clock of its own.

    Raises ConfigError for a file that cannot be read, is of no known form, or has no details of single requests.
    """
    documents = _documents(path)
    if not documents:
        raise ConfigError(f"{path} is empty")
    try:
        if all("metadata" in one and "metrics" in one for one in documents):
            runs = [list(_each(documents, _aiperf))]
        else:
            runs = [run for one in documents for run in _runs(one)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} does not have the expected fields ({type(error).__name__}: {error})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    runs = [run for run in runs if run]
    if not runs:
        raise ConfigError(f"{path} has no request that succeeded and was streamed")
    return runs


def _documents(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, which has one, or one per line. They may hold Infinity and NaN, as Python writes."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        try:
            found = [json.loads(data)]
        except json.JSONDecodeError:
            found = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from None
    if not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{path} has no JSON objects; give the result file of a benchmark client")
    return found


def _runs(document: dict[str, Any]) -> Iterator[Run]:
    """The runs of one document of any form but AIPerf's. Raises ConfigError for an unknown one."""
    if "benchmarks" in document:
        for benchmark in document["benchmarks"]:
            yield list(_each(benchmark["requests"]["successful"], _guidellm))
    elif "experiments" in document:
        for experiment in document["experiments"]:
            yield list(_each(experiment["requests"], _genai_perf))
    elif "ttfts" in document:
        yield _bench_serve(document)
    elif isinstance(document.get("requests"), list):
        yield list(_each(document["requests"], _tokenyard))
    elif "mean_ttft_ms" in document or "ttft_s" in document or "time_to_first_token" in document:
        raise ConfigError(
            "it has a summary without single requests; record them: --save-detailed (vllm bench serve), "
            "--output-details (sglang.bench_serving, tokenyard bench serve), profile_export.jsonl (aiperf)"
        )
    else:
        raise ConfigError(
            "it is not the result of vllm bench serve, sglang.bench_serving, guidellm, genai-perf, aiperf or "
            "tokenyard bench serve"
        )


def _each(
    records: list[dict[str, Any]], read: Callable[[Mapping[str, Any]], ObservedRequest | None]
) -> Iterator[ObservedRequest]:
    for record in records:
        one = read(record)
        if one is not None:
            yield one


def _bench_serve(document: Mapping[str, Any]) -> Run:
    """vLLM and SGLang: one list per property. SGLang records no times of sending; they follow from its limit."""
    lasting = [ttft + sum(gaps) for ttft, gaps in zip(document["ttfts"], document["itls"], strict=True)]
    starts = document.get("start_times") or _closed_loop_starts(document, lasting)
    errors = document.get("errors") or [""] * len(lasting)
    columns = zip(
        starts,
        document["input_lens"],
        document["output_lens"],
        document["ttfts"],
        lasting,
        errors,
        strict=True,
    )
    return [
        ObservedRequest(start, start + ttft, start + total, int(prompt), int(output))
        for start, prompt, output, ttft, total, error in columns
        if not error and output > 0 and ttft > 0.0
    ]


def _closed_loop_starts(document: Mapping[str, Any], lasting: list[float]) -> list[float]:
    """When requests were sent, in a run at an infinite rate: at once, or as soon as one of the clients is free."""
    rate, limit = document.get("request_rate"), document.get("max_concurrency")
    if rate is not None and float(rate) != float("inf") and rate != "inf":
        raise ConfigError(
            "it has a request rate and no start_times, so it does not show which requests ran together; use "
            "--request-rate inf with --max-concurrency"
        )
    free_at = [0.0] * min(int(limit or len(lasting)), len(lasting))
    starts = []
    for seconds in lasting:
        start = heapq.heappop(free_at)
        starts.append(start)
        heapq.heappush(free_at, start + seconds)
    return starts


def _tokenyard(record: Mapping[str, Any]) -> ObservedRequest | None:
    if record["error"] or not record["ttft_s"]:
        return None
    start = record["sent_s"]
    return ObservedRequest(
        start,
        start + record["ttft_s"],
        start + record["latency_s"],
        record["prompt_tokens"],
        record["output_tokens"],
        min(record["cached_tokens"], record["prompt_tokens"]),
    )


def _guidellm(record: Mapping[str, Any]) -> ObservedRequest | None:
    times = (record.get("info") or record.get("scheduler_info") or {}).get("timings") or {}
    start = _first(times.get("request_start"), record.get("request_start_time"), record.get("start_time"))
    ttft_ms = record.get("time_to_first_token_ms")
    first = _first(
        times.get("first_token_iteration"),
        record.get("first_token_time"),
        None if ttft_ms is None else start + ttft_ms / MS_PER_S,
    )
    end = _first(
        times.get("last_token_iteration"),
        record.get("last_token_time"),
        record.get("request_end_time"),
        record.get("end_time"),
    )
    prompt = _first(record.get("prompt_tokens"), (record.get("input_metrics") or {}).get("total_tokens"))
    output = _first(record.get("output_tokens"), (record.get("output_metrics") or {}).get("total_tokens"))
    if None in (first, prompt, output):
        return None
    return ObservedRequest(start, first, end, int(prompt), int(output))


def _first(*values: Any) -> Any:
    """The first that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


def _aiperf(record: Mapping[str, Any]) -> ObservedRequest | None:
    """A line of profile_export.jsonl. Metrics have a unit; times are in milliseconds unless it says otherwise."""
    metrics, metadata = record["metrics"], record["metadata"]
    ttft, latency = metrics.get("time_to_first_token"), metrics.get("request_latency")
    if record.get("error") or metadata.get("benchmark_phase") == "warmup" or ttft is None or latency is None:
        return None
    start = metadata["request_start_ns"] / NS_PER_S
    return ObservedRequest(
        start,
        start + _seconds(ttft),
        start + _seconds(latency),
        int(metrics["input_sequence_length"]["value"]),
        int(metrics["output_sequence_length"]["value"]),
    )


def _seconds(metric: Mapping[str, Any]) -> float:
    factor = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[metric.get("unit") or "ms"]
    return float(metric["value"]) * factor


def _genai_perf(record: Mapping[str, Any]) -> ObservedRequest | None:
    """A request of profile_export.json. Its counts are those of the `usage` that the server streams at the end."""
    outputs, times = record["response_outputs"], record["response_timestamps"]
    usage: Mapping[str, Any] | None = None
    arrived = []
    for output, at in zip(outputs, times, strict=True):
        for event in _events(output):
            usage = event.get("usage") or usage
            if any(_text(choice) for choice in event.get("choices") or ()):
                arrived.append(at / NS_PER_S)
    if not arrived:
        return None
    if usage is None:
        raise ConfigError(
            "it has no token counts; run genai-perf with --streaming and "
            """--extra-inputs '{"stream_options": {"include_usage": true}}'"""
        )
    start = record["timestamp"] / NS_PER_S
    return ObservedRequest(start, arrived[0], arrived[-1], usage["prompt_tokens"], usage["completion_tokens"])


def _events(output: Any) -> Iterator[dict[str, Any]]:
    """The events of one response, which is a piece of a stream of server-sent events."""
    text = output.get("response", "") if isinstance(output, dict) else str(output)
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield orjson.loads(data)


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
