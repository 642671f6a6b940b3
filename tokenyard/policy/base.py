"""The policy object: which request is next, how much a step does, which request is preempted.

A policy orders; it never allocates (docs/architecture.md). Most policies override `order` alone and keep the default
budget, headroom and victims.
"""

import math
from collections.abc import Callable, Iterator
from typing import ClassVar

from tokenyard.base import ConfigError, Int32Array, SchedulerSettings
from tokenyard.policy.headroom import Headroom, create_headroom
from tokenyard.policy.retraction import VictimRule, create_victim_rule
from tokenyard.policy.speculation import TpotSlack
from tokenyard.policy.step_budget import BudgetRule, StepBudget
from tokenyard.policy.time_budget import create_budget_rule
from tokenyard.policy.urgency import Urgency
from tokenyard.policy.views import Columns, SessionState, Views

Option = float | int | str | bool


class Policy:
    """First come, first served, and the base of every other policy.

    `begin_step` is called before any other method for a step; later calls may pass a part of its rows. Subclasses set:

    name: the name for --schedule-policy.
    needs_tree: it needs the prefix tree; without one the scheduler falls back to fcfs.
    uses_hits: it reads hit lengths if there is a prefix tree.
    needs_cost: it needs a cost model.
    needs_sessions: it reads `Views.sessions` if there is a prefix tree.
    ranks_priorities: it orders by priority itself. Otherwise --enable-priority-scheduling wraps it in
        `priority.Priority`.
    charges_decode: `charge_decode` is called.
    options: names and defaults of its --policy-options.
    ranges: the least and the most value of options that have bounds.
    retry_ns: for how long candidates are not drawn again after a step in which none could start, unless a request
        joins or ends; 0 draws them in every step.
    overtaking: its bound on how much may overtake a waiting request, as text.
    """

    name = "fcfs"
    needs_tree = False
    uses_hits = False
    needs_cost = False
    needs_sessions = False
    ranks_priorities = False
    charges_decode = False
    retry_ns = 0
    options: ClassVar[dict[str, Option]] = {}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}
    overtaking = "none: requests start in the order of their arrival"

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.chosen = chosen_options(type(self), settings)
        self.budget_rule: BudgetRule = create_budget_rule(settings)
        self.headroom: Headroom = create_headroom(settings)
        self.urgency = Urgency(settings)
        self.victim_rule: VictimRule = create_victim_rule(settings, self.urgency)
        self.views: Views | None = None

    @property
    def uses_cost(self) -> bool:
        """Whether the policy, or its budget of a step, asks how long steps take."""
        return bool(self.needs_cost or self.budget_rule.needs_cost)

    def describe(self) -> str:
        """The name to show, with the wrappers around it and, after a failure, its reason."""
        return self.name

    def given_up(self) -> str:
        """Why a user-defined policy was replaced by fcfs, with file and line if they are known; "" if it was not."""
        return ""

    def time_answers(self, asked: Callable[[], None], answered: Callable[[], None]) -> None:
        """Have `asked` called before each call of a user-defined policy, and `answered` after it."""

    def begin_step(self, views: Views) -> None:
        """Called with the state before a step is planned."""
        self.views = views

    def candidates(self, views: Views) -> Iterator[int]:
        """Rows for the step's prefill, started and waiting ones, best first; here all started ones before newcomers."""
        yield from self.prefilling_order(views)
        yield from self.order(views)

    def prefilling_order(self, views: Views) -> Iterator[int]:
        """Started prefills, best first. When a newcomer finds no room, those not drawn yet still continue."""
        return iter(views.prefilling.tolist())

    def overdue(self) -> list[int]:
        """Waiting or started rows to refuse now because they cannot be served in time."""
        return []

    def order(self, views: Views) -> Iterator[int]:
        """Waiting rows, best first. Rows that are not drawn stay unsorted, so yield lazily where that saves work."""
        waiting = views.waiting
        for start in range(0, len(waiting), 64):
            yield from waiting[start : start + 64].tolist()

    def budget(self) -> StepBudget:
        """The allowance of the step that `begin_step` announced."""
        assert self.views is not None
        return self.budget_rule.begin(self.views)

    def passable(self, row: int, now: int) -> bool:
        """Whether later candidates may start although the waiting candidate `row` does not fit into the free memory.

        A policy that says so states until when: a request that is always passed over starves.
        """
        return False

    def spared_tokens(self, row: int) -> int:
        """Tokens of free and evictable memory that the waiting `row` has to leave when it starts."""
        return 0

    def retains(self, session: SessionState, now: int) -> bool:
        """Whether `--radix-eviction-policy reuse` evicts the KV of this session after that of others, at `now` (ns).

        Asked only if `needs_sessions`. Nothing is pinned: a request that is admitted evicts what it needs.
        """
        return False

    def victims(self, views: Views) -> Iterator[int]:
        """Running rows in the order in which they are retracted when pages run out."""
        return self.victim_rule.victims(views)

    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        """Running rows that rank strictly below the waiting row `preemptor` and may be preempted, worst first."""
        return iter(())

    def pace(self, columns: Columns, rows: Int32Array, now: int) -> TpotSlack | None:
        """How running `rows` stand against their target time per token, for the choice of drafts; None where targets do
        not count.
        """
        return None

    def admitted(self, row: int) -> None:
        """`row` is admitted, for the first time or again.

        Its tokens from `planned` to `target` are computed from the next chunk on, after those that can be loaded.
        """

    def charge(self, row: int, prefill_tokens: int) -> None:
        """A chunk of `prefill_tokens` was planned for `row`."""

    def charge_decode(self, rows: Int32Array) -> None:
        """Each of `rows` (int32[n], no row twice) decodes one token; called only if `charges_decode`.

        It is called when the step is planned, and again for each further token when drafts were accepted.
        """

    def served_elsewhere(self, tenant: int, name: str, service: float) -> None:
        """Another data-parallel rank has served the tenant with this number, before its weight."""

    def drain_service(self) -> dict[int, float]:
        """Service by tenant since the last call, before weights; for other ranks, and only where there are some."""
        return {}

    def measures(self, rows: Int32Array) -> dict[str, float]:
        """Figures to publish as metrics, by metric name; `rows` wait or are being prefilled."""
        return {}

    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """The `waiting` row that is refused to make room for the row `newcomer` in a full queue; None refuses
        `newcomer`.
        """
        return None

    def finished(self, row: int) -> None:
        """The answer of the request in `row` is complete; `removed` follows."""

    def removed(self, row: int) -> None:
        """The request in `row` has ended; drop its state."""


def chosen_options(policy: type[Policy], settings: SchedulerSettings) -> dict[str, Option]:
    """The policy's options with `settings.policy_options` over the defaults. Raises ConfigError for an unknown option,
    and for a value of another type or out of range.
    """
    chosen = dict(policy.options)
    for name, value in settings.policy_options.items():
        if name not in chosen:
            known = f"it has {', '.join(sorted(chosen))}" if chosen else "it has none"
            raise ConfigError(f"schedule policy {policy.name!r} has no option {name!r}; {known}")
        wanted = type(chosen[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"option {name!r} of {policy.name!r} is {value!r}; it must be a {wanted.__name__}")
        least, most = policy.ranges.get(name, (-math.inf, math.inf))
        if not isinstance(value, str) and not least <= value <= most:
            raise ConfigError(f"option {name!r} of {policy.name!r} is {value}; it must be from {least:g} to {most:g}")
        chosen[name] = wanted(value)
    return chosen
