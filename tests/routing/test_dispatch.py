from tokenyard.base import NS_PER_S
from tokenyard.routing.dispatch import Dispatcher, PendingRequest, Probe, Refuse, RequestFacts, Send
from tokenyard.routing.dispatch_settings import DispatchSettings
from tokenyard.routing.policies import Ranking, RoutePolicy
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.registry import make_policy
from tokenyard.routing.workers import DECODE, PREFILL, Worker, Workers


class Fleet:
    """A dispatch machine with healthy workers; each takes `room` requests."""

    def __init__(self, *roles, room=1, policy="round_robin", **settings):
        registry = Workers(DispatchSettings(**settings), PrefixIndex(1 << 20))
        made = policy if isinstance(policy, RoutePolicy) else make_policy(policy)
        self.machine, self.workers = Dispatcher(registry, made), []
        for number, role in enumerate(roles or ("",)):
            worker = registry.join(Worker(f"w{number}", f"w{number}", role=role))
            registry.report(worker, {"max_running_requests": room})
            registry.probed(worker, success=True)
            self.workers.append(worker)

    def arrive(self, now_s=0.0, *, disagg=False, **facts):
        request = PendingRequest(RequestFacts(stream=True, **facts), disagg=disagg)
        return request, self.machine.arrived(request, round(now_s * NS_PER_S))


def targets(actions):
    return [action.choice.target.name for action in actions if isinstance(action, Send)]


def causes(actions):
    return [action.cause for action in actions if isinstance(action, Refuse)]


def test_a_request_without_a_target_waits_for_one():
    fleet = Fleet()
    first, sent = fleet.arrive()
    second, waits = fleet.arrive()
    assert (targets(sent), waits) == (["w0"], [])
    assert not fleet.machine.serve_due
    fleet.machine.ended(first)
    assert fleet.machine.serve_due
    assert [action.request for action in fleet.machine.serve(0)] == [second]


def test_a_request_is_refused_where_there_is_no_worker():
    machine = Dispatcher(Workers(DispatchSettings(), PrefixIndex(1 << 20)), make_policy("random"))
    assert causes(machine.arrived(PendingRequest(RequestFacts()), 0)) == ["no_worker"]


def test_a_stored_response_is_asked_for_at_its_engine_unless_that_serves_another_model():
    fleet = Fleet("", "", room=9)
    for worker, model in zip(fleet.workers, "mn", strict=True):
        fleet.machine.workers.report(worker, {"boot_id": f"{model}-boot"})
        fleet.machine.workers.set_models(worker, frozenset({model}), frozenset({model}))
    assert targets(fleet.arrive(engine="m-boot")[1]) == ["w0"]
    assert targets(fleet.arrive(engine="m-boot", model="m")[1]) == ["w0"]
    assert targets(fleet.arrive(engine="m-boot", model="n")[1]) == ["w1"]


def test_the_least_urgent_request_leaves_a_full_queue():
    fleet = Fleet(queue_size=1)
    fleet.arrive()
    low, _ = fleet.arrive(priority=0)
    assert causes(fleet.arrive(priority=0)[1]) == ["queue_full"]
    [refused] = fleet.arrive(priority=1)[1]
    assert (refused.request, refused.cause) == (low, "queue_full")


def test_queueing_is_bounded_from_the_arrival_on_and_names_its_cause():
    fleet = Fleet(queue_timeout_s=10.0)
    blocking, _ = fleet.arrive()
    fleet.arrive(1.0)
    fleet.arrive(1.0, deadline_ns=3 * NS_PER_S)
    fleet.arrive(1.0, deadline_ns=30 * NS_PER_S)
    now, found = NS_PER_S, []
    while len(fleet.machine.queue):
        now = fleet.machine.next_ns(now)
        found += [(now / NS_PER_S, cause) for cause in causes(fleet.machine.tick(now))]
    assert found == [(4.0, "deadline"), (11.0, "queue_timeout"), (11.0, "queue_timeout")]
    assert blocking.sent is not None


def test_a_failed_request_goes_elsewhere_at_once_and_to_a_tried_target_after_a_wait():
    fleet = Fleet("", "", initial_backoff_s=1.0, max_backoff_s=4.0)
    request, sent = fleet.arrive()
    assert targets(sent) == ["w0"]
    assert targets(fleet.machine.retry(request, 0)) == ["w1"]
    assert fleet.machine.retry(request, 0) == []
    due = fleet.machine.next_ns(0)
    assert due == 2.25 * NS_PER_S
    assert targets(fleet.machine.tick(due - 1)) == []
    assert len(targets(fleet.machine.tick(due))) == 1


def test_retries_have_a_budget():
    fleet = Fleet("", room=0, retry_share=0.5)
    requests = [fleet.arrive()[0] for _ in range(20)]
    assert sum(fleet.machine.may_retry(request) for request in requests for _ in range(3)) == 20
    assert all(fleet.machine.may_retry(request, broken=True) for request in requests)
    requests[0].tries = 2
    assert not fleet.machine.may_retry(requests[0], broken=True)


def test_a_breaker_opens_after_failures_and_closes_after_successes():
    fleet = Fleet("", room=0, cb_failure_threshold=2, cb_success_threshold=2, cb_timeout_s=30.0)
    target = fleet.workers[0].targets[0]
    fleet.machine.failed(target, 0)
    assert targets(fleet.arrive()[1]) == ["w0"]
    fleet.machine.failed(target, 0)
    waiting, actions = fleet.arrive()
    assert (actions, target.breaker.state) == ([], "open")
    assert fleet.machine.tick(29 * NS_PER_S) == []
    assert [action.request for action in fleet.machine.tick(30 * NS_PER_S)] == [waiting]
    fleet.machine.succeeded(target)
    assert target.breaker.state == "open"
    fleet.machine.succeeded(target)
    assert target.breaker.state == "closed"


def test_a_failure_on_trial_opens_the_breaker_again():
    fleet = Fleet("", room=0, cb_failure_threshold=2, cb_timeout_s=30.0, queue_timeout_s=100.0)
    target = fleet.workers[0].targets[0]
    for _ in range(2):
        fleet.machine.failed(target, 0)
    assert targets(fleet.arrive(30.0)[1]) == ["w0"]
    fleet.machine.failed(target, 30 * NS_PER_S)
    assert fleet.arrive(59.0)[1] == []


def test_a_worker_becomes_unhealthy_and_healthy_by_probes_in_a_row():
    fleet = Fleet(health_failure_threshold=2, health_success_threshold=2)
    [worker], registry = fleet.workers, fleet.machine.workers
    states = []
    for success in (False, True, False, False, True, False, True, True):
        registry.probed(worker, success=success)
        states.append(worker.healthy)
    assert states == [True, True, True, False, False, False, False, True]


def test_a_worker_where_no_process_listens_gets_nothing_and_is_probed():
    fleet = Fleet("", "", room=0)
    request, _ = fleet.arrive()
    [probe] = fleet.machine.unreachable(request.target, 0, refused=True)
    assert isinstance(probe, Probe)
    assert probe.worker is fleet.workers[0]
    assert (fleet.workers[0].healthy, fleet.workers[0].restarts) == (False, 1)
    assert {name for _ in range(4) for name in targets(fleet.arrive()[1])} == {"w1"}


def test_a_draining_worker_gets_nothing():
    fleet = Fleet("", "", room=0)
    fleet.machine.workers.drain(fleet.workers[0])
    assert {name for _ in range(4) for name in targets(fleet.arrive()[1])} == {"w1"}
    fleet.machine.workers.drain(fleet.workers[0], draining=False)
    assert {name for _ in range(4) for name in targets(fleet.arrive()[1])} == {"w0", "w1"}


def test_an_interrupted_stream_goes_to_a_worker_that_can_continue_it_even_if_that_is_full():
    fleet = Fleet("", "")
    fleet.workers[1].continues = "tokens"
    one, _ = fleet.arrive()
    fleet.arrive()
    assert targets(fleet.machine.resume(one, "tokens", 0)) == ["w1"]
    assert fleet.workers[1].targets[0].state.requests == 2


def test_an_interrupted_stream_waits_for_a_worker_and_ends_after_the_queues_timeout():
    fleet = Fleet("", queue_timeout_s=10.0)
    request, _ = fleet.arrive()
    now, actions = 0, fleet.machine.resume(request, "tokens", 0)
    while not actions:
        now = fleet.machine.next_ns(now)
        actions = fleet.machine.tick(now)
    assert causes(actions) == ["worker_failed"]
    assert 10.0 <= now / NS_PER_S <= 12.0


def test_prefill_and_decode_targets_are_chosen_and_counted_together():
    fleet = Fleet(PREFILL, DECODE, room=2)
    request, [sent] = fleet.arrive(disagg=True, tokens=100)
    prefill, decode = (worker.targets[0].state for worker in fleet.workers)
    assert (sent.prefill.target.name, sent.choice.target.name) == ("w0", "w1")
    assert (prefill.prefill_tokens, decode.prefill_tokens) == (100.0, 0.0)
    fleet.machine.prefill_ended(request, NS_PER_S, computed=True)
    assert (prefill.requests, decode.requests) == (0, 1)
    fleet.machine.ended(request)
    assert (prefill.requests, decode.requests) == (0, 0)


def test_a_decode_worker_that_cannot_prefill_waits_for_a_prefill_worker():
    fleet = Fleet(DECODE)
    request, actions = fleet.arrive(disagg=True)
    assert actions == []
    fleet.workers[0].computes_alone = True
    assert [action.request for action in fleet.machine.tick(NS_PER_S)] == [request]


def test_a_policy_is_any_object_that_ranks_targets():
    class Last(RoutePolicy):
        name = "last"

        def rank(self, request, targets):
            order = list(reversed(range(len(targets))))
            return Ranking(order, [0.0] * len(targets), "balanced")

    fleet = Fleet("", "", "", policy=Last(None), room=0)
    assert targets(fleet.arrive()[1]) == ["w2"]
