import pytest

from tests.policy.waiting_order import line, make_yard
from tokenyard.policy.programs import MAX_PROGRAMS


def yard_of(policy, **settings):
    return make_yard(rows=1, schedule_policy=policy, max_queued_requests=-1, headroom="none", **settings)


def serve(yard, session, tokens=4, max_new=2, tenant=""):
    number = yard.submit([5] * tokens, max_new=max_new, session=session, tenant=tenant)
    yard.run()
    return number


def busy(yard):
    yard.submit([9] * 3, max_new=500)
    yard.launch()
    yard.commit()


@pytest.mark.parametrize("policy", ["program-fcfs", "plas"])
def test_requests_without_a_session_go_by_arrival(policy):
    yard = yard_of(policy)
    busy(yard)
    numbers = [yard.submit([5 + index] * (9 - index)) for index in range(4)]
    assert line(yard) == numbers


def test_turns_go_by_the_arrival_of_their_session():
    yard = yard_of("program-fcfs")
    serve(yard, "old")
    serve(yard, "new")
    busy(yard)
    alone = yard.submit([6] * 4)
    new, other = yard.submit([6] * 4, session="new"), yard.submit([6] * 4, session="old", tenant="other")
    old = yard.submit([6] * 4, session="old")
    assert line(yard) == [old, new, alone, other]


@pytest.mark.parametrize("answer", [False, True])
def test_the_session_with_the_least_service_goes_first(answer):
    """Service is tokens of prompts that were computed, and of answers."""
    yard = yard_of("plas", disable_radix_cache=True)
    serve(yard, "much", 4 if answer else 60, 60 if answer else 2)
    serve(yard, "little", 8)
    busy(yard)
    much, little = yard.submit([6] * 4, session="much"), yard.submit([6] * 4, session="little")
    alone = yard.submit([6] * 4)
    assert line(yard) == [alone, little, much]


def test_what_was_cached_is_no_service():
    yard = yard_of("plas")
    for _ in range(6):
        serve(yard, "hits", 40, 1)
    serve(yard, "computes", 100, 1)
    busy(yard)
    computes, hits = yard.submit([6] * 4, session="computes"), yard.submit([6] * 4, session="hits")
    assert line(yard) == [hits, computes]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["program-fcfs", "plas"])
def test_sessions_that_are_remembered_are_bounded(policy):
    """The first session is forgotten after as many others, and starts over."""
    yard = yard_of(policy)
    serve(yard, "first", 8)
    for index in range(MAX_PROGRAMS):
        yard.submit([5], max_new=1, session=f"s{index}")
        if index % 512 == 511:
            yard.run()
    busy(yard)
    last, first = yard.submit([6] * 4, session=f"s{MAX_PROGRAMS - 1}"), yard.submit([6] * 4, session="first")
    assert line(yard) == ([last, first] if policy == "program-fcfs" else [first, last])
