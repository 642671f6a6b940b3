"""The router: what comes from clients goes to workers, with the index, the queue and the counters in between."""

import asyncio
import hmac
import logging
import math
import uuid
from collections.abc import Iterator
from itertools import count

from tokenyard.base import ConfigError, TokenyardError
from tokenyard.router.choice import Features, PolicyOptions, Ranking, make_policy
from tokenyard.router.control import Control
from tokenyard.router.errors import RouterError
from tokenyard.router.exchange import OVERLOADED, ROUTE_HEADER, Exchange
from tokenyard.router.features import BYTES_PER_TOKEN, Parsed, Tokenize, parse_body
from tokenyard.router.front import FrontConnection, Headers, Incoming, Job
from tokenyard.router.health import Health
from tokenyard.router.index import PrefixIndex
from tokenyard.router.load import Sent
from tokenyard.router.metrics import Metrics
from tokenyard.router.queue import WaitingQueue
from tokenyard.router.settings import RouterSettings
from tokenyard.router.shared import Shared
from tokenyard.router.wire import HOP_BY_HOP
from tokenyard.router.workers import Target, Worker, Workers

log = logging.getLogger(__name__)

DATA_PREFIXES = ("/v1/", "/api/")
DATA_PATHS = frozenset({"/generate", "/tokenize", "/detokenize", "/rerank", "/classify", "/encode", "/completion"})
MOST_HOPS = 8
MOST_RETRY_TOKENS = 100.0
LONGEST_REQUEST_ID = 128
RATIO_STEP = 0.02


class Router:
    """Everything that the connections share. Lives in one event loop."""

    def __init__(self, settings: RouterSettings, tokenize: Tokenize | None = None) -> None:
        self.settings = settings
        self.index = PrefixIndex(int(settings.index_mb * 1e6))
        self.workers = Workers(settings, self.index)
        self.workers.on_change = self.room_appeared
        self.metrics = Metrics()
        options = PolicyOptions(
            settings.seed, settings.cache_threshold, settings.balance_abs_threshold, settings.balance_rel_threshold
        )
        self.policy = make_policy(settings.policy, options, sticky=bool(settings.session_header))
        self.queue: WaitingQueue[Exchange] = WaitingQueue(
            aging_s=settings.queue_aging_secs, weights=dict(_weights(settings.tenant_weights))
        )
        self.connections: set[FrontConnection] = set()
        self.exchanges: set[Exchange] = set()
        self.draining = False
        self.worker_headers: Headers = []
        own = {ROUTE_HEADER, b"x-request-id", b"x-data-parallel-rank", b"x-route-debug"}
        self.not_forwarded: set[bytes] = own | HOP_BY_HOP
        if settings.worker_api_key:
            self.worker_headers = [(b"authorization", b"Bearer " + settings.worker_api_key.encode())]
        if settings.worker_api_key or settings.api_key:
            self.not_forwarded.add(b"authorization")
        self._control = Control(self)
        self.health = Health(settings, self.workers, self.worker_headers)
        self._serving = False
        self._tokenize = tokenize
        self.id = uuid.uuid4().hex[:12]
        self._id = self.id.encode()
        self.shared = Shared(self, settings.shared_url) if settings.shared_url else None
        self._numbers = count()
        self._session_header = settings.session_header.lower().encode()
        self._retry_tokens = MOST_RETRY_TOKENS / 10
        self._bytes_per_token = BYTES_PER_TOKEN
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def add_worker(self, url: str, source: str) -> Worker:
        """A new worker, which gets requests once it is healthy. Raises ConfigError for a wrong or known URL."""
        worker = self.workers.add(url, source)
        self.health.watch(worker)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        """It gets no new requests; those that it has go on."""
        self.health.leave(worker)
        self.workers.remove(worker)

    def new_connection(self) -> FrontConnection:
        """A protocol for a client that has connected."""
        return FrontConnection(self.handle, self.connections, int(self.settings.max_body_mb * 1e6))

    def handle(self, front: FrontConnection, request: Incoming) -> Job | None:
        """Answer a request, or begin to."""
        request.request_id = self._request_id(request)
        try:
            if self._control.takes(request):
                return self._control.answer(front, request)
            if not (request.path in DATA_PATHS or request.path.startswith(DATA_PREFIXES)):
                what = f"there is nothing at this path: {request.method.decode()} {request.path}"
                raise RouterError(404, what, code="not_found")
            return self._data(front, request)
        except TokenyardError as error:
            self.metrics.failed(error.code)
            front.fail(error)
        except Exception:
            log.exception("a request failed by a fault of the router")
            self.metrics.failed("internal_error")
            front.fail(RouterError(500, "the router met an internal error; its log says more", code="internal_error"))
        return None

    def _data(self, front: FrontConnection, request: Incoming) -> Exchange:
        """A request for the workers. Raises TokenyardError for one that is refused here."""
        self.check_key(request, self.settings.api_key)
        if self.draining:
            raise RouterError(503, "the router is shutting down", code="draining")
        most = self.settings.max_concurrent_requests
        if most and len(self.exchanges) >= most:
            raise RouterError(429, f"{most} requests are open, which is the most; try again later", code="overloaded")
        self._check_loop(request)
        parsed = self._parsed(request)
        if parsed.rank is not None and not self.workers.has_rank(parsed.rank):
            raise RouterError(400, f"no worker has the rank {parsed.rank}", code="unknown_rank")
        self.metrics.requests += 1
        self._retry_tokens = min(self._retry_tokens + self.settings.retry_share, MOST_RETRY_TOKENS)
        exchange = Exchange(self, front, request, parsed)
        self.exchanges.add(exchange)
        exchange.start()
        return exchange

    def _parsed(self, request: Incoming) -> Parsed:
        if request.method != b"POST":
            return Parsed()
        parsed = parse_body(
            request.body,
            bytes_per_token=self._bytes_per_token,
            tokenize=self._tokenize,
            needs_prefix=self.policy.needs_prefix,
            stable=self.shared is not None,
        )
        if self._session_header:
            parsed.session = request.get(self._session_header).decode("latin-1")
        return parsed

    def check_key(self, request: Incoming, key: str) -> None:
        """Raise RouterError (401) unless the request brings `key`; with none wanted, any will do."""
        scheme, _, given = request.get(b"authorization").partition(b" ")
        if key and not (scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())):
            raise RouterError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    def _check_loop(self, request: Incoming) -> None:
        """Raise RouterError (508) for a request that was here before, or came through too many routers."""
        hops = request.get(ROUTE_HEADER).replace(b" ", b"").split(b",")
        if self._id in hops or len(hops) > MOST_HOPS:
            raise RouterError(508, "the request goes in a circle: a worker of this router is a router", code="loop")

    def hops(self, request: Incoming) -> bytes:
        """The header that names every router on the request's way."""
        before = request.get(ROUTE_HEADER)
        return before + b"," + self._id if before else self._id

    def _request_id(self, request: Incoming) -> bytes:
        given = request.get(b"x-request-id")
        if given and len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.decode().isprintable():
            return given
        return b"%b-%x" % (self._id, next(self._numbers))

    # What exchanges ask for.

    def rank(self, exchange: Exchange, targets: list[Target]) -> Ranking:
        """The policy's ranking of `targets`; notes on the exchange how much of its prompt each should hold."""
        parsed, matched = exchange.parsed, []
        digests = parsed.prompt.digests
        if digests and self.policy.needs_prefix:
            for target in targets:
                share = parsed.prompt.share(self.index.match(target.state.name, digests))
                matched.append(int(share * parsed.tokens))
            exchange.matched = dict(zip(targets, matched, strict=True))
        features = Features(parsed.tokens, matched, parsed.key, parsed.session)
        return self.policy.rank(features, [target.state for target in targets])

    def sent(self, exchange: Exchange, target: Target, reason: str) -> Sent:
        """Count a request that goes to `target` now, before it is on its way."""
        parsed, state = exchange.parsed, target.state
        self.metrics.reasons[reason] += 1
        self.metrics.chosen[target.name] += 1
        features = Features(parsed.tokens, (), parsed.key, parsed.session)
        self.policy.sent(features, state)
        if parsed.prompt.digests and self.policy.needs_prefix:
            self.index.insert(state.name, parsed.prompt.digests)
        if self.shared is not None:
            self.shared.sent(state.name, parsed.prompt.digests, parsed.session)
        return Sent(state, parsed.tokens, exchange.matched.get(target, 0), self.now())

    def may_retry(self) -> bool:
        """Whether the retry budget holds another try; takes it if so."""
        if self._retry_tokens < 1.0:
            return False
        self._retry_tokens -= 1.0
        return True

    def answered(self, target: Target, status: int) -> None:
        """The worker has begun to answer."""
        self.metrics.statuses[status] += 1
        if status < 500:
            target.breaker.succeeded()
        else:
            self._worker_failed(target)

    def refused(self, target: Target, status: int) -> None:
        """The worker has answered with an error that another one may not have."""
        self.metrics.statuses[status] += 1
        if status not in OVERLOADED:
            self._worker_failed(target)

    def broke(self, target: Target) -> None:
        """The connection broke before the answer was complete: the worker may have died."""
        self._worker_failed(target)
        self.health.look_now(target.worker)

    def unreachable(self, target: Target, *, nobody: bool) -> None:
        """There was no connecting. If `nobody` listens there, the worker is gone, and what it had cached with it."""
        self._worker_failed(target)
        if nobody and target.worker.healthy:
            self.workers.set_healthy(target.worker, False)
            self.workers.restarted(target.worker)
        self.health.look_now(target.worker)

    def _worker_failed(self, target: Target) -> None:
        self.metrics.worker_errors[target.name] += 1
        target.breaker.failed(self.now())

    def finished(self, exchange: Exchange, sent: Sent, prompt: int | None, cached: int | None) -> None:
        """An answer went well; learn from what it says of its prompt."""
        parsed = exchange.parsed
        if prompt and not parsed.counted and parsed.prompt.size:
            self._bytes_per_token += RATIO_STEP * (parsed.prompt.size / prompt - self._bytes_per_token)
        if prompt is None or cached is None:
            return
        self.metrics.told_tokens += prompt
        self.metrics.cached_tokens += cached
        self.metrics.predicted_tokens += sent.predicted
        sent.hit(cached)

    # The queue.

    def enqueue(self, exchange: Exchange) -> None:
        """Let a request wait for room; if the queue is full, the least urgent one is refused."""
        parsed, queue = exchange.parsed, self.queue
        if len(queue) >= self.settings.queue_size:
            lowest = queue.lowest(self.now())
            if lowest is None or lowest.priority >= parsed.priority:
                exchange.give_up(RouterError(429, "the queue is full; try again later", code="queue_full"))
                return
            queue.remove(lowest)
            lowest.item.give_up(RouterError(429, "the queue is full; try again later", code="queue_full"))
        deadline_s = exchange.leaves_s if parsed.deadline_ms is not None else math.inf
        self.metrics.queued += 1
        exchange.waiting = queue.push(
            exchange,
            self.now(),
            tokens=parsed.tokens,
            priority=parsed.priority,
            tenant=parsed.tenant,
            deadline_s=deadline_s,
            leaves_s=exchange.leaves_s,
        )

    def room_appeared(self) -> None:
        """A request has ended, or a worker has come: see who is next, after what is under way."""
        if self.queue and not self._serving:
            self._serving = True
            self._loop.call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        self._serving = False
        while self.queue:
            entry = self.queue.pop(self.now(), Exchange.fits)
            if entry is None:
                return
            entry.item.leave_queue()

    def cut_off(self) -> None:
        """The time is over: end whatever is open."""
        for exchange in list(self.exchanges):
            exchange.give_up(RouterError(503, "the router is shutting down", code="draining"))

    def sweep(self) -> None:
        """Four times a second: end what has stood still too long."""
        now = self.now()
        for entry in self.queue.expired(now):
            late = entry.deadline_s <= now
            code, what = ("deadline", "its deadline has passed") if late else ("queue_timeout", "no worker had room")
            entry.item.waiting = None
            entry.item.give_up(RouterError(503, f"the request waited here and {what}; try again later", code=code))
        for exchange in list(self.exchanges):
            exchange.check_time(now)
        for connection in list(self.connections):
            connection.check_time(now, self.settings.client_timeout_secs)
        self.room_appeared()


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
