"""The dispatch machine under arbitrary events: requests, failures, probes, drains and time in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tokenyard.base import NS_PER_S
from tokenyard.routing.dispatch import CAUSES, NEVER_NS, Dispatcher, PendingRequest, Probe, Refuse, RequestFacts, Send
from tokenyard.routing.dispatch_settings import DispatchSettings
from tokenyard.routing.prefix_index import PrefixIndex, text_prompt
from tokenyard.routing.registry import POLICIES, make_policy
from tokenyard.routing.workers import DECODE, PREFILL, Worker, Workers

QUEUE_SIZE, ROOM, RETRIES = 2, 1, 3
WAY = "tokens"
PREEMPTS = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 1}


class DispatchMachine(RuleBasedStateMachine):
    """Every open request is in exactly one place, and nothing is counted once all have ended."""

    requests, workers = Bundle("requests"), Bundle("workers")

    @initialize(target=workers, policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy):
        self.now = 0
        self.registry = Workers(
            DispatchSettings(
                queue_size=QUEUE_SIZE,
                queue_timeout_s=5.0,
                queue_aging_s=1.0,
                max_retries=RETRIES,
                retry_share=1.0,
                cb_failure_threshold=1,
                cb_success_threshold=1,
                cb_timeout_s=3.0,
                health_failure_threshold=2,
                health_success_threshold=2,
            ),
            PrefixIndex(1 << 20),
        )
        self.machine = Dispatcher(self.registry, make_policy(policy, sticky=True))
        self.open, self.targets, self.made = [], set(), 0
        worker = self._join("", preempts=False, ranks=1)
        self.registry.probed(worker, success=True)
        return worker

    def perform(self, actions):
        """Check the actions, and do what a driver does."""
        for action in actions:
            match action:
                case Send():
                    self._sent(action)
                case Refuse():
                    assert action.cause in CAUSES
                    assert action.request in self.open
                    assert action.request.sent is None
                    assert action.request.waiting is None
                    self.end(action.request)
                case Probe():
                    assert isinstance(action.worker, Worker)

    def _sent(self, action):
        request, target = action.request, action.choice.target
        assert request in self.open
        assert request.sent is not None
        assert request.target is target
        self._may_get_requests(target)
        if request.resume_way:
            assert target.worker.continues == request.resume_way
        else:
            assert target.state.requests <= ROOM or target.worker.preempts_by is not None
        if action.prefill is not None:
            assert request.partner is action.prefill.target
            assert target.worker.role == DECODE
            assert request.partner.worker.role == PREFILL
            self._may_get_requests(request.partner)

    def _may_get_requests(self, target):
        worker = target.worker
        assert worker in list(self.registry)
        assert worker.healthy
        assert not worker.draining
        assert target.breaker.open_until_ns <= self.now

    def end(self, request):
        self.machine.ended(request)
        self.open.remove(request)

    def serve(self):
        if self.machine.serve_due:
            self.perform(self.machine.serve(self.now))

    # Workers.

    @rule(
        target=workers,
        role=st.sampled_from(["", "", PREFILL, DECODE]),
        preempts=st.booleans(),
        ranks=st.integers(1, 2),
        healthy=st.booleans(),
    )
    def worker_added(self, role, preempts, ranks, healthy):
        worker = self._join(role, preempts=preempts, ranks=ranks)
        self.registry.probed(worker, success=healthy)
        self.serve()
        return worker

    def _join(self, role, *, preempts, ranks):
        name = f"w{self.made}"
        self.made += 1
        worker = self.registry.join(Worker(name, name, role=role, continues=WAY, computes_alone=bool(self.made % 2)))
        info = {"dp_size": ranks, "max_running_requests": ROOM * ranks, "max_total_num_tokens": 10_000}
        self.registry.report(worker, info | (PREEMPTS if preempts else {}))
        self.targets.update(worker.targets)
        return worker

    @rule(worker=workers, success=st.booleans())
    def probed(self, worker, success):
        self.registry.probed(worker, success=success)
        self.serve()

    @rule(worker=workers, draining=st.booleans())
    def drained(self, worker, draining):
        if worker in list(self.registry):
            self.registry.drain(worker, draining=draining)
            self.serve()

    @rule(worker=consumes(workers))
    def worker_removed(self, worker):
        self.registry.remove(worker)
        self.serve()

    @rule(worker=workers, ranks=st.integers(1, 3))
    def ranks_changed(self, worker, ranks):
        if worker in list(self.registry):
            report = {"dp_size": ranks, "max_running_requests": ROOM * ranks}
            self.registry.report(worker, report | (PREEMPTS if worker.preempts_by else {}))
            self.targets.update(worker.targets)
            self.serve()

    # Requests.

    @rule(
        target=requests,
        priority=st.integers(-1, 2),
        tenant=st.sampled_from(["", "a"]),
        deadline_s=st.sampled_from([None, 0.5, 20.0]),
        stream=st.booleans(),
        disagg=st.booleans(),
        prompt=st.sampled_from([b"x" * 600, b"y" * 2000, b""]),
    )
    def arrived(self, priority, tenant, deadline_s, stream, disagg, prompt):
        facts = RequestFacts(
            text_prompt(prompt, stable=True),
            max(len(prompt) // 4, 1),
            stream=stream,
            priority=priority,
            tenant=tenant,
            session=tenant,
            deadline_ns=None if deadline_s is None else round(deadline_s * NS_PER_S),
        )
        request = PendingRequest(facts, disagg=disagg)
        self.open.append(request)
        self.perform(self.machine.arrived(request, self.now))
        self.serve()
        return request

    @rule(request=requests)
    def first_token(self, request):
        if request.sent is not None:
            self.machine.first_token(request, self.now)
            self.machine.succeeded(request.target)
            request.interrupted_ns = None

    @rule(request=requests, computed=st.booleans())
    def prefill_ended(self, request, computed):
        self.machine.prefill_ended(request, self.now, computed=computed)
        self.serve()

    @rule(request=requests, refused=st.sampled_from([None, False, True]))
    def failed(self, request, refused):
        """The response failed before it began: `refused` is None for a broken connection."""
        if request.sent is None or request.resume_way:
            return
        if refused is None:
            self.perform(self.machine.connection_failed(request.target, self.now))
        else:
            self.perform(self.machine.unreachable(request.target, self.now, refused=refused))
        tries = request.tries
        if self.machine.may_retry(request):
            assert tries <= RETRIES
            self.perform(self.machine.retry(request, self.now))
        else:
            self.end(request)
        self.serve()

    @rule(request=requests)
    def interrupted(self, request):
        if request.sent is not None:
            self.perform(self.machine.resume(request, WAY, self.now))
            self.serve()

    @rule(request=consumes(requests))
    def ended(self, request):
        if request in self.open:
            self.end(request)
        self.machine.ended(request)
        self.serve()

    # Time.

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0]))
    def time_passes(self, seconds):
        end = self.now + round(seconds * NS_PER_S)
        while (due := self.machine.next_ns(self.now)) <= end:
            assert due > self.now or due <= end
            self.now = max(due, self.now)
            self.perform(self.machine.tick(self.now))
        self.now = end

    @invariant()
    def each_request_is_in_one_place(self):
        for request in getattr(self, "open", ()):
            places = (request.sent is not None, request.waiting is not None, request.retry_ns is not None)
            assert sum(places) == 1, places
            assert not request.over

    @invariant()
    def the_queue_is_bounded_and_true(self):
        waiting = [request for request in getattr(self, "open", ()) if request.waiting is not None]
        if waiting:
            assert len(self.machine.queue) == len(waiting) <= QUEUE_SIZE

    @invariant()
    def load_is_what_is_open(self):
        for target in getattr(self, "targets", ()):
            at_target = [request for request in self.open if request.sent is not None and request.target is target]
            prefills = [request for request in self.open if request.prefill is not None and request.partner is target]
            assert target.state.requests == len(at_target) + len(prefills) == sum(target.levels.values())

    def teardown(self):
        """What waits is decided in bounded time, and nothing stays counted."""
        if not hasattr(self, "machine"):
            return
        for _ in range(1000):
            due = self.machine.next_ns(self.now)
            if due == NEVER_NS:
                break
            self.now = max(due, self.now)
            self.perform(self.machine.tick(self.now))
        assert all(request.sent is not None for request in self.open), "a request waits for ever"
        for request in list(self.open):
            self.end(request)
        assert not len(self.machine.queue)
        for target in self.targets:
            state = target.state
            assert (state.requests, state.context_tokens, state.prefill_tokens) == (0, 0.0, 0.0)
            assert not target.levels


DispatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_dispatch_machine_keeps_its_books = DispatchMachine.TestCase
