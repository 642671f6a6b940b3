"""Runs a program on the core like the engine's event loop, and says what is wrong with the run.

Bounds, with T the tokens of all answers (prompt and max_new_tokens of each), P the tokens of the pool, N the number of
answers and E the number of events that are no arrivals:

- Between two tokens that are computed for the first time, at most (N + 2) * P tokens are computed again.
- All in all at most `RECOMPUTED` * (T + E * P) tokens are computed again.
- Between two times that an answer loses its place, a token is computed for the first time, another answer starts for
  the first time or an event comes.
- No row is planned beyond its limit, or verifies more drafts than the executor has for it.
- A step computes a token or more, so a run ends within (1 + `RECOMPUTED`) * (T + E * P) steps.
"""

import random
import traceback
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.scheduler.harness import check_books, check_hits, check_holders
from tests.scheduler.random_programs import ANSWER, EOS, Job, Program
from tokenyard.base import (
    ConfigError,
    Event,
    KvLoaded,
    Load,
    OpenGate,
    PagesReleased,
    Resume,
    SetPolicy,
    StepPlan,
    StepResult,
    StopFound,
)
from tokenyard.scheduler import Scheduler
from tokenyard.scheduler.row_state import Gate

RECOMPUTED = 8
MAX_TRANSFER = 6
"""Turns of the event loop within which KV has come or gone."""

MAX_EMPTY_TURNS = 2000
HOUR_NS = 3600 * 10**9


@dataclass(slots=True)
class Outcome:
    """What a run did. `failure` is "" or begins with one word for the kind of it."""

    failure: str = ""
    events: int = 0
    steps: int = 0
    tokens: int = 0
    recomputed: int = 0
    allowed: int = 0
    preempted: int = 0
    retracted: int = 0

    @property
    def recomputed_share(self) -> float:
        """Tokens computed again, of all that the bound speaks of."""
        return self.recomputed * RECOMPUTED / max(self.allowed, 1)

    @property
    def kind(self) -> str:
        """The first word of the failure."""
        return self.failure.split(" ", 1)[0]


class BrokenRun(Exception):
    """The run breaks one of the bounds."""


@dataclass(slots=True)
class Progress:
    """Distinguishes tokens that are computed for the first time from those computed again, or computed and discarded.

    furthest: int64[numbers], first position of each answer that was never computed. advances: how many plans computed
    something new, how many answers have started, and how many events came. lost_place_at: for each answer, `advances`
    when it last lost its place.
    """

    furthest: np.ndarray
    stall_limit: int
    recomputed: int = 0
    since_first_time: int = 0
    advances: int = 0
    lost_place_at: dict[int, int] = field(default_factory=dict)

    def lost_place(self, number: int) -> None:
        """An answer is preempted or retracted; raises BrokenRun if the run has not advanced since the last time."""
        if self.lost_place_at.get(number) == self.advances:
            raise BrokenRun(f"thrash: request {number} loses its place twice and nothing new is computed between")
        self.lost_place_at[number] = self.advances

    def committed(self, numbers: np.ndarray, plan: StepPlan, accepted: np.ndarray, taken: np.ndarray) -> None:
        """A step has ended, of which the scheduler takes the results of the rows `taken` (bool[n]) and drops others.

        `accepted` (int32[n]) is how many tokens each row yields. Drafts that are refused count for nothing.

        Raises BrokenRun if for too long nothing was computed for the first time.
        """
        counts = np.where(plan.samples > 1, accepted, plan.counts)
        ends = plan.starts + counts
        fresh = np.where(taken, np.maximum(ends - np.maximum(self.furthest[numbers], plan.starts), 0), 0)
        self.furthest[numbers] = np.where(taken, np.maximum(self.furthest[numbers], ends), self.furthest[numbers])
        again = int(counts.sum() - fresh.sum())
        self.recomputed += again
        self.advances += bool(fresh.any())
        self.since_first_time = 0 if fresh.any() else self.since_first_time + again
        if self.since_first_time > self.stall_limit:
            raise BrokenRun(f"livelock: {self.since_first_time} tokens computed again since the last new one")


@dataclass(slots=True)
class Ends:
    """Counts how often each request ended. tokens: how many tokens of its answer there are, by number."""

    tokens: dict[int, int]
    ended: dict[int, str] = field(default_factory=dict)

    def begins(self, event: StopFound) -> bool:
        """Whether the request has so many tokens already that a stop string can have been found there."""
        return self.tokens.get(event.number, 0) >= event.keep_tokens

    def take(self, scheduler: Scheduler) -> None:
        """Take in the output of the scheduler."""
        batch = scheduler.drain()
        for number in batch.numbers.tolist():
            if number in self.ended:
                raise BrokenRun(f"end: request {number} has a token after its end")
            self.tokens[number] = self.tokens.get(number, 0) + 1
        for finish in batch.finished:
            if finish.number in self.ended:
                raise BrokenRun(f"end: request {finish.number} ended twice")
            cut = finish.reason == "stop" and isinstance(finish.matched, str)
            if finish.completion_tokens != self.tokens.get(finish.number, 0) and not cut:
                raise BrokenRun(f"end: request {finish.number} reported a wrong number of tokens")
            self.ended[finish.number] = finish.reason


class ProgramRun:
    """One run of a program. `turn` is one turn of the event loop: events, plans up to the depth, one commit."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.scheduler = Scheduler(program.scheduler_settings(), program.info(), program.cost)
        self.now = 1_000_000_000
        self.outcome = Outcome()
        self._script = deque(program.script)
        self._turns = 0
        self._empty_turns = 0
        self._resumed_turn = -1
        self._in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()
        self._transfers: list[tuple[int, Event]] = []
        self._loading: set[int] = set()
        self._links = random.Random(len(program.script))
        jobs = program.jobs
        self._ends = Ends({job.number: job.begun for job in jobs if job.begun})
        numbers = 1 + max((job.number + job.n for job in jobs), default=0)
        answers, tokens = sum(job.n for job in jobs), sum(job.most_tokens for job in jobs)
        pool = self._pool_tokens = program.pages * self.scheduler.state.settings.page_size
        others = len(program.script) - len(jobs)
        self.outcome.allowed = RECOMPUTED * (tokens + others * pool)
        self._most_steps = (1 + RECOMPUTED) * (tokens + others * pool) + answers
        self._progress = Progress(np.zeros(numbers, np.int64), (answers + 2) * pool)
        self._owner = np.zeros(program.pool_rows, np.int64)
        self._ready = np.zeros(numbers, np.int32)
        self._eos_at = np.zeros(numbers, np.int64)
        for job in jobs:
            self._eos_at[job.number : job.number + job.n] = job.prompt_tokens + job.answer_tokens - 1
        self._watch_places()
        self._draw = np.random.default_rng(len(jobs))

    def on_retract(self, row: int, why: str) -> None:
        """The table row `row` is about to lose its place."""
        if why != "paused":
            self._progress.lost_place(int(self.scheduler.state.table.number[row]))

    def on_retracted(self, row: int) -> None:
        """The table row `row` has lost its place."""

    def on_admit(self, row: int) -> None:
        """The table row `row` is about to take a place, for the first time or again."""
        self._progress.advances += not self.scheduler.state.table.admitted_ns[row]

    def on_preempt(self, victim: int, preemptor: int) -> None:
        """The row `victim` is about to be preempted by the waiting row `preemptor`; `on_retract` follows."""

    def _watch_places(self) -> None:
        state = self.scheduler.state
        retract, admit, preempted = state.retract, state.admit, state.limits.preempted

        def watched_retract(row: int, why: str, now: int) -> None:
            self.on_retract(row, why)
            retract(row, why, now)
            self.on_retracted(row)

        def watched_admit(row: int, hit: int, now: int) -> None:
            self.on_admit(row)
            admit(row, hit, now)

        def watched_preempted(row: int, preemptor: int) -> None:
            self.on_preempt(row, preemptor)
            preempted(row, preemptor)

        state.retract, state.admit, state.limits.preempted = watched_retract, watched_admit, watched_preempted

    def run(self) -> Outcome:
        """Run to the end or to the first error."""
        try:
            while self._turn():
                pass
            self._finish()
        except BrokenRun as broken:
            self.outcome.failure = str(broken)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.outcome.failure = f"raised: {type(error).__name__}: {error} ({at.name}, line {at.lineno})"
        counters = self.scheduler.state.observer.counters
        self.outcome.recomputed = self._progress.recomputed
        self.outcome.preempted, self.outcome.retracted = counters.preempted, counters.retracted
        return self.outcome

    def _turn(self) -> bool:
        """False once all is done."""
        self._apply_due()
        self._end_transfers(self._turns)
        depth = self.scheduler.state.settings.max_in_flight
        while len(self._in_flight) < depth and self._plan():
            pass
        self._ends.take(self.scheduler)
        if self._in_flight:
            self._commit()
            self._turns += 1
            return True
        return self._wait()

    def _apply_due(self) -> None:
        while self._script and self._script[0][0] <= self._turns:
            entry = self._script.popleft()[1]
            event = entry.event() if isinstance(entry, Job) else entry
            if isinstance(event, StopFound) and not self._ends.begins(event):
                continue
            self.outcome.events += 1
            self._progress.advances += 1
            try:
                self.scheduler.apply(event, self.now)
            except ConfigError:
                if not isinstance(event, SetPolicy):
                    raise
            self.now += 1000

    def _end_transfers(self, turn: int) -> None:
        """Report transfers that have ended by `turn` to the scheduler."""
        due = [event for end, event in self._transfers if end <= turn]
        self._transfers = [(end, event) for end, event in self._transfers if end > turn]
        for event in due:
            self.outcome.events += 1
            self.outcome.allowed += RECOMPUTED * self._pool_tokens
            self._most_steps += (1 + RECOMPUTED) * self._pool_tokens
            self._progress.advances += 1
            if isinstance(event, KvLoaded):
                self._loading.discard(event.number)
            self.scheduler.apply(event, self.now)

    def _begin_transfers(self) -> None:
        size = self.scheduler.state.settings.page_size
        for move in self.scheduler.drain_moves():
            ended: Event = PagesReleased(move.number)
            if isinstance(move, Load):
                if move.number in self._loading:
                    raise BrokenRun(f"load: request {move.number} is loaded before its first load has ended")
                self._loading.add(move.number)
                wanted = len(move.pages) * size
                ended = KvLoaded(move.number, move.start + self._links.choice((wanted, self._links.randint(0, wanted))))
            self._transfers.append((self._turns + self._links.randint(0, MAX_TRANSFER), ended))

    def _plan(self) -> bool:
        self.outcome.events += 1
        plan = self.scheduler.plan(self.now)
        self._begin_transfers()
        if self._program.windows is not None or self._program.states is not None:
            check_hits(self.scheduler)
        if plan is None:
            return False
        state = self.scheduler.state
        if plan.row_starts:
            held = np.concatenate((state.prefilling.rows, state.running.rows))
            self._owner[state.table.pool_row[held]] = state.table.number[held]
        numbers = self._owner[plan.pool_rows]
        self._check_lengths(plan, numbers)
        self._in_flight.append((plan, numbers))
        self.outcome.steps += 1
        self.outcome.tokens += int(plan.counts.sum())
        self._empty_turns = 0
        if self._progress.recomputed > self.outcome.allowed:
            raise BrokenRun(f"recomputed: more than {self.outcome.allowed} tokens were computed again")
        if self.outcome.steps > self._most_steps:
            raise BrokenRun(f"steps: more than {self._most_steps}")
        return True

    def _check_lengths(self, plan: StepPlan, numbers: np.ndarray) -> None:
        """Raise BrokenRun for a row beyond its limit, or with more drafts than the executor has for it; AssertionError
        for a page without an owner.
        """
        state = self.scheduler.state
        check_books(self.scheduler)
        seated = state.admitted_rows()
        beyond = seated[state.table.planned[seated] > state.table.limit[seated]]
        if len(beyond):
            raise BrokenRun(f"lengths: requests {state.table.number[beyond].tolist()} are planned beyond their limits")
        verify = slice(plan.decode_rows, plan.chunks_from)
        excess = numbers[verify][plan.counts[verify] - 1 > self._ready[numbers[verify]]]
        if len(excess):
            raise BrokenRun(f"drafts: requests {excess.tolist()} verify more drafts than they have")

    def _commit(self) -> None:
        plan, numbers = self._in_flight.popleft()
        self.now += self._program.step_ns
        seconds = self._program.step_ns / 1e9
        if self._program.noise:
            seconds *= float(self._draw.lognormal(0.0, self._program.noise))
        first = plan.starts + plan.counts - plan.samples + 1
        accepted = np.minimum(plan.samples, self._draw.integers(1, self._program.drafts + 2, len(first)))
        self.outcome.events += 1
        self._progress.committed(numbers, plan, accepted, self._taken(numbers, plan))
        result = StepResult(plan.step, np.where(first == self._eos_at[numbers], EOS, ANSWER).astype(np.int32), seconds)
        if self._program.drafts:
            places = np.concatenate([np.arange(start, start + n) for start, n in zip(first, accepted, strict=True)])
            result.tokens = np.where(places == np.repeat(self._eos_at[numbers], accepted), EOS, ANSWER).astype(np.int32)
            result.accepted = accepted.astype(np.int32)
            result.drafted = self._draw.integers(0, self._program.drafts + 1, len(first)).astype(np.int32)
            result.chances = self._draw.choice(self._program.chances, len(first)).astype(np.int32)
            self._ready[numbers] = result.drafted
        else:
            result.tokens[plan.samples == 0] = -1
        self.scheduler.commit(result, self.now)
        self._ends.take(self.scheduler)
        check_holders(self.scheduler)

    def _taken(self, numbers: np.ndarray, plan: StepPlan) -> np.ndarray:
        """Rows of the plan that still have the place for which it was made, bool[n]."""
        table = self.scheduler.state.table
        rows = zip(map(table.row_of, numbers.tolist()), plan.epochs, strict=True)
        return np.array([row is not None and table.epoch[row] == epoch for row, epoch in rows], bool)

    def _wait(self) -> bool:
        """Nothing is in flight and nothing was planned: wait for a timeout or the next event."""
        scheduler = self.scheduler
        if self._transfers:
            self._turns = min(end for end, _ in self._transfers)
            return True
        if not scheduler.has_work and not self._script:
            self._rest()
            return False
        wakeup = scheduler.wakeup_ns()
        if scheduler.has_work and (reason := self._standstill()):
            raise BrokenRun(f"standstill: {reason}; wakeup {wakeup}")
        self._empty_turns += 1
        if self._empty_turns > MAX_EMPTY_TURNS:
            raise BrokenRun(f"spin: {MAX_EMPTY_TURNS} wakeups in a row with nothing to do")
        if self._script:
            self._turns += 1
            self.now = self.now + self._program.step_ns
        elif wakeup is not None:
            self.now = max(wakeup, self.now + 1)
        else:
            self._resume_all()
        return True

    def _rest(self) -> None:
        """With no request left nothing may wake the event loop again and again."""
        self.now += HOUR_NS
        planned, wakeup = self.scheduler.plan(self.now), self.scheduler.wakeup_ns()
        if planned is not None or (wakeup is not None and wakeup <= self.now):
            raise BrokenRun(f"spin: with no request left the scheduler is to be called at {wakeup} again")

    def _standstill(self) -> str:
        """Which requests could be worked on although nothing was planned; "" for none."""
        state = self.scheduler.state
        if self.scheduler.snapshot(self.now).paused:
            return ""
        views = state.views(self.now)
        state.limits.begin_step(views)
        able = [*views.waiting.tolist(), *views.prefilling.tolist(), *views.running.tolist()]
        numbers = [int(state.table.number[row]) for row in able]
        return f"nothing is planned though {numbers} could go on" if numbers else ""

    def _resume_all(self) -> None:
        numbers = self.scheduler.state.table.numbers()
        paused = self.scheduler.snapshot(self.now).paused or self.scheduler.state.table.gates.any()
        if not paused:
            raise BrokenRun(f"standstill: {numbers} are held back by nothing")
        if self._resumed_turn == self._turns:
            raise BrokenRun(f"standstill: {numbers} stay held back after everything was resumed")
        self._resumed_turn = self._turns
        self.scheduler.apply(Resume(), self.now)
        self.scheduler.apply(Resume(numbers), self.now)
        for number in numbers:
            self.scheduler.apply(OpenGate(number, Gate.GRAMMAR), self.now)

    def _finish(self) -> None:
        self._ends.take(self.scheduler)
        expected = {job.number + answer for job in self._program.jobs for answer in range(job.n)}
        if missing := expected - set(self._ends.ended):
            raise BrokenRun(f"end: requests {sorted(missing)} never ended")
        if (mismatch := self.scheduler.idle()) is not None:
            raise BrokenRun(f"books: {mismatch}")


def run_program(program: Program) -> Outcome:
    """Run a program and say what came of it."""
    return ProgramRun(program).run()
