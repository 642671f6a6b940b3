"""What policy `adaptive` has found by looking ahead, as metrics. Labels are its candidates, which are few."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_TOTALS = {
    "looks": ("tokenyard_lookahead_looks", "times that policy adaptive has looked ahead since it was chosen"),
    "cpu_s": ("tokenyard_lookahead_cpu_seconds", "CPU time of looking ahead"),
    "failures": ("tokenyard_lookahead_failures", "times that the process that looks ahead was given up"),
}
_SCORES = {
    "met": ("tokenyard_lookahead_met", "share of requests that would meet their targets, by the latest look"),
    "ttft_s": ("tokenyard_lookahead_ttft_seconds", "mean time to first token, by the latest look"),
}


def lookahead_families(model: str, adaptive: Mapping[str, Any]) -> Iterable[Metric]:
    """The families for what the engine says of its looking ahead; none if it does not."""
    if not adaptive:
        return
    for key, (name, text) in _TOTALS.items():
        total = CounterMetricFamily(name, text, labels=["model"])
        total.add_metric([model], adaptive[key])
        yield total
    for key, (name, text) in _SCORES.items():
        gauge = GaugeMetricFamily(name, text, labels=["model", "candidate"])
        for score in adaptive["scores"]:
            gauge.add_metric([model, score["name"]], score[key])
        yield gauge
    switches = CounterMetricFamily(
        "tokenyard_policy_switches", "changes of policy by looking ahead", labels=["model", "candidate"]
    )
    for switch in adaptive["switches"]:
        switches.add_metric([model, switch["candidate"]], switch["times"])
    yield switches
