"""The dispatch machine: which target gets a request, which requests wait, and which are refused. Pure.

The router drives it from asyncio and the simulator in virtual time. A driver reports events by calling the methods of
`Dispatcher` with the time `now` in ns, and performs the actions that they return: `Send`, `Refuse` and `Probe`. A
request for which no action is returned waits: in the queue until a target has capacity, or, after a failure, until it
is retried. When `serve_due` is true, the driver calls `serve`; at `next_ns` it calls `tick`.
"""

import heapq
import math
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from tokenyard.base import NS_PER_S
from tokenyard.routing.load import DispatchedRequest
from tokenyard.routing.policies import Ranking, RequestFeatures, RoutePolicy
from tokenyard.routing.prefix_index import Prompt
from tokenyard.routing.queue import QueueEntry, WaitingQueue
from tokenyard.routing.workers import DECODE, Target, W, Workers

NEVER_NS = 2**63 - 1
TICK_NS = NS_PER_S // 4
"""How often requests that have waited too long are looked for, while any waits."""

MAX_RETRY_TOKENS = 100.0
BACKOFF_FACTOR, MAX_DOUBLINGS = 1.5, 16

NO_WORKER, QUEUE_FULL, QUEUE_TIMEOUT, DEADLINE = "no_worker", "queue_full", "queue_timeout", "deadline"
WORKER_FAILED, MODEL_UNAVAILABLE = "worker_failed", "model_unavailable"
CAUSES = (NO_WORKER, QUEUE_FULL, QUEUE_TIMEOUT, DEADLINE, WORKER_FAILED, MODEL_UNAVAILABLE)
"""Why a request is refused.

no_worker: there are no workers at all.
queue_full: the queue is full of requests that are at least as urgent, or a more urgent one took its place.
queue_timeout: it was queued for too long.
deadline: it was queued until its deadline passed.
model_unavailable: no worker that serves its model was healthy for too long, or when it had been queued for too long.
worker_failed: its stream was interrupted, and no worker could continue it in time.
"""


@dataclass(slots=True)
class RequestFacts:
    """What is known about a request when it arrives."""

    prompt: Prompt = field(default_factory=Prompt)
    """The prompt as blocks."""
    tokens: int = 1
    """Prompt length in tokens, possibly estimated from the text."""
    model: str = ""
    """The model or adapter that the client names; "" for any."""
    stream: bool = False
    """Whether the response is a stream, so that its first token can be observed."""
    priority: int = 0
    """Higher is more urgent."""
    tenant: str = ""
    """Whose request it is, for fair queueing."""
    session: str = ""
    """Requests of one session go to one target."""
    engine: str = ""
    """The engine with the stored response that it asks for, by the beginning of its boot id; "" for any."""
    among: frozenset[str] | None = None
    """host:port of the workers that a gateway allows for it; None for any."""
    deadline_ns: int | None = None
    """The client's deadline, from the arrival on; None for none."""
    rank: int | None = None
    """The data-parallel rank that the client asks for; None for any."""
    prefill_rank: int | None = None
    """The same for the prefill engine under PD disaggregation."""
    decode_rank: int | None = None
    """The same for the decode engine under PD disaggregation."""
    key: int = 0
    """Hash of the beginning of the prompt, the same in every process (see `RequestFeatures`)."""


@dataclass(slots=True)
class Choice(Generic[W]):
    """One decision of a policy."""

    target: Target[W]
    """The chosen target."""
    ranked: list[Target[W]]
    """The targets that the policy ranked."""
    ranking: Ranking
    """Their order and scores, and the reason."""
    predicted: int
    """Prompt tokens that `target` should have cached."""


class PendingRequest(Generic[W]):
    """An open request. The driver derives from it, sets `alone`, and clears `interrupted_ns` when the stream is
    continued; the machine writes the other fields.

    facts: what is known about it.
    disagg: whether a prefill worker may compute its prompt for a decode worker.
    alone: whether its prefill was refused, so that the decode worker computes the prompt.
    resume_way: the `Worker.continues` that its target must have, once its stream continues; "" before.
    arrived_ns: when it arrived.
    interrupted_ns: since when its stream is interrupted; None if it is not.
    over: whether it has ended.
    waiting: its entry in the queue; None if it is not in the queue.
    unserved_ns: since when it waits and no worker for its model is healthy; None while one is.
    retry_ns: when it is retried; None unless it waits for that.
    target: its target, or the last one; None before the first.
    tried: the targets that it was sent to since it last had to start over.
    tries: how often it was sent.
    choice: the decision for `target`.
    sent: how it is counted at `target`; None while it is at no target.
    partner: the prefill target that computes its prompt, or the last one; None if `target` computes it.
    prefill: how it is counted at `partner`; None once the prompt is computed.
    """

    def __init__(self, facts: RequestFacts, *, disagg: bool = False) -> None:
        self.facts, self.disagg = facts, disagg
        self.alone, self.resume_way = False, ""
        self.arrived_ns = 0
        self.interrupted_ns: int | None = None
        self.over = False
        self.waiting: QueueEntry[Any] | None = None
        self.unserved_ns: int | None = None
        self.retry_ns: int | None = None
        self.target: Target[W] | None = None
        self.tried: set[Target[W]] = set()
        self.tries = 0
        self.choice: Choice[W] | None = None
        self.sent: DispatchedRequest | None = None
        self.partner: Target[W] | None = None
        self.tried_partners: set[Target[W]] = set()
        self.prefill: DispatchedRequest | None = None


R = TypeVar("R", bound=PendingRequest[Any])


@dataclass(slots=True)
class Send(Generic[R]):
    """Send a request to its `target`; it is counted there already."""

    request: R
    choice: Choice[Any]
    """The decision for `request.target`."""
    prefill: Choice[Any] | None = None
    """The decision for `request.partner`; None without one."""


@dataclass(slots=True)
class Refuse(Generic[R]):
    """End a request with an error. It has left the queue; the driver calls `ended`."""

    request: R
    cause: str
    """One of `CAUSES`."""


@dataclass(slots=True)
class Probe:
    """Probe a worker at once, because a request failed there."""

    worker: Any
    """The worker."""


Action = Send[R] | Refuse[R] | Probe


class Dispatcher(Generic[W, R]):
    """Chooses targets for requests, queues requests without one, counts load, and learns from responses.

    A policy is any `RoutePolicy`. Times are ns of one clock that starts at 0 or later.

    queue: the requests that wait for capacity.
    queued: number of requests that were queued so far.
    """

    def __init__(
        self,
        workers: Workers[W],
        policy: RoutePolicy,
        prefill_policy: RoutePolicy | None = None,
        decode_policy: RoutePolicy | None = None,
    ) -> None:
        """`policy` chooses targets; with PD disaggregation `decode_policy` and `prefill_policy` choose a pair."""
        self.workers, self.index, self.settings = workers, workers.index, workers.settings
        self.policy = policy
        self.prefill_policy = prefill_policy or policy
        self.decode_policy = decode_policy or policy
        self.queue: WaitingQueue[R] = WaitingQueue(
            aging_s=self.settings.queue_aging_s, weights=self.settings.tenant_weights
        )
        self.queued = 0
        self._assumed: list[tuple[int, int, DispatchedRequest]] = []
        self._retries: list[tuple[int, int, R]] = []
        self._order = count()
        self._retry_tokens = MAX_RETRY_TOKENS / 10

    # Requests.

    def arrived(self, request: R, now: int) -> list[Action[R]]:
        """A request has arrived."""
        self._retry_tokens = min(self._retry_tokens + self.settings.retry_share, MAX_RETRY_TOKENS)
        request.arrived_ns = now
        return self.place(request, now)

    def place(self, request: R, now: int) -> list[Action[R]]:
        """Choose a target for a request that is at none, or queue or refuse it."""
        fresh = self._with_capacity(request, now)
        if request.resume_way:
            return self._continue(request, fresh or self._eligible(request, now), now)
        if fresh and not self.queue:
            return [self._dispatch(request, fresh, now)]
        if not len(self.workers):
            return [Refuse(request, NO_WORKER)]
        if fresh:
            self.workers.capacity_freed = True
        return self._enqueue(request, now)

    def resume(self, request: R, way: str, now: int) -> list[Action[R]]:
        """The stream of a request was interrupted: continue it at a target that can do so in this `way`.

        It does not queue again: a target without capacity gets it too, as it can refuse it.
        """
        self.released(request)
        request.resume_way = way
        if request.interrupted_ns is None:
            request.interrupted_ns = now
        return self.place(request, now)

    def may_resume(self, request: R, now: int) -> bool:
        """Whether an interrupted stream may be tried again: until the queue's timeout after the interruption."""
        since = request.interrupted_ns
        return since is not None and now - since < self.settings.queue_timeout_s * NS_PER_S

    def may_retry(self, request: R, *, broken: bool = False) -> bool:
        """Take one retry from the budget; False if the budget or the retries of this request are used up.

        The first one after a `broken` connection is free: a worker that dies loses all its requests at once.
        """
        if request.tries > self.settings.max_retries:
            return False
        if broken and request.tries == 1:
            return True
        if self._retry_tokens < 1.0:
            return False
        self._retry_tokens -= 1.0
        return True

    def retry(self, request: R, now: int) -> list[Action[R]]:
        """The request failed at its target: place it again, at once if an untried target has capacity, else later."""
        self.released(request)
        if any(target not in request.tried and not target.state.full for target in self._eligible(request, now)):
            return self.place(request, now)
        self._retry_later(request, now)
        return []

    def _retry_later(self, request: R, now: int) -> None:
        settings = self.settings
        wait_s = min(
            settings.initial_backoff_s * BACKOFF_FACTOR ** min(request.tries, MAX_DOUBLINGS), settings.max_backoff_s
        )
        request.retry_ns = now + round(wait_s * NS_PER_S)
        heapq.heappush(self._retries, (request.retry_ns, next(self._order), request))

    def first_token(self, request: R, now: int) -> None:
        """The response of the request begins."""
        if request.sent is not None:
            request.sent.first_token(now / NS_PER_S)

    def prefill_ended(self, request: R, now: int, *, computed: bool) -> None:
        """The prefill worker is done with the request: its prompt is `computed`, or it failed or is not needed."""
        prefill, request.prefill = request.prefill, None
        if prefill is None:
            return
        assert request.partner is not None
        if computed:
            prefill.first_token(now / NS_PER_S)
        self._uncount(prefill, request.partner, request.facts.priority)

    def released(self, request: R) -> None:
        """The request is no longer at its targets: stop counting it there. Further calls have no effect."""
        if request.prefill is not None:
            self.prefill_ended(request, 0, computed=False)
        sent, request.sent = request.sent, None
        if sent is not None:
            assert request.target is not None
            self._uncount(sent, request.target, request.facts.priority)

    def ended(self, request: R) -> None:
        """The request has ended in any way: its response is complete, it failed, or its client disconnected."""
        request.over, request.retry_ns = True, None
        waiting, request.waiting = request.waiting, None
        if waiting is not None:
            self.queue.remove(waiting)
        self.released(request)

    # Workers.

    def succeeded(self, target: Target[W]) -> None:
        """The target has completed a response without failing."""
        target.breaker.succeeded()

    def failed(self, target: Target[W], now: int) -> None:
        """The target itself failed: its response says so."""
        target.breaker.failed(now)

    def connection_failed(self, target: Target[W], now: int) -> list[Action[R]]:
        """The connection failed before the response was complete: the worker may have died."""
        target.breaker.failed(now)
        return [Probe(target.worker)]

    def unreachable(self, target: Target[W], now: int, *, refused: bool) -> list[Action[R]]:
        """No connection could be made. If it was `refused`, no process listens there."""
        target.breaker.failed(now)
        if refused:
            self.workers.down(target.worker)
        return [Probe(target.worker)]

    # Time.

    @property
    def serve_due(self) -> bool:
        """Whether `serve` may find capacity for a queued request."""
        return self.workers.capacity_freed and len(self.queue) > 0

    def serve(self, now: int) -> list[Action[R]]:
        """Assign free capacity to the most urgent queued requests."""
        self.workers.capacity_freed = False
        actions: list[Action[R]] = []
        fits = partial(self._with_capacity, now=now)
        while self.queue:
            entry = self.queue.pop(now / NS_PER_S, fits)
            if entry is None:
                break
            entry.item.waiting = None
            actions.append(self._dispatch(entry.item, fits(entry.item), now))
        return actions

    def next_ns(self, now: int) -> int:
        """When to call `tick`, for the time after `now`; NEVER_NS if nothing waits."""
        while self._retries and self._retries[0][2].retry_ns != self._retries[0][0]:
            heapq.heappop(self._retries)
        due = self._retries[0][0] if self._retries else NEVER_NS
        return min(due, (now // TICK_NS + 1) * TICK_NS) if self.queue else due

    def tick(self, now: int) -> list[Action[R]]:
        """Retry requests, refuse those that have waited too long, and serve the queue."""
        actions: list[Action[R]] = []
        while self._retries and self._retries[0][0] <= now:
            at, _, request = heapq.heappop(self._retries)
            if request.retry_ns == at:
                request.retry_ns = None
                actions += self.place(request, now)
        self._expire_assumed(now)
        actions += self._unserved(now)
        now_s = now / NS_PER_S
        for entry in self.queue.expired(now_s):
            entry.item.waiting = None
            late = QUEUE_TIMEOUT if entry.item.unserved_ns is None else MODEL_UNAVAILABLE
            actions.append(Refuse(entry.item, DEADLINE if entry.deadline_s <= now_s else late))
        return actions + self.serve(now)

    def _unserved(self, now: int) -> list[Action[R]]:
        """Refuse the queued requests for whose model no worker has been healthy for too long."""
        refused: list[Action[R]] = []
        limit_ns = self.settings.unavailable_timeout_s * NS_PER_S
        for entry in list(self.queue):
            request = entry.item
            if self.workers.serves(request.facts.model):
                request.unserved_ns = None
            elif request.unserved_ns is None:
                request.unserved_ns = now
            elif 0 < limit_ns <= now - request.unserved_ns:
                self.queue.remove(entry)
                request.waiting = None
                refused.append(Refuse(request, MODEL_UNAVAILABLE))
        return refused

    # The choice.

    def policy_for(self, request: R) -> RoutePolicy:
        """The policy that chooses the targets of a request."""
        return self.decode_policy if request.disagg else self.policy

    def _eligible(self, request: R, now: int) -> list[Target[W]]:
        """Targets that may serve a request now, whether or not they have capacity."""
        facts = request.facts
        found = self.workers.eligible(facts.model, facts.decode_rank if request.disagg else facts.rank, now)
        if facts.engine and (holder := self.workers.booted_as(facts.engine, facts.model)) is not None:
            found = [target for target in found if target.worker is holder]
        if facts.among is not None:
            found = [target for target in found if target.worker.address.partition("//")[2] in facts.among]
        if request.resume_way:
            return [target for target in found if target.worker.continues == request.resume_way]
        if request.disagg and not self._partners(request, now):
            return [target for target in found if target.worker.role != DECODE or target.worker.computes_alone]
        return found

    def _with_capacity(self, request: R, now: int) -> list[Target[W]]:
        """Targets that have capacity for a request now."""
        priority, eligible = request.facts.priority, self._eligible(request, now)
        return [t for t in eligible if not 0 < t.state.room <= t.state.requests or t.has_capacity(priority)]

    def _partners(self, request: R, now: int) -> list[Target[W]]:
        """Prefill targets that have capacity for a request now."""
        facts = request.facts
        found = self.workers.prefilling(facts.model, facts.prefill_rank, now)
        return [target for target in found if target.has_capacity(facts.priority)]

    def _continue(self, request: R, targets: list[Target[W]], now: int) -> list[Action[R]]:
        """Send an interrupted stream to one of `targets`. If there are none, it waits for a retry or ends."""
        if targets:
            return [self._dispatch(request, targets, now)]
        if not self.may_resume(request, now):
            return [Refuse(request, WORKER_FAILED)]
        self._retry_later(request, now)
        return []

    def _dispatch(self, request: R, fresh: list[Target[W]], now: int) -> Send[R]:
        """Count a request at the best of the targets `fresh`; at one that it was sent to before only if all were."""
        policy = self.policy_for(request)
        choice, features = self._choose(request, policy, _untried(fresh, request.tried), now)
        target = request.target = choice.target
        request.tried.add(target)
        request.choice = choice
        request.tries += 1
        partner = self._dispatch_prefill(request, target, now)
        request.sent = sent = self._count(request, policy, choice, features, now, prefills=partner is None)
        if partner is None and not request.facts.stream:
            # Without streaming, the first token cannot be observed.
            heapq.heappush(self._assumed, (now + round(sent.expected_s() * NS_PER_S), next(self._order), sent))
        return Send(request, choice, partner)

    def _dispatch_prefill(self, request: R, target: Target[W], now: int) -> Choice[W] | None:
        """Count a request at a prefill target, if one computes the prompt for `target`."""
        request.partner = None
        if not request.disagg or request.alone or request.resume_way or target.worker.role != DECODE:
            return None
        partners = self._partners(request, now)
        if not partners:
            return None
        policy = self.prefill_policy
        choice, features = self._choose(request, policy, _untried(partners, request.tried_partners), now)
        request.partner = choice.target
        request.tried_partners.add(choice.target)
        request.prefill = self._count(request, policy, choice, features, now)
        return choice

    def _choose(
        self, request: R, policy: RoutePolicy, targets: list[Target[W]], now: int
    ) -> tuple[Choice[W], RequestFeatures]:
        """The policy's choice among `targets`, and the features that it saw."""
        if self._assumed:
            self._expire_assumed(now)
        facts, states = request.facts, [target.state for target in targets]
        prompt, matched = facts.prompt, []
        if prompt.digests and policy.needs_prefix:
            blocks = self.index.matches([state.name for state in states], prompt.digests)
            matched = [round(prompt.share(held) * facts.tokens) if held else 0 for held in blocks]
        features = RequestFeatures(facts.tokens, matched, facts.key, facts.session, now, facts.tenant, facts.priority)
        ranking = policy.rank(features, states)
        first = ranking.order[0]
        return Choice(targets[first], targets, ranking, matched[first] if matched else 0), features

    def _count(
        self,
        request: R,
        policy: RoutePolicy,
        choice: Choice[W],
        features: RequestFeatures,
        now: int,
        *,
        prefills: bool = True,
    ) -> DispatchedRequest:
        """Count a request at the chosen target. `prefills`: False if another target computes the prompt."""
        facts, target, state = request.facts, choice.target, choice.target.state
        policy.sent(features, state)
        if facts.prompt.digests and policy.needs_prefix:
            self.index.insert(state.name, facts.prompt.digests)
        target.levels[facts.priority] += 1
        return DispatchedRequest(state, facts.tokens, choice.predicted, now / NS_PER_S, prefills=prefills)

    def _uncount(self, sent: DispatchedRequest, target: Target[W], priority: int) -> None:
        """Remove a request from the load of its target."""
        levels = target.levels
        levels[priority] -= 1
        if not levels[priority]:
            del levels[priority]
        sent.end()
        self.workers.capacity_freed = True

    def _expire_assumed(self, now: int) -> None:
        """Assume the first tokens that cannot be observed, at their predicted times."""
        while self._assumed and self._assumed[0][0] <= now:
            heapq.heappop(self._assumed)[2].prefilled()

    def _enqueue(self, request: R, now: int) -> list[Action[R]]:
        """Queue a request. If the queue is full, the least urgent request is refused."""
        facts, queue, now_s = request.facts, self.queue, now / NS_PER_S
        refused: list[Action[R]] = []
        if len(queue) >= self.settings.queue_size:
            lowest = queue.lowest(now_s)
            if lowest is None or lowest.priority >= facts.priority:
                return [Refuse(request, QUEUE_FULL)]
            queue.remove(lowest)
            lowest.item.waiting = None
            refused.append(Refuse(lowest.item, QUEUE_FULL))
        if not queue:
            # Nothing else waits, and this request has just found no capacity.
            self.workers.capacity_freed = False
        self.queued += 1
        arrived_s = request.arrived_ns / NS_PER_S
        deadline_s = math.inf if facts.deadline_ns is None else arrived_s + facts.deadline_ns / NS_PER_S
        request.waiting = queue.push(
            request,
            now_s,
            tokens=facts.tokens,
            priority=facts.priority,
            tenant=facts.tenant,
            model=self.workers.named(facts.model),
            deadline_s=deadline_s,
            expires_s=min(deadline_s, arrived_s + self.settings.queue_timeout_s),
        )
        return refused


def _untried(targets: list[Target[W]], tried: set[Target[W]]) -> list[Target[W]]:
    """The `targets` that are not in `tried`; if there are none, all of them, and `tried` starts over."""
    if not tried:
        return targets
    fresh = [target for target in targets if target not in tried]
    if not fresh:
        tried.clear()
    return fresh or targets
