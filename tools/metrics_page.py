"""Writes docs/metrics.md from the tables of the server's and the router's metrics: `python tools/metrics_page.py`."""

from collections.abc import Iterable
from pathlib import Path

from tokenyard.base.metric import Metric
from tokenyard.router import router_metrics
from tokenyard.server.metrics import table

PAGE = Path(__file__).resolve().parents[1] / "docs/metrics.md"

HEAD = """\
# Metrics

All metrics of `GET /metrics`, of `tokenyard serve` and of `tokenyard route`, in Prometheus' text format. This page is
made from the tables in `tokenyard/server/metrics/table.py` and `tokenyard/router/router_metrics.py` by
`python tools/metrics_page.py`.

No label holds an id or any text of a client. `tenant` is a tenant of the router's `--keys-file`. `class` is the level
of a service class: strict, high, normal or low. A histogram has `_bucket`, `_sum` and `_count`.
"""

SECTIONS = (
    (
        "The engine",
        table.ENGINE,
        "With several data-parallel ranks these are of all together. Gauges of features and policies that are off are\n"
        "absent.",
    ),
    ("By service class", table.BY_CLASS, ""),
    ("By data-parallel rank", table.RANK, "Only with several ranks; a rank that does not run has only `rank_up`."),
    ("By tensor- and pipeline-parallel rank", table.TP_RANK, "Only for models on several devices."),
    ("Policy adaptive", table.LOOKAHEAD, "Only with policy `adaptive`."),
    ("The KV store", table.KV_STORE, "Only with a KV store."),
    ("Paused requests", table.PAUSED, "Only with a KV store on disk, which keeps the records."),
    ("KV transfer", table.KV_TRANSFER, "Only with PD disaggregation."),
    (
        "Processes",
        table.PROCESS,
        "`process` is api, detokenizer or scheduler; with several ranks scheduler 0, scheduler 1 and so on.",
    ),
)

COMPAT = """
### Names of other engines

`--metrics-compat sglang,vllm` exports these under the names of SGLang and vLLM too, with the label `model_name` instead
of `model`. `/metrics/load` has the first two and `token_usage`, under all these names and with both labels.

"""


def rows_of(metrics: Iterable[Metric], prefix: str) -> list[str]:
    """The rows of a table of metrics."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{prefix}{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return rows


def compat_names() -> list[str]:
    """The rows of the table of other engines' names, as exported."""
    rows = ["| here | SGLang | vLLM |", "|---|---|---|"]
    for metric in table.ENGINE:
        found = [table.COMPAT[engine].get(metric.key, "") for engine in ("sglang", "vllm")]
        if any(found):
            ending = metric.name.removeprefix(metric.key)
            rows.append(f"| `{metric.name}` | " + " | ".join(name and f"`{name}{ending}`" for name in found) + " |")
    return rows


def page() -> str:
    """The text of the page."""
    text = HEAD + f"\n## The server\n\nAll names begin with `{table.PREFIX}`.\n"
    for title, metrics, note in SECTIONS:
        text += f"\n### {title}\n\n"
        text += f"{note}\n\n" if note else ""
        text += "\n".join(rows_of(metrics, table.PREFIX)) + "\n"
    text += COMPAT + "\n".join(compat_names()) + "\n\nOnly under those names:\n\n"
    text += "\n".join(rows_of((table.SGLANG_STAGES, table.VLLM_CACHE_CONFIG), "")) + "\n"
    text += f"\n## The router\n\nAll names begin with `{router_metrics.PREFIX}`. "
    text += "Those of sglang-router are in [The router](router.md#metrics).\n\n"
    return text + "\n".join(rows_of(router_metrics.METRICS, router_metrics.PREFIX)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
