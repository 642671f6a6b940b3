"""The metrics that server and router export are those of their tables and of docs/metrics.md."""

from prometheus_client.parser import text_string_to_metric_families

from tokenyard.router.router_metrics import METRICS as ROUTER_METRICS
from tokenyard.router.router_metrics import PREFIX as ROUTER_PREFIX
from tokenyard.router.router_metrics import RouterMetrics
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.workers import HttpWorkers
from tokenyard.routing.dispatch import Dispatcher
from tokenyard.routing.gpu_seconds import EngineCost
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.registry import make_policy
from tokenyard.server.metrics.prometheus import Metrics
from tokenyard.server.metrics.table import COMPAT, ENGINE, METRICS, PREFIX, RANK, SGLANG_STAGES, VLLM_CACHE_CONFIG
from tools.metrics_page import PAGE, page


def exported(text):
    """(name, kind, help) -> labels of the samples, of an exposition; parsers leave the `_total` of counters out."""
    return {
        (family.name, family.type, family.documentation): {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in text_string_to_metric_families(text)
    }


def stated(metrics, prefix):
    """The same of a table."""
    return {(prefix + metric.key, metric.kind, metric.help): set(metric.labels) for metric in metrics}


def server_with_all_features(compat=()):
    """Metrics as after a scrape of a server in which every feature is on and has counted something."""
    metrics = Metrics("m", compat=compat)
    for metric in ENGINE:
        if metric.kind == "counter":
            metrics.count(metric.key, 1, *metric.labels[1:])
        elif metric.kind == "gauge":
            metrics.gauges[metric.key] = 1.0
    metrics.ranks = {0: {metric.key.removeprefix("rank_"): 1.0 for metric in RANK}}
    metrics.tp_ranks = {"rank 0": [{kind: 1, "step": 1, "silent_s": 0.5} for kind in ("tp_rank", "pp_rank")]}
    metrics.adaptive = {
        "looks": 1,
        "cpu_s": 0.5,
        "failures": 0,
        "scores": [{"name": "lpm", "met": 0.5, "ttft_s": 0.1}],
        "switches": [{"candidate": "lpm", "times": 1}],
    }
    metrics.kv = {"kv_store": {"rank 0": {}}, "paused_requests": {}, "transfer": {"rank 0": {"done": 1}}}
    return metrics


def test_the_server_exports_its_table():
    text = server_with_all_features().exposition().decode()
    assert exported(text) == stated(METRICS, PREFIX)
    for metric in METRICS:
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text


def test_names_of_other_engines_are_of_metrics_in_the_table():
    names = {metric.key for metric in ENGINE}
    assert all(names >= set(scheme) for scheme in COMPAT.values())
    text = server_with_all_features(compat=tuple(COMPAT)).exposition().decode()
    added = set(exported(text)) - set(stated(METRICS, PREFIX))
    assert set(stated((SGLANG_STAGES, VLLM_CACHE_CONFIG), "")) <= added
    assert {name for name, _, _ in added} == {
        *(name for scheme in COMPAT.values() for name in scheme.values()),
        SGLANG_STAGES.name,
        VLLM_CACHE_CONFIG.name,
    }


def test_the_router_exports_its_table():
    metrics, index = RouterMetrics(), PrefixIndex(1 << 20)
    workers = HttpWorkers(RouterSettings(), index)
    workers.set_cards(workers.add("http://127.0.0.1:1", "flag"), [{"id": "m"}])
    terms = dict.fromkeys(("step_ms", "floor_ms", "dense_ms", "token_ms", "context_ms", "area_ms"), 1.0)
    cost = EngineCost.from_report({"terms": terms, "devices": 1, "origin": "a profile"})
    metrics.usage_of("acme", "m").add(3, 1, 2, cost, 1)
    metrics.limited("acme")
    for counts in (metrics.errors, metrics.statuses, metrics.chosen, metrics.worker_errors):
        counts[200] += 1
    text = metrics.exposition(Dispatcher(workers, make_policy("round_robin")), open_requests=0).decode()
    assert exported(text) == stated(ROUTER_METRICS, ROUTER_PREFIX)
    for metric in ROUTER_METRICS:
        assert f"# TYPE {ROUTER_PREFIX}{metric.name} {metric.kind}\n" in text


def test_the_page_is_that_of_the_tables():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tools/metrics_page.py`"
