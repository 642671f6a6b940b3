from collections import Counter

import pytest

from tests.policy.waiting_order import admissions, line, make_yard
from tokenyard.policy.service_levels import HIGH, LOW, NORMAL, STRICT, DeficitRoundRobin, service_level_of

ON = {"enable_service_levels": True, "service_level_quantum_tokens": 16}


@pytest.mark.parametrize(
    ("name", "level"),
    [("priority", STRICT), ("high", HIGH), ("default", NORMAL), (None, NORMAL), ("flex", LOW), ("nonsense", NORMAL)],
)
def test_service_classes_have_levels(name, level):
    assert service_level_of(name) == level


def test_fewest_rounds_first_and_the_current_turn_among_equals():
    shares = DeficitRoundRobin(weights=(8, 4, 1), quantum=10, strict_share=0.5)
    assert [shares.rounds(level, 80) for level in (HIGH, NORMAL, LOW)] == [1, 2, 8]
    shares.take(LOW, 8, [HIGH, LOW])
    shares.spend(LOW, 80, others_wait=True)
    assert shares.deficit == [640, 0, 0], "who does not wait earns nothing"
    assert [shares.distance(level) for level in (HIGH, NORMAL, LOW)] == [1, 2, 0]
    shares.take(NORMAL, 2, [NORMAL])
    assert shares.deficit == [0, 80, 0], "and keeps no credit"


def test_tokens_are_shared_8_to_4_to_1_while_all_levels_wait():
    yard = make_yard(**ON, disable_radix_cache=True)
    classes = {}
    for index in range(390):
        name = ("high", "normal", "low")[index % 3]
        classes[yard.submit([3 + index % 90] * 16, max_new=1, service_class=name)] = name
    yard.run()
    early = Counter(classes[number] for number in admissions(yard)[:130])
    assert [round(early[name] / 10) for name in ("high", "normal", "low")] == [8, 4, 1]


def test_long_requests_take_their_share_of_tokens_not_of_turns():
    yard = make_yard(**ON, service_level_weights=(1, 1, 1), context=1024, disable_radix_cache=True)
    sizes = {}
    for index in range(200):
        for name, size in (("high", 128), ("low", 16)):
            sizes[yard.submit([3 + index % 90] * size, max_new=1, service_class=name)] = (name, size)
    yard.run()
    tokens = Counter()
    for number in admissions(yard)[:90]:
        tokens[sizes[number][0]] += sizes[number][1]
    assert abs(tokens["high"] - tokens["low"]) <= 128 + 16


def test_the_strict_level_goes_first_but_takes_no_more_than_its_share():
    yard = make_yard(**ON, strict_level_share=0.5, disable_radix_cache=True)
    names = {}
    for index in range(100):
        for name in ("normal", "priority"):
            names[yard.submit([3 + index % 90] * 16, max_new=1, service_class=name)] = name
    assert names[line(yard)[0]] == "priority"
    yard.run()
    order = [names[number] for number in admissions(yard)]
    for end in range(10, 150, 10):
        strict = order[:end].count("priority")
        assert end / 2 - 1 <= strict <= end / 2 + 2


def test_the_strict_level_alone_is_not_held_back():
    yard = make_yard(**ON)
    for index in range(20):
        yard.submit([3 + index] * 16, max_new=1, service_class="priority")
    yard.run()
    last, strict = yard.submit([5], service_class="low"), yard.submit([6], service_class="priority")
    assert line(yard) == [strict, last]


def test_each_level_keeps_the_order_of_the_policy_inside():
    yard = make_yard(**ON, schedule_policy="lof", enable_priority_scheduling=True, priority_aging_s=0.0)
    numbers = [yard.submit([5], max_new=n, priority=p, service_class="low") for n, p in ((2, 0), (4, 0), (1, 1))]
    assert line(yard) == [numbers[2], numbers[1], numbers[0]]
    assert yard.scheduler.snapshot(1).policy == "levels+priority+lof"
