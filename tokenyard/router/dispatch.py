"""The state that all requests of a router share: workers, index, policies, counters and the queue."""

import asyncio
import heapq
import math
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from tokenyard.base import ConfigError, TokenyardError
from tokenyard.router.errors import RouterError
from tokenyard.router.health import HealthChecker
from tokenyard.router.request_features import BYTES_PER_TOKEN, ParsedRequest
from tokenyard.router.router_metrics import RouterMetrics
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.router_sync import RouterSync
from tokenyard.router.workers import Target, Worker, Workers
from tokenyard.routing.load import DispatchedRequest
from tokenyard.routing.policies import PolicyOptions, Ranking, RequestFeatures, RoutePolicy, make_policy
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.queue import QueueEntry, WaitingQueue

OVERLOADED = frozenset({429, 503})
MAX_RETRY_TOKENS = 100.0
RATIO_STEP = 0.02


class PendingRequest(Protocol):
    """An open request as the dispatcher sees it.

    parsed: what the router read from its body.
    features: its features at the last ranking; None before.
    matched: prompt tokens that each target should have cached.
    waiting: its entry in the queue; None if it does not wait.
    """

    parsed: ParsedRequest
    features: RequestFeatures | None
    matched: dict[Target, int]
    waiting: "QueueEntry[PendingRequest] | None"

    @property
    def expires_s(self) -> float:
        """When it leaves the queue with an error, in seconds of the loop's clock."""
        ...

    def fits(self) -> bool:
        """Whether a target has capacity for it now."""
        ...

    def dequeued(self) -> None:
        """It left the queue: send it."""
        ...

    def abort(self, error: TokenyardError) -> None:
        """End it with `error` in any state."""
        ...

    def check_time(self, now_s: float) -> None:
        """End it, or retry it on another target, if it has been stalled for too long."""
        ...


def _fits(request: PendingRequest) -> bool:
    return request.fits()


class Dispatcher:
    """Ranks targets for requests, queues requests without a target, and learns from responses.

    exchanges: all open requests. Used from one event loop.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.id = uuid.uuid4().hex[:12]
        self.index = PrefixIndex(int(settings.index_mb * 1e6))
        self.workers = Workers(settings, self.index)
        self.workers.on_change = self.capacity_freed
        self.metrics = RouterMetrics()
        options = PolicyOptions(
            settings.seed, settings.cache_threshold, settings.balance_abs_threshold, settings.balance_rel_threshold
        )
        sticky = bool(settings.session_header)
        self.policy = make_policy(settings.policy, options, sticky=sticky)
        self.prefill_policy = make_policy(settings.prefill_policy, options, sticky=sticky)
        self.decode_policy = make_policy(settings.decode_policy, options)
        self.queue: WaitingQueue[PendingRequest] = WaitingQueue(
            aging_s=settings.queue_aging_secs, weights=dict(_weights(settings.tenant_weights))
        )
        self.exchanges: set[PendingRequest] = set()
        self.draining = False
        self.worker_headers: list[tuple[bytes, bytes]] = []
        if settings.worker_api_key:
            self.worker_headers = [(b"authorization", b"Bearer " + settings.worker_api_key.encode())]
        self.health = HealthChecker(settings, self.workers, self.worker_headers)
        self.shared = (
            RouterSync(settings.shared_url, self.id, self.workers, self.index, self.policy)
            if settings.shared_url
            else None
        )
        self.bytes_per_token = BYTES_PER_TOKEN
        self._prefilling: list[tuple[float, int, DispatchedRequest]] = []
        self._order = count()
        self._serving = False
        self._retry_tokens = MAX_RETRY_TOKENS / 10
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def add_worker(self, url: str, source: str, role: str = "") -> Worker:
        """Add a worker. It gets requests once it is healthy.

        Raises ConfigError for an invalid or duplicate URL and for an unknown role.
        """
        worker = self.workers.add(url, source, role)
        self.health.watch(worker)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker. Its open requests continue."""
        self.health.leave(worker)
        self.workers.remove(worker)

    def arrived(self, request: PendingRequest) -> None:
        """A request for the workers has arrived."""
        self.metrics.requests += 1
        self._retry_tokens = min(self._retry_tokens + self.settings.retry_share, MAX_RETRY_TOKENS)
        self.exchanges.add(request)

    def rank(self, request: PendingRequest, targets: list[Target], policy: RoutePolicy) -> Ranking:
        """The policy's ranking of `targets`. Sets `request.matched` and `request.features`."""
        parsed, states = request.parsed, [target.state for target in targets]
        prompt, matched = parsed.prompt, []
        if self._prefilling:
            self._expire_prefills()
        if prompt.digests and policy.needs_prefix:
            blocks = [self.index.match(state.name, prompt.digests) for state in states]
            matched = [round(prompt.share(held) * parsed.tokens) if held else 0 for held in blocks]
            request.matched = dict(zip(targets, matched, strict=True))
        request.features = RequestFeatures(parsed.tokens, matched, parsed.key, parsed.session)
        return policy.rank(request.features, states)

    def prefills(self, sent: DispatchedRequest) -> None:
        """Schedule `sent.prefilled` at its predicted time: without streaming, the first token cannot be observed."""
        heapq.heappush(self._prefilling, (self.now() + sent.expected_s(), next(self._order), sent))

    def _expire_prefills(self) -> None:
        now, due = self.now(), self._prefilling
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].prefilled()

    def sent(
        self, request: PendingRequest, target: Target, reason: str, policy: RoutePolicy, *, prefills: bool = True
    ) -> DispatchedRequest:
        """Count a request at `target`, before it is sent.

        `prefills`: False if another target computes the prompt.
        """
        parsed, state, digests = request.parsed, target.state, request.parsed.prompt.digests
        self.metrics.reasons[reason] += 1
        self.metrics.chosen[target.name] += 1
        if request.features is not None:
            policy.sent(request.features, state)
        if digests and policy.needs_prefix:
            self.index.insert(state.name, digests)
        if self.shared is not None:
            self.shared.sent(state.name, parsed.prompt.digests, parsed.session)
        return DispatchedRequest(state, parsed.tokens, request.matched.get(target, 0), self.now(), prefills=prefills)

    def may_retry(self) -> bool:
        """Take one retry from the budget; False if it is used up."""
        if self._retry_tokens < 1.0:
            return False
        self._retry_tokens -= 1.0
        return True

    def answered(self, target: Target, status: int) -> None:
        """The worker has begun to respond."""
        self.metrics.statuses[status] += 1
        if status < 500:
            target.breaker.succeeded()
        else:
            self._worker_failed(target)

    def refused(self, target: Target, status: int) -> None:
        """The worker responded with an error that another worker may not give."""
        self.metrics.statuses[status] += 1
        if status not in OVERLOADED:
            self._worker_failed(target)

    def connection_failed(self, target: Target) -> None:
        """The connection failed before the response was complete: the worker may have died."""
        self._worker_failed(target)
        self.health.check_now(target.worker)

    def unreachable(self, target: Target, *, refused: bool) -> None:
        """No connection could be made. If it was `refused`, no process listens, and the worker's cache is lost."""
        self._worker_failed(target)
        if refused and target.worker.healthy:
            self.workers.set_healthy(target.worker, False)
            self.workers.restarted(target.worker)
        self.health.check_now(target.worker)

    def _worker_failed(self, target: Target) -> None:
        self.metrics.worker_errors[target.name] += 1
        target.breaker.failed(self.now())

    def finished(
        self, request: PendingRequest, sent: DispatchedRequest, prompt: int | None, cached: int | None
    ) -> None:
        """A response succeeded: learn from the prompt length and the cached tokens that it reports, if any."""
        parsed = request.parsed
        if prompt and not parsed.counted and parsed.prompt.size:
            self.bytes_per_token += RATIO_STEP * (parsed.prompt.size / prompt - self.bytes_per_token)
        if prompt is None or cached is None:
            return
        self.metrics.reported_tokens += prompt
        self.metrics.cached_tokens += cached
        self.metrics.predicted_tokens += sent.predicted
        sent.hit(cached)

    # The queue.

    def enqueue(self, request: PendingRequest) -> None:
        """Queue a request. If the queue is full, the least urgent request is refused (429)."""
        parsed, queue = request.parsed, self.queue
        if len(queue) >= self.settings.queue_size:
            lowest = queue.lowest(self.now())
            if lowest is None or lowest.priority >= parsed.priority:
                request.abort(RouterError(429, "the queue is full; try again later", code="queue_full"))
                return
            queue.remove(lowest)
            lowest.item.abort(RouterError(429, "the queue is full; try again later", code="queue_full"))
        deadline_s = request.expires_s if parsed.deadline_ms is not None else math.inf
        self.metrics.queued += 1
        request.waiting = queue.push(
            request,
            self.now(),
            tokens=parsed.tokens,
            priority=parsed.priority,
            tenant=parsed.tenant,
            deadline_s=deadline_s,
            expires_s=request.expires_s,
        )

    def capacity_freed(self) -> None:
        """Capacity may have been freed: serve the queue in the next iteration of the event loop."""
        if self.queue and not self._serving:
            self._serving = True
            self._loop.call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        self._serving = False
        while self.queue:
            entry = self.queue.pop(self.now(), _fits)
            if entry is None:
                return
            entry.item.dequeued()

    def abort_all(self) -> None:
        """The grace period has ended: abort all open requests."""
        for request in list(self.exchanges):
            request.abort(RouterError(503, "the router is shutting down", code="draining"))

    def sweep(self) -> None:
        """Expire queued and stalled requests. Called every `SWEEP_S`."""
        now = self.now()
        self._expire_prefills()
        for entry in self.queue.expired(now):
            late = entry.deadline_s <= now
            code, what = ("deadline", "its deadline passed") if late else ("queue_timeout", "no worker had capacity")
            entry.item.waiting = None
            entry.item.abort(RouterError(503, f"the request was queued and {what}; try again later", code=code))
        for request in list(self.exchanges):
            request.check_time(now)
        self.capacity_freed()


def _weights(texts: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not 0.0 < weight < float("inf"):
            raise ConfigError(f"--tenant-weights takes name=weight with a weight above 0, not {text!r}")
        yield name, weight
