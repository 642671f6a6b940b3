"""Settings of the dispatch machine: the queue, circuit breakers, health and retries."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of `routing.dispatch.Dispatcher`. The defaults are those of `tokenyard route`."""

    max_worker_requests: int = 0
    """Maximum number of open requests per target; 0: what its engine reports, else no limit."""
    dp_aware: bool = True
    """Whether the data-parallel ranks of a worker are separate targets."""
    queue_size: int = 1000
    """Maximum number of queued requests."""
    queue_timeout_s: float = 60.0
    """Seconds from its arrival after which a queued request is refused."""
    unavailable_timeout_s: float = 0.0
    """Seconds without a healthy worker for its model after which a queued request is refused; 0: `queue_timeout_s`."""
    queue_aging_s: float = 10.0
    """Seconds in the queue that raise the priority of a request by one; 0: never."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of tenants in the queue; 1 for a tenant without one."""
    max_retries: int = 5
    """Maximum number of retries of a request."""
    retry_share: float = 0.2
    """Retry budget: retries per request, averaged over recent requests."""
    initial_backoff_s: float = 0.05
    """Base of the seconds before a target that failed is tried again."""
    max_backoff_s: float = 2.0
    """Maximum of that wait."""
    cb_failure_threshold: int = 10
    """Failures in a row that open a target's circuit breaker."""
    cb_success_threshold: int = 3
    """Successes in a row that close it."""
    cb_timeout_s: float = 30.0
    """Seconds until an open circuit breaker lets requests through."""
    health_failure_threshold: int = 3
    """Failed probes in a row that make a worker unhealthy."""
    health_success_threshold: int = 2
    """Successful probes in a row that make it healthy again."""
    health_check_interval_s: float = 5.0
    """Seconds between two probes of a healthy worker."""
