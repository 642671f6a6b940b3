"""What a Prometheus metric is called and what it says: a row of the tables from which /metrics is made."""

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the server (`server/metrics/table.py`) or of the router (`router/router_metrics.py`)."""

    name: str
    """As exported, without the prefix of its process; that of a counter ends with `_total`."""

    kind: MetricKind

    help: str

    labels: tuple[str, ...] = ()

    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def key(self) -> str:
        """The name without `_total`, by which the server counts it."""
        return self.name.removesuffix("_total")
