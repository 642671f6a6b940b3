from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tokenyard.routing.queue import QUANTUM_TOKENS, WaitingQueue


def drain(queue, now=0.0):
    items = []
    while (entry := queue.pop(now, lambda item: True)) is not None:
        items.append(entry.item)
    return items


def test_priorities_come_first_then_arrival():
    queue = WaitingQueue()
    for item, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        queue.push(item, 0.0, priority=priority)
    assert drain(queue) == ["b", "d", "a", "c"]
    assert not queue


def test_waiting_lifts_a_request_so_that_it_is_overtaken_for_a_bounded_time_only():
    queue = WaitingQueue(aging_s=10.0)
    queue.push("old", 0.0, priority=0)
    queue.push("late", 20.5, priority=2)
    assert drain(queue, 20.5)[0] == "late"
    queue.push("old", 0.0, priority=0)
    queue.push("late", 30.0, priority=2)
    assert drain(queue, 30.0)[0] == "old"


def test_no_stream_of_urgent_requests_starves_a_plain_one():
    queue = WaitingQueue(aging_s=1.0)
    queue.push("plain", 0.0, priority=0)
    served = []
    for now in range(30):
        queue.push(f"urgent {now}", float(now), priority=5)
        served.append(queue.pop(float(now), lambda item: True).item)
        if served[-1] == "plain":
            break
    assert served[-1] == "plain"
    assert len(served) <= 8


def test_tenants_share_by_tokens_not_by_requests():
    queue = WaitingQueue()
    for i in range(200):
        queue.push(("small", i), 0.0, tokens=500, tenant="small")
        queue.push(("large", i), 0.0, tokens=2000, tenant="large")
    tokens = Counter()
    for _ in range(120):
        (name, _), size = (entry := queue.pop(0.0, lambda item: True)).item, entry.tokens
        tokens[name] += size
    assert abs(tokens["small"] - tokens["large"]) <= 2 * QUANTUM_TOKENS


def test_weights_are_shares():
    queue = WaitingQueue(weights={"gold": 3.0})
    for i in range(300):
        queue.push(("gold", i), 0.0, tokens=1000, tenant="gold")
        queue.push(("plain", i), 0.0, tokens=1000, tenant="plain")
    served = Counter(queue.pop(0.0, lambda item: True).item[0] for _ in range(200))
    assert 2.5 < served["gold"] / served["plain"] < 3.5


def test_a_flooding_tenant_does_not_hold_up_another():
    queue = WaitingQueue()
    for i in range(1000):
        queue.push(("flood", i), 0.0, tokens=1000, tenant="flood")
    queue.push(("other", 0), 1.0, tokens=1000, tenant="other")
    assert ("other", 0) in [queue.pop(1.0, lambda item: True).item for _ in range(5)]


def test_deadlines_order_one_tenants_requests():
    queue = WaitingQueue(aging_s=10.0)
    queue.push("none", 0.0)
    queue.push("late", 0.0, deadline_s=9.0)
    queue.push("soon", 0.0, deadline_s=3.0)
    assert drain(queue, 1.0) == ["soon", "late", "none"]


def test_a_request_that_does_not_fit_lets_others_pass_but_not_its_own_successors():
    queue = WaitingQueue()
    for name in ("a1", "a2"):
        queue.push(name, 0.0, tenant="a")
    queue.push("b1", 0.0, tenant="b")
    assert queue.pop(0.0, lambda item: item != "a1").item == "b1"
    assert queue.pop(0.0, lambda item: item != "a1") is None
    assert drain(queue) == ["a1", "a2"]


def test_a_request_that_leaves_is_reported_once():
    queue = WaitingQueue()
    entry = queue.push("a", 0.0, expires_s=2.0)
    queue.push("b", 0.0, expires_s=5.0)
    assert queue.expired(1.0) == []
    assert [late.item for late in queue.expired(2.0)] == ["a"]
    queue.remove(entry)
    assert len(queue) == 1
    assert drain(queue) == ["b"]


def test_the_least_urgent_newest_is_displaced():
    queue = WaitingQueue()
    for item, priority in (("a", 0), ("b", 0), ("c", 3)):
        queue.push(item, 0.0, priority=priority)
    assert queue.lowest(0.0).item == "b"
    assert WaitingQueue().lowest(0.0) is None


ENTRIES = st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(1, 9000)), max_size=40)


@given(ENTRIES, st.sampled_from([0.0, 0.01, 1.0, 5.0]))
def test_every_request_leaves_exactly_once(entries, aging):
    queue = WaitingQueue(aging_s=aging)
    for i, (priority, tenant, tokens) in enumerate(entries):
        queue.push(i, 0.1 * i, priority=priority, tenant=tenant, tokens=tokens)
    assert sorted(drain(queue, 5.0)) == list(range(len(entries)))
    assert len(queue) == 0
