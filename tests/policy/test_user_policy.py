import inspect
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.policy.waiting_order import line, make_yard, put_into_tree
from tokenyard.base import ConfigError, SchedulerSettings, TenantSettings
from tokenyard.policy import POLICIES, Policy, SessionState, create_policy
from tokenyard.policy.speculation import TpotSlack
from tokenyard.policy.user_policy import GuardedPolicy

DOCS = Path(__file__).resolve().parents[2] / "docs"
S = 10**9


@pytest.fixture
def module():
    made = types.ModuleType("my_policies")
    sys.modules["my_policies"] = made
    yield made
    del sys.modules["my_policies"]


def add(module, cls):
    setattr(module, cls.__name__, cls)
    return f"my_policies:{cls.__name__}"


def test_the_policy_of_the_guide_does_what_the_guide_says(module):
    code = re.findall(r"```python\n(.*?)```", (DOCS / "your_own_policy.md").read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 30
    exec(code, vars(module))
    yard = make_yard(schedule_policy="my_policies:WarmFirst", policy_options={"patience_s": 5})
    assert yard.scheduler.state.policy.name == "my_policies:WarmFirst"
    put_into_tree(yard, [7] * 60)
    now = 100 * S
    tired = yard.submit([5] * 9, arrival_ns=now - 6 * S)
    cold = yard.submit([6] * 9, arrival_ns=now - 4 * S)
    warm = yard.submit([7] * 60 + [8], arrival_ns=now)
    assert line(yard, now) == [tired, warm, cold]
    with pytest.raises(ConfigError, match="it has patience_s"):
        create_policy("my_policies:WarmFirst", SchedulerSettings(policy_options={"patience": 5}))


def test_it_composes_with_priorities_and_a_bound(module):
    class Backwards(Policy):
        def order(self, views):
            return iter(views.waiting[::-1].tolist())

    path = add(module, Backwards)
    yard = make_yard(schedule_policy=path, enable_priority_scheduling=True, priority_aging_s=0.0)
    numbers = [yard.submit([5], priority=priority) for priority in (0, 1, 0, 1)]
    assert line(yard) == [numbers[i] for i in (3, 1, 2, 0)]
    yard = make_yard(schedule_policy=path, max_overtaken_tokens=0)
    numbers = [yard.submit([5]) for _ in range(3)]
    assert line(yard) == numbers


def test_it_retains_sessions_of_which_it_sees_copies(module):
    seen = []

    class KeepsS(Policy):
        needs_sessions = True

        def retains(self, session, now):
            seen.append(session)
            assert type(session) is SessionState
            if session.name == "wrong":
                raise KeyError("wrong")
            return session.name == "s"

    yard = make_yard(pages=100, schedule_policy=add(module, KeepsS), radix_eviction_policy="reuse", headroom="none")
    for token, session in ((7, "s"), (8, "t")):
        yard.submit([token] * 40, max_new=1, session=session)
        yard.run()
    yard.submit([9] * 40, max_new=1)
    yard.run()
    peek = yard.scheduler.state.memory.peek
    assert [peek(np.full(40, token, np.int32).tobytes(), "") for token in (7, 8)] == [40, 20]
    assert seen
    yard.submit([6] * 30, max_new=1, session="wrong")
    yard.submit([5] * 90, max_new=1)
    yard.run()
    assert "KeyError" in yard.scheduler.state.policy.given_up()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_policies:", "module:name"),
        ("no_such_package:P", "importing no_such_package failed"),
        ("my_policies:Missing", "has no Missing"),
        ("my_policies:number", "not a subclass of tokenyard.policy.Policy"),
        ("my_policies:Other", "not a subclass of tokenyard.policy.Policy"),
        ("my_policies:Broken", "making it failed: .*not today"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_at_the_start(module, path, message):
    class Broken(Policy):
        def __init__(self, settings):
            raise RuntimeError("not today")

    module.number, module.Other, module.Broken = 7, dict, Broken
    with pytest.raises(ConfigError, match=message):
        create_policy(path, SchedulerSettings())


def broken(method, answer):
    def replacement(self, *args):
        if isinstance(answer, BaseException):
            raise answer
        return answer(self) if callable(answer) else answer

    return type("Broken", (Policy,), {method: replacement, "charges_decode": True})


MISTAKES = {
    "order raises": ("order", ValueError("oops")),
    "order is no iterator": ("order", 7),
    "order names strangers": ("order", lambda self: iter([10**6])),
    "order names nonsense": ("order", lambda self: iter(["first"])),
    "order names a list": ("order", lambda self: iter([[1]])),
    "order names all at once": ("order", lambda self: iter([self.views.waiting])),
    "order writes to a column": ("order", lambda self: self.views.columns.target.fill(1)),
    "order sorts what it was shown": ("order", lambda self: self.views.waiting.sort()),
    "order leaves": ("order", lambda self: sys.exit()),
    "order interrupts": ("order", KeyboardInterrupt()),
    "order ends a generator": ("order", GeneratorExit()),
    "order raises what is no Exception": ("order", BaseException("oops")),
    "order raises when it is closed": ("order", lambda self: ends_badly(self.views.waiting.tolist())),
    "order teaches the cost model": ("order", lambda self: self.views.cost.learn(None, 1.0)),
    "order ends a request": ("order", lambda self: self.views.columns.remove(0)),
    "order names a row twice": ("order", lambda self: iter(self.views.waiting.tolist() * 2)),
    "begin_step raises": ("begin_step", ValueError("oops")),
    "budget raises": ("budget", ValueError("oops")),
    "budget is a number": ("budget", 5),
    "budget is nothing": ("budget", None),
    "chunk raises": ("budget", lambda self: Allowance(None)),
    "chunk is no whole number": ("budget", lambda self: Allowance(2.5)),
    "chunk is below 0": ("budget", lambda self: Allowance(-1)),
    "chunk is beyond the prompt": ("budget", lambda self: Allowance(10**6)),
    "begin_step takes rows away": ("begin_step", lambda self: self.views.running.fill(0)),
    "victims raise": ("victims", ValueError("oops")),
    "victims are strangers": ("victims", lambda self: iter([10**6])),
    "outranked raises": ("outranked", ValueError("oops")),
    "outranked names strangers": ("outranked", lambda self: iter([10**6])),
    "charge raises": ("charge", ValueError("oops")),
    "charge_decode raises": ("charge_decode", ValueError("oops")),
    "finished raises": ("finished", ValueError("oops")),
    "removed raises": ("removed", ValueError("oops")),
    "overdue names strangers": ("overdue", lambda self: [10**6]),
    "displaced raises": ("displaced", ValueError("oops")),
    "displaced is a list": ("displaced", lambda self: [0]),
    "displaced is no whole number": ("displaced", 0.5),
    "measures are no numbers": ("measures", lambda self: {"a": "b"}),
    "measures are a list": ("measures", lambda self: [1]),
}


def ends_badly(rows):
    """Yields rows, and raises when it is closed before its end."""
    try:
        yield from rows
        yield -1
    finally:
        raise ValueError("oops")


class Allowance:
    """A budget of which every chunk has the size that it was made with; None raises."""

    prefill = with_decode = True
    max_requests = max_prefilling = 1

    def __init__(self, size):
        self.size = size

    def chunk(self, prefix, remaining):
        if self.size is None:
            raise ValueError("oops")
        return self.size

    def spend(self, prefix, tokens):
        pass


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_puts_fcfs_in_its_place_and_fails_no_request(module, mistake):
    path = add(module, broken(*MISTAKES[mistake]))
    # Levels decide who preempts, so the question does not reach a policy inside.
    levels = not mistake.startswith("outranked")
    yard = make_yard(
        pages=40,
        rows=4,
        schedule_policy=path,
        prefill_max_requests=-1,
        max_queued_requests=6,
        enable_service_levels=levels,
    )
    numbers = [yard.submit([5 + i] * 8, max_new=8) for i in range(8)]
    yard.run()
    yard.scheduler.snapshot(1)
    assert sorted(yard.finished) == numbers
    assert all(yard.finished[number].completion_tokens == 8 for number in numbers[:6])
    assert [yard.finished[number].cause for number in numbers[6:]] == ["queue_full"] * 2
    assert yard.scheduler.idle() is None
    assert yard.scheduler.snapshot(1).policy.removeprefix("levels+").startswith(f"fcfs ({path} failed: ")


def frozen_budget(**fields):
    """A budget that allows nothing."""
    made = Allowance(0)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize(
    "mistake",
    [
        ("order", lambda self: iter(())),
        ("budget", lambda self: frozen_budget()),
        ("budget", lambda self: frozen_budget(prefill=False, with_decode=False)),
        ("budget", lambda self: frozen_budget(max_requests=0, max_prefilling=0)),
    ],
)
@pytest.mark.parametrize("around", [{}, {"enable_priority_scheduling": True, "enable_service_levels": True}])
def test_a_policy_that_starts_no_request_does_not_hang_the_engine(module, mistake, around):
    yard = make_yard(schedule_policy=add(module, broken(*mistake)), chunked_prefill_size=4, **around)
    numbers = [yard.submit([5 + i] * 9) for i in range(3)]
    yard.run()
    assert sorted(yard.finished) == numbers


class Spoiler(Policy):
    name = "spoiler"

    def __init__(self, settings):
        super().__init__(settings)
        self.headroom = self.budget_rule = self.victim_rule = self.urgency = None
        settings.policy_options["seed"] = 5
        settings.tenants.clear()

    def budget(self):
        return None

    def order(self, views):
        for row in views.waiting.tolist():
            request = views.columns.request(row)
            request.sampling.max_new_tokens = 1
            request.sampling.stop_token_ids.append(6)
            request.priority = 99
        return super().order(views)


@pytest.mark.parametrize(
    "answer",
    [
        *(ValueError("oops"), 7),
        TpotSlack(np.zeros(1), np.ones(1)),
        TpotSlack(np.array([0.0, np.nan]), np.ones(2)),
        TpotSlack(np.zeros(2), np.zeros(2)),
    ],
    ids=["raises", "no pace", "too short", "no number", "a target of 0"],
)
def test_a_wrong_budget_puts_fcfs_in_its_place(module, answer):
    module.Broken = broken("pace", answer)
    policy = create_policy("my_policies:Broken", SchedulerSettings())
    assert policy.pace(make_yard().scheduler.state.table, np.array([3, 1], np.int32), 1) is None
    assert "failed" in policy.given_up()


@pytest.mark.parametrize("options", [{}, {"enable_priority_scheduling": True}], ids=["alone", "within priorities"])
def test_every_question_to_a_policy_can_be_timed(module, options):
    calls = []

    class Asked(Policy):
        def order(self, views):
            calls.append("order")
            yield from super().order(views)
            raise ValueError("oops")

    yard = make_yard(schedule_policy=add(module, Asked), **options)
    yard.scheduler.time_policy(lambda: calls.append("asked"), lambda: calls.append("answered"))
    numbers = [yard.submit([5 + i] * 9, max_new=4) for i in range(3)]
    yard.run()
    assert set(yard.finished) == set(numbers)
    assert calls.count("asked") == calls.count("answered")
    place = calls.index("order")
    assert (calls[place - 1], calls[place + 1]) == ("asked", "answered")


def test_what_a_policy_writes_to_stays_private(module):
    tenants = {"a": TenantSettings(weight=2.0)}
    yard = make_yard(schedule_policy=add(module, Spoiler), tenants=tenants, prefill_max_requests=-1)
    numbers = [yard.submit([5 + i] * 9, max_new=8, tenant="a") for i in range(3)]
    yard.run()
    assert [yard.finished[number].completion_tokens for number in numbers] == [8] * 3
    assert yard.scheduler.state.settings.tenants == tenants
    assert not yard.scheduler.state.settings.policy_options


class Circles(Policy):
    name = "circles"

    def order(self, views):
        return iter(views.waiting.tolist()[::-1])

    def outranked(self, views, preemptor):
        return iter(views.running.tolist())


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_a_policy_lets_preempt_each_other_still_end(module, depth):
    yard = make_yard(schedule_policy=add(module, Circles), rows=1, max_in_flight=depth, prefill_max_requests=-1)
    numbers = [yard.submit([5 + i] * 9, max_new=8) for i in range(3)]
    yard.run(depth)
    assert sorted(yard.finished) == numbers
    assert yard.scheduler.snapshot(1).counters.preempted <= len(numbers) * 9, "each costs at least one new token"


def test_names_of_policies_are_unique_and_documented():
    text = (DOCS / "policies.md").read_text()
    for name in POLICIES:
        assert f"| `{name}` |" in text


def test_the_guard_asks_about_every_method_itself():
    """What it left to `Wrapper` would reach a user-defined policy without a guard."""
    methods = {name for name, method in vars(Policy).items() if inspect.isfunction(method)}
    assert methods - set(vars(GuardedPolicy)) == set()
