"""Runs a tape through a new scheduler and compares each plan with its digest on the tape."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from tokenyard.base import ConfigError, Event, SetPolicy, StepPlan, StepResult, TokenBatch
from tokenyard.scheduler.scheduler import Scheduler
from tokenyard.tape.anonymizer import Anonymizer
from tokenyard.tape.codec import NO_PLAN, Committed, Idled, Planned, Raised, Record, Tape, plan_summary

USER_POLICY_MARK = ":"


class ReplayObserver(Protocol):
    """Called with each step of a replay."""

    def applied(self, event: Event, now: int) -> None:
        """The scheduler has applied an event."""

    def committed(self, plan: StepPlan, result: StepResult, now: int) -> None:
        """The scheduler has committed the result of a plan."""

    def on_output(self, batch: TokenBatch) -> None:
        """The output of the scheduler after one call."""


@dataclass(slots=True)
class Difference:
    """The first call whose outcome differs from the tape.

    record: the number of the record.
    after_ns: time since the first record.
    tape, here: the outcome on the tape and in this replay, in words.
    """

    record: int
    after_ns: int
    tape: str
    here: str


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay.

    records: records that were replayed.
    plans: plans that were compared. Calls of `plan` with nothing to do are compared too but not counted.
    equal: plans that were equal to those on the tape, byte for byte.
    span_ns: time from the first record to the last.
    difference: the first difference, None if there is none.
    last_error: the error of the tape's last call, if it raised one.
    """

    records: int = 0
    plans: int = 0
    equal: int = 0
    span_ns: int = 0
    difference: Difference | None = None
    last_error: str = ""


def replay(tape: Tape, observer: ReplayObserver | None = None, *, own_policies: bool = False) -> ReplayReport:
    """Replay `tape` to its end or to the first difference, after which later plans cannot be compared.

    A user-defined policy is code, so a tape that names one is refused without `own_policies`. Raises ConfigError for
    that, for a record that does not decode, and for settings that this version does not take.
    """
    return Replay(tape, observer, own_policies).run()


class Replay:
    """The state of one replay. A call that raises must be followed by a `Raised` record on the tape."""

    def __init__(self, tape: Tape, observer: ReplayObserver | None, own_policies: bool) -> None:
        self._tape, self._observer, self._user_policies = tape, observer, own_policies
        origin = tape.header.origin
        self._check_policy(origin.settings.schedule_policy)
        self.scheduler: Scheduler = origin.scheduler()
        self.report = ReplayReport()
        self._plain = Anonymizer(origin.info.vocab_size, None)
        self._in_flight: deque[StepPlan] = deque()
        self._error: Exception | None = None

    def run(self) -> ReplayReport:
        """Replay and return the report."""
        report, begin_ns = self.report, None
        for record in self._tape.records():
            begin_ns = record.now if begin_ns is None else begin_ns
            report.span_ns = record.now - begin_ns
            found = self._compare(record)
            report.records += 1
            if found is not None:
                report.difference = Difference(report.records, report.span_ns, *found)
                return report
        if self._error is not None:
            report.last_error = _in_words(self._error)
        return report

    def _compare(self, record: Record) -> tuple[str, str] | None:
        """Make the call of a record. Returns the tape's outcome and this one's in words if they differ."""
        error, self._error = self._error, None
        if isinstance(record.body, Raised):
            return None if error is not None else (f"the previous call raised {record.body.error}", "it did not raise")
        if error is not None:
            return "the previous call succeeded", _in_words(error)
        if isinstance(record.body, SetPolicy):
            self._check_policy(record.body.name)
        if isinstance(record.body, Planned):
            return self._plan(record.body, record.now)
        try:
            self._call(record.body, record.now)
        except Exception as error:
            self._error = error
        if self._observer is not None:
            self._observer.on_output(self.scheduler.drain())
        return None

    def _call(self, body: Event | Committed | Idled, now: int) -> None:
        if isinstance(body, Idled):
            self.scheduler.idle()
        elif isinstance(body, Committed):
            result = body.result()
            self.scheduler.commit(result, now)
            plan = self._in_flight.popleft()
            if self._observer is not None:
                self._observer.committed(plan, result, now)
        else:
            self.scheduler.apply(body, now)
            if self._observer is not None:
                self._observer.applied(body, now)

    def _plan(self, tape: Planned, now: int) -> tuple[str, str] | None:
        try:
            plan = self.scheduler.plan(now)
        except Exception as error:
            self._error = error
            return None if not tape.digest else (_plan_in_words(tape), _in_words(error))
        if self._observer is not None:
            self._observer.on_output(self.scheduler.drain())
        if not tape.digest:
            return None
        here = plan_summary(plan, self._plain)
        if plan is not None:
            self._in_flight.append(plan)
            self.report.plans += 1
            self.report.equal += here == tape
        return None if here == tape else (_plan_in_words(tape), _plan_in_words(here))

    def _check_policy(self, name: str) -> None:
        if USER_POLICY_MARK in name and not self._user_policies:
            raise ConfigError(
                f"{self._tape.name} names the user-defined policy {name}; --user-policies allows loading its code"
            )


def _in_words(error: Exception) -> str:
    return f"it raised {type(error).__name__}: {error}"


def _plan_in_words(plan: Planned) -> str:
    if plan.digest == NO_PLAN:
        return "nothing to do"
    return f"step {plan.step}: {plan.rows} rows, {plan.decode_rows} of them decode, {plan.tokens} tokens"
