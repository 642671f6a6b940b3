"""Drives the dispatch machine from asyncio, and holds what all requests of a router share."""

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenyard.base import NS_PER_MS, NS_PER_S, TokenyardError
from tokenyard.base.log_format import quoted_word
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.errors import RouterError, refusal
from tokenyard.router.health import HealthChecker
from tokenyard.router.request_features import BYTES_PER_TOKEN, ParsedRequest
from tokenyard.router.router_metrics import RouterMetrics
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.router_sync import RouterSync
from tokenyard.router.tenant_keys import open_tenant_keys
from tokenyard.router.workers import HttpTarget, HttpWorker, HttpWorkers
from tokenyard.routing.dispatch import NEVER_NS, Action, Choice, Dispatcher, PendingRequest, Refuse, Send
from tokenyard.routing.load import DispatchedRequest
from tokenyard.routing.policies import PolicyOptions
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.registry import make_policy
from tokenyard.routing.tenant_limits import KeyUsage

log = logging.getLogger(__name__)
request_log = logging.getLogger("tokenyard.requests")

REFUSALS, DRAINS = frozenset({409, 429, 503}), 503
"""Statuses of workers that are not at fault; the one of those that shut down."""

RATIO_STEP = 0.02


Answer = tuple[int, Any]
"""The status and the JSON content of an answer of the router; of bytes, lines of JSON as they are."""


@dataclass(frozen=True, slots=True)
class OwnRoute:
    """A path that the router answers itself.

    method: the one that it takes.
    admin: whether it needs the admin key.
    answer: makes the answer. Raises TokenyardError for an invalid request.
    """

    method: bytes
    admin: bool
    answer: Callable[[ClientRequest], Answer]


class OpenRequest(PendingRequest[HttpWorker], ABC):
    """A request whose client waits for the response."""

    def __init__(self, request: ClientRequest, parsed: ParsedRequest, *, disagg: bool = False) -> None:
        super().__init__(parsed, disagg=disagg)
        self._request = request
        self.parsed = parsed
        """What the router read from its body."""
        self.key: KeyUsage | None = None
        """The limits that it counts against, None without a tenant's key."""
        self.used_by = ""
        """The tenant in whose usage it counts, "" for none."""
        self.waited_ns = 0
        """From its arrival until it was first sent, or refused; 0 before."""
        self.first_byte_ns = 0
        """When the response began, 0 before."""
        self._outcome = ""
        """How it ended: done, client_gone or the code of an error."""
        self._usage: tuple[int | None, int | None, int | None] = (None, None, None)
        """Tokens of prompt, cached prompt and answer, as the response reports them."""

    def charge(self, key: KeyUsage | None) -> None:
        """Count it against the limits of a key, and in the usage of its tenant."""
        self.key, self.used_by = key, "" if key is None else key.grant.tenant

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Of the response, None before it."""

    @abstractmethod
    def dispatched(self) -> None:
        """Send it to its `target`."""

    @abstractmethod
    def abort(self, error: TokenyardError) -> None:
        """End it with `error` in any state."""

    def tokens_used(self) -> tuple[int, int, int]:
        """Tokens of prompt, cached prompt and answer, as the answer reports them, else as `estimate` does."""
        (prompt, cached, output), by_estimate = self._usage, self.estimate()
        return (
            by_estimate[0] if prompt is None else prompt,
            cached or 0,
            by_estimate[1] if output is None else output,
        )

    @abstractmethod
    def estimate(self) -> tuple[int, int]:
        """Tokens of prompt and answer where the answer does not report them."""

    def log_fields(self) -> dict[str, Any]:
        """What the log says of it once it has ended, besides times."""
        prompt, cached, output = self._usage
        return {
            "rid": self._request.request_id.decode("latin-1"),
            "path": self._request.path,
            "outcome": self._outcome,
            "status": self.status,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": output,
        }

    @abstractmethod
    def check_time(self, now_s: float) -> None:
        """End it, or retry it on another target, if it has been stalled for too long."""


class DispatchDriver:
    """Reports events to the dispatch machine and performs its actions.

    exchanges: all open requests, in order of arrival. Used from one event loop.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.id = uuid.uuid4().hex[:12]
        self.created_s = int(time.time())
        self.own_routes: dict[str, OwnRoute] = {}
        """Paths that the router answers itself, besides those of `admin_routes`."""
        self.index = PrefixIndex(int(settings.index_mb * 1e6))
        self.workers = HttpWorkers(settings, self.index)
        self.metrics = RouterMetrics()
        options = PolicyOptions(
            settings.seed, settings.cache_threshold, settings.balance_abs_threshold, settings.balance_rel_threshold
        )
        sticky = bool(settings.session_header)
        self.machine: Dispatcher[HttpWorker, OpenRequest] = Dispatcher(
            self.workers,
            make_policy(settings.policy, options, sticky=sticky, failed=_policy_failed),
            make_policy(settings.prefill_policy, options, sticky=sticky, failed=_policy_failed),
            make_policy(settings.decode_policy, options, failed=_policy_failed),
        )
        self.policy, self.queue = self.machine.policy, self.machine.queue
        self.exchanges: dict[OpenRequest, None] = {}
        self.keys = open_tenant_keys(settings)
        self.draining = False
        self.worker_headers: list[tuple[bytes, bytes]] = []
        if settings.worker_api_key:
            self.worker_headers = [(b"authorization", b"Bearer " + settings.worker_api_key.encode())]
        self.health = HealthChecker(settings, self.workers, self.worker_headers, self.wake)
        self.shared = (
            RouterSync(settings.shared_url, self.id, self.workers, self.index, self.policy)
            if settings.shared_url
            else None
        )
        self.bytes_per_token = BYTES_PER_TOKEN
        self._serving = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.now_ns = time.monotonic_ns

    def now(self) -> float:
        """The time of the machine's clock in seconds."""
        return self.now_ns() / NS_PER_S

    # Workers.

    def add_worker(self, url: str, source: str, role: str = "") -> HttpWorker:
        """Add a worker. It gets requests once it is healthy.

        Raises ConfigError for an invalid or duplicate URL and for an unknown role.
        """
        worker = self.workers.add(url, source, role)
        self.health.watch(worker)
        return worker

    def remove_worker(self, worker: HttpWorker) -> None:
        """Remove a worker. Its open requests continue."""
        self.health.leave(worker)
        self.workers.remove(worker)
        self.wake()

    def drain_worker(self, worker: HttpWorker, *, draining: bool) -> None:
        """Stop new requests to a worker, or let it have requests again."""
        self.workers.drain(worker, draining=draining)
        self.wake()

    def why_not_ready(self) -> str:
        """Why no request should be sent here, "" if there is no reason."""
        return "draining" if self.draining else "" if any(worker.healthy for worker in self.workers) else "no worker"

    async def close(self) -> None:
        """Stop what runs next to requests."""
        await self.health.close()
        if self.keys is not None:
            await self.keys.close()

    def model_cards(self) -> dict[str, dict[str, Any]]:
        """The model cards of all healthy workers, by name."""
        cards: dict[str, dict[str, Any]] = {}
        for worker in self.workers:
            for card in worker.cards if worker.healthy else ():
                cards.setdefault(card["id"], {"object": "model", "created": self.created_s, **card})
        return cards

    # Requests.

    def arrived(self, request: OpenRequest) -> None:
        """A request for the workers has arrived."""
        self.metrics.requests += 1
        self.exchanges[request] = None
        self.perform(self.machine.arrived(request, self.now_ns()))

    def resume(self, request: OpenRequest, way: str) -> None:
        """A stream was interrupted: continue it at another target that can do so in this `way`."""
        self.metrics.continued += 1
        self.perform(self.machine.resume(request, way, self.now_ns()))
        self._set_timer()

    def may_resume(self, request: OpenRequest) -> bool:
        """Whether an interrupted stream may be tried again."""
        return self.machine.may_resume(request, self.now_ns())

    def retry(self, request: OpenRequest) -> None:
        """A request failed at its target and may be retried: place it again, now or later."""
        self.metrics.retries += 1
        self.perform(self.machine.retry(request, self.now_ns()))
        self._set_timer()

    def ended(self, request: OpenRequest) -> None:
        """A request has ended in any way."""
        self.exchanges.pop(request, None)
        if request.used_by:
            self._count_usage(request)
        self.machine.ended(request)
        if self.settings.log_requests:
            log_request(request, self.now_ns())
        self.wake()

    def _count_usage(self, request: OpenRequest) -> None:
        """A tenant's request has ended, and is still counted at its target: count what it used."""
        prompt, cached, output = request.tokens_used()
        if request.key is not None:
            request.key.ended(prompt + output - request.facts.tokens)
        used = self.metrics.usage_of(request.used_by, self.workers.base_of(request.facts.model))
        target = request.target
        cost, rows = (None, 1) if target is None else (target.worker.cost, target.state.requests)
        used.add(prompt, cached, output, cost, rows)

    def prefill_ended(self, request: OpenRequest, *, computed: bool) -> None:
        """The prefill worker is done with a request."""
        self.machine.prefill_ended(request, self.now_ns(), computed=computed)
        self.wake()

    def learn(self, parsed: ParsedRequest, sent: DispatchedRequest, prompt: int | None, cached: int | None) -> None:
        """A response succeeded: learn from the prompt length and the cached tokens that it reports, if any."""
        if prompt and not parsed.counted and parsed.prompt.size:
            self.bytes_per_token += RATIO_STEP * (parsed.prompt.size / prompt - self.bytes_per_token)
        if prompt is None or cached is None:
            return
        self.metrics.reported_tokens += prompt
        self.metrics.cached_tokens += cached
        self.metrics.predicted_tokens += sent.predicted
        sent.hit(cached)

    # Responses of workers.

    def answered(self, target: HttpTarget, status: int) -> None:
        """The worker has begun to respond."""
        self.metrics.statuses[status] += 1
        if status >= 500:
            self._failed(target)

    def completed(self, target: HttpTarget, status: int) -> None:
        """The worker's response is complete. A worker whose responses only begin well must not count as healthy."""
        if status < 500:
            self.machine.succeeded(target)

    def refused(self, target: HttpTarget, status: int) -> None:
        """The worker responded with an error that another worker may not give."""
        self.metrics.statuses[status] += 1
        if status not in REFUSALS:
            self._failed(target)
        elif status == DRAINS:
            self.health.check_soon(target.worker)

    def _failed(self, target: HttpTarget) -> None:
        self.metrics.worker_errors[target.name] += 1
        self.machine.failed(target, self.now_ns())

    def connection_failed(self, target: HttpTarget) -> None:
        """The connection failed before the response was complete: the worker may have died."""
        self.metrics.worker_errors[target.name] += 1
        self.perform(self.machine.connection_failed(target, self.now_ns()))

    def unreachable(self, target: HttpTarget, *, refused: bool) -> None:
        """No connection could be made. If it was `refused`, no process listens, and the worker's cache is lost."""
        self.metrics.worker_errors[target.name] += 1
        self.perform(self.machine.unreachable(target, self.now_ns(), refused=refused))

    # Actions.

    def perform(self, actions: list[Action[OpenRequest]]) -> None:
        """Perform actions of the machine, and serve the queue if the event freed capacity."""
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Refuse():
                    self._waited(action.request)
                    action.request.abort(self.refusal(action.request, action.cause))
                case _:
                    self.health.check_now(action.worker)
        self.wake()

    def refusal(self, request: OpenRequest, cause: str) -> RouterError:
        """The error for a request that the dispatch machine refused."""
        return refusal(cause)

    def _waited(self, request: OpenRequest) -> None:
        """A request has been sent or refused: observe how long it waited, the first time."""
        if not request.waited_ns:
            request.waited_ns = max(self.now_ns() - request.arrived_ns, 1)
            self.metrics.waited(self.workers.base_of(request.facts.model), request.waited_ns / NS_PER_S)

    def _send(self, action: Send[OpenRequest]) -> None:
        request = action.request
        self._waited(request)
        self._note(request, action.choice)
        if action.prefill is not None:
            self._note(request, action.prefill)
        try:
            request.dispatched()
        except Exception:
            log.exception("a request failed because of an internal error")
            what = "the router met an internal error; its log says more"
            request.abort(RouterError(500, what, code="internal_error"))

    def _note(self, request: OpenRequest, choice: Choice[HttpWorker]) -> None:
        """Count a choice, and publish it to other routers."""
        self.metrics.reasons[choice.ranking.reason] += 1
        self.metrics.chosen[choice.target.name] += 1
        if self.shared is not None:
            self.shared.sent(choice.target.state.name, request.parsed.prompt.digests, request.parsed.session)

    def wake(self) -> None:
        """If capacity may have been freed for a queued request, serve the queue in the next iteration of the loop."""
        if self.machine.serve_due and not self._serving:
            self._serving = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        self.perform(self.machine.serve(self.now_ns()))

    def _set_timer(self) -> None:
        """Set the timer to the machine's next tick."""
        now = self.now_ns()
        due = self.machine.next_ns(now)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due == NEVER_NS else self._loop.call_later(max(due - now, 0) / NS_PER_S, self._tick)

    def _tick(self) -> None:
        self.perform(self.machine.tick(self.now_ns()))
        self._set_timer()

    def abort_all(self) -> None:
        """The grace period has ended: abort all open requests."""
        for exchange in list(self.exchanges):
            exchange.abort(RouterError(503, "the router is shutting down", code="draining"))

    def sweep(self) -> None:
        """Expire queued and stalled requests. Called every `SWEEP_S`."""
        self.perform(self.machine.tick(self.now_ns()))
        now_s = self.now()
        for exchange in list(self.exchanges):
            exchange.check_time(now_s)


def log_request(request: OpenRequest, now: int) -> None:
    """Log the line of a request that has ended at `now` (ns). No text of prompts or answers is in it."""

    def since_arrival_ms(at: int) -> float | None:
        return round((at - request.arrived_ns) / NS_PER_MS, 1) if at else None

    facts = request.facts
    fields = {
        **request.log_fields(),
        "model": facts.model,
        "tenant": facts.tenant,
        "priority": facts.priority,
        "target": "" if request.target is None else request.target.name,
        "reason": "" if request.choice is None else request.choice.ranking.reason,
        "tries": request.tries,
        "queue_ms": round(request.waited_ns / NS_PER_MS, 1) if request.waited_ns else None,
        "ttft_ms": since_arrival_ms(request.first_byte_ns),
        "e2e_ms": since_arrival_ms(now),
    }
    words = " ".join(f"{name}={quoted_word(value)}" for name, value in fields.items() if value not in ("", None))
    request_log.info("Request: %s", words, extra={"fields": fields})


def _policy_failed(reason: str) -> None:
    log.error("the routing policy %s; predicted_ttft replaces it", reason)
