"""One engine in virtual time: the real scheduler, with an executor that only computes how long steps take."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Event,
    ExecutorInfo,
    Finish,
    Int32Array,
    Int64Array,
    Request,
    StepPlan,
    StepResult,
    StepWork,
    Submit,
    step_work,
)
from tokenyard.cost import LinearCost
from tokenyard.sim.engine.speculation import SimDrafter
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, EOS_TOKEN, stream_tokens
from tokenyard.sim.traces.workload import to_ns
from tokenyard.tape.recorder import Core

NEVER_NS = 2**63 - 1
FILLER_TOKEN = 1
COMMITS_PER_DRAIN = 8
MAX_STEPS = 1 << 20
RETRY_NS = NS_PER_S
MAX_RETRIES = 60
"""If there is work but no plan and no timeout, planning is retried this many times, as in a server; after that it can
never succeed.
"""

StepObserver = Callable[[int, int, StepPlan, StepWork, Core], None]
"""Called with each step when it is committed: (launch ns, end ns, plan, work, scheduler)."""


class SimExecutor:
    """Runs plans. A row that reaches its true output length samples end-of-sequence; any other row continues.

    It identifies a request by its sampling seed, which the workload sets to the request's number. With
    `distinct_tokens` each answer has its own token ids, so that a later turn can hit them in the prefix cache.
    `drafter` is for speculative decoding, None for none.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        truth: LinearCost,
        output_tokens: Int32Array,
        distinct_tokens: bool,
        drafter: SimDrafter | None = None,
    ) -> None:
        self._usual = self._truth = truth
        self._output_tokens = output_tokens
        self._distinct = distinct_tokens
        self._drafter = drafter
        self._last_position = np.full(info.max_pool_rows, -1, np.int64)
        self._prompt_tokens = np.zeros(info.max_pool_rows, np.int64)
        self._number = np.zeros(info.max_pool_rows, np.int64)

    def slow_down(self, factor: float) -> None:
        """From now on every step takes `factor` times its normal duration."""
        self._truth = self._usual.scaled(factor) if factor != 1.0 else self._usual

    def run(self, plan: StepPlan) -> tuple[StepWork, StepResult]:
        """Return the work and the result of a plan."""
        for start in plan.row_starts:
            number = start.sampling.seed
            self._number[start.pool_row] = number
            self._prompt_tokens[start.pool_row] = start.prompt_tokens
            self._last_position[start.pool_row] = start.prompt_tokens + int(self._output_tokens[number]) - 2
            if self._drafter is not None:
                self._drafter.start(start.pool_row)
        work = step_work(plan)
        if self._drafter is not None:
            return work, self._run_with_drafts(plan, work, self._drafter)
        tokens = self._tokens(plan.pool_rows, plan.starts + plan.counts - 1)
        if plan.decode_rows < len(tokens):
            tokens[~plan.sampled] = -1
        return work, StepResult(plan.step, tokens, self._truth.step(work))

    def _run_with_drafts(self, plan: StepPlan, work: StepWork, drafter: SimDrafter) -> StepResult:
        """The result of a plan with drafts: each row yields its right drafts and the sample after them."""
        accepted, rows = drafter.accepted(plan), plan.pool_rows
        # Token j of a row is sampled j positions after its first sample.
        firsts = plan.starts + plan.counts - plan.samples - (np.cumsum(accepted) - accepted)
        places = np.repeat(np.arange(len(rows)), accepted)
        tokens = self._tokens(rows[places], (firsts[places] + np.arange(len(places))).astype(np.int32))
        drafted, chances, draft_s = drafter.draft(plan, accepted, self._number[rows], self._prompt_tokens[rows])
        seconds = self._truth.step(work) + draft_s
        return StepResult(plan.step, tokens, seconds, accepted=accepted, drafted=drafted, chances=chances)

    def decode_ns(self, plan: StepPlan, work: StepWork) -> Int64Array:
        """Duration in ns of each step if `plan`, which only decodes, repeats until a row ends: int64[steps].

        `work` is that of its first step.
        """
        rows = work.rows
        steps = int((self._last_position[plan.pool_rows] - plan.starts).min()) + 1
        contexts = work.decode_context + rows * np.arange(steps, dtype=np.int64)
        durations: Int64Array = np.rint(self._truth.decodes(rows, contexts) * NS_PER_S).astype(np.int64)
        return durations

    def run_multi_step(self, plan: StepPlan, duration_ns: int) -> StepResult:
        """The result of a multi-step plan that takes `duration_ns` in total."""
        positions = plan.starts + np.arange(plan.num_steps, dtype=np.int32)[:, None]
        return StepResult(plan.step, self._tokens(plan.pool_rows, positions).ravel(), duration_ns / NS_PER_S)

    def _tokens(self, rows: Int32Array, positions: Int32Array) -> Int32Array:
        """The tokens that pool `rows` (int32[n]) sample after `positions` (int32[..., n])."""
        tokens = self._going_on(rows, positions)
        tokens[positions == self._last_position[rows]] = EOS_TOKEN
        return tokens

    def _going_on(self, rows: Int32Array, positions: Int32Array) -> Int32Array:
        if not self._distinct:
            return np.full(positions.shape, FILLER_TOKEN, np.int32)
        # A chunk in the middle of a prompt samples nothing; its negative output index is masked by the caller.
        index = np.maximum(positions + 1 - self._prompt_tokens[rows], 0)
        return stream_tokens(ANSWER_STREAM + self._number[rows], index)


@dataclass(slots=True)
class _Repeatable:
    """A decode-only plan that is not launched yet and can stand for several steps.

    work: that of its first step.
    ends: int64[n], end times of up to n steps.
    due: number of steps after which something happens.
    """

    plan: StepPlan
    work: StepWork
    durations: Int64Array
    ends: Int64Array
    due: int


@dataclass(slots=True)
class _SimulatedStep:
    plan: StepPlan
    work: StepWork
    result: StepResult
    begin_ns: int
    end_ns: int


class SimScheduler:
    """A scheduler with its simulated device.

    Its loop is the engine's: plan, launch, then commit the oldest step once `depth` steps are in flight. With `depth`
    2, overlap scheduling, a plan is made before the result of the last step is known.

    depth: the scheduler's `max_in_flight`.
    host_s: CPU time of a turn. With overlap it runs during the device's work; without, it adds to it.
    """

    def __init__(
        self,
        scheduler: Core,
        executor: SimExecutor,
        finished: Callable[[Finish], None],
        depth: int = 1,
        host_s: float = 0.0,
        observer: StepObserver | None = None,
        started: Callable[[int, int, int], None] | None = None,
        kv_events_sent: Callable[[list[Any], int], None] | None = None,
    ) -> None:
        """Connect a scheduler to its device.

        started: called at each first token with (request number, cached prompt tokens, ns).
        kv_events_sent: called with (wire form of KV events, ns) if the settings enable them.
        """
        self.scheduler = scheduler
        self.now = 0
        self.busy_ns = 0
        self.steps = 0
        self._executor = executor
        self._finished = finished
        self.started = started
        self._awaited: set[int] = set()
        self._kv_events_sent = kv_events_sent
        self._host_ns = to_ns(host_s)
        self._observer = observer
        self._depth = depth
        self._in_flight: deque[_SimulatedStep] = deque()
        self._repeatable: _Repeatable | None = None
        self._must_commit = False
        self._wakeup_ns = NEVER_NS
        self._undrained = self._retries = 0
        self._device_free_ns = 0
        self._hash = blake2b(digest_size=16)

    @property
    def due_ns(self) -> int:
        """Time (ns) of the next internal event: a step ends, or planning is due. NEVER_NS for none.

        A repeated decode step is due only when a row ends.
        """
        if self._repeatable is not None:
            return int(self._repeatable.ends[self._repeatable.due - 1])
        return self._in_flight[0].end_ns if self._in_flight else self._wakeup_ns

    def submit(self, request: Request, now: int) -> None:
        """Submit a request at `now`, the time that `advance_to`, or `advance` with `to_arrival`, has reached."""
        if not self._in_flight:
            self.now = max(self.now, now)
            self._wakeup_ns = self.now
        if self.started is not None:
            self._awaited.add(request.number)
        self.scheduler.apply(Submit(request), now)

    def apply_event(self, event: Event, now: int) -> None:
        """Apply an external event at `now`, the time that `advance_to` has reached."""
        if not self._in_flight:
            self.now = max(self.now, now)
            self._wakeup_ns = self.now
        self.scheduler.apply(event, now)
        self.drain(now)

    def pause_until(self, until: int) -> None:
        """Stall the process from the time that `advance_to` has reached until `until` (ns).

        The device finishes the steps in flight. The process commits them at `until`.
        """
        for step in self._in_flight:
            step.end_ns = max(step.end_ns, until)
        if self._wakeup_ns < NEVER_NS:
            self._wakeup_ns = max(self._wakeup_ns, until)

    def advance(self, until: int, *, to_arrival: bool = False, defer: bool = False) -> None:
        """Process everything that is due before `until` (ns).

        With `to_arrival` the next event is a submit, so a multi-step plan may overrun it. With `defer` a repeatable
        plan is launched before `until` only if it ends before, because the next event is not known yet.
        """
        while self.now < until:
            if self._repeatable is not None:
                if defer and self.due_ns >= until:
                    break
                self._launch_repeatable(until, to_arrival)
            elif self._must_commit:
                if self._in_flight[0].end_ns >= until:
                    break
                self._commit()
            elif not self._plan() and not self._sleep(until):
                break
        self.drain(self.now)

    def turn(self) -> None:
        """Process what is due at `due_ns` and plan the next step."""
        self.advance(self.due_ns + 1, defer=True)

    def advance_to(self, now: int) -> None:
        """Advance to `now`, the time of an external event. `now` must not be after `due_ns`."""
        self.advance(now, to_arrival=True)
        if self._repeatable is not None:
            self._launch_repeatable(now, to_arrival=True)

    def decision_hash(self) -> bytes:
        """Digest of all plans so far with their times: equal runs have equal hashes."""
        return self._hash.digest()

    def _plan(self) -> bool:
        """Run one planning turn; False if there is nothing to do before the next event."""
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self._retries = 0
            self._repeatable = self._as_repeatable(plan)
            if self._repeatable is not None:
                return True
            self._launch(plan)
        self._must_commit = bool(self._in_flight) and (plan is None or len(self._in_flight) == self._depth)
        return bool(self._in_flight)

    def _sleep(self, until: int) -> bool:
        """With nothing to plan, advance to the next attempt before `until`; False if there is none."""
        if not self.scheduler.has_work:
            mismatch = self.scheduler.idle()
            if mismatch is not None:
                raise RuntimeError(f"the scheduler leaks memory: {mismatch}")
        wakeup = self.scheduler.wakeup_ns()
        if wakeup is None and self.scheduler.has_work and self._retries < MAX_RETRIES:
            self._retries += 1
            wakeup = self.now + RETRY_NS
        self._wakeup_ns = NEVER_NS if wakeup is None or wakeup <= self.now else wakeup
        if self._wakeup_ns >= until:
            return False
        self.now = self._wakeup_ns
        return True

    def _launch(self, plan: StepPlan) -> None:
        work, result = self._executor.run(plan)
        begin = max(self.now + self._host_ns, self._device_free_ns)
        duration = round(result.seconds * NS_PER_S)
        self._device_free_ns = begin + duration
        self.busy_ns += duration
        self.steps += 1
        self._in_flight.append(_SimulatedStep(plan, work, result, begin, begin + duration))
        for part in (np.int64(self.now), plan.pool_rows, plan.starts, plan.counts):
            self._hash.update(part.data)

    def _as_repeatable(self, plan: StepPlan) -> _Repeatable | None:
        """A plan that can stand for several steps: up to the one in which a row ends, or the last before a timeout.

        None if that leaves one step. With an observer every step is its own plan.
        """
        if plan.decode_rows < len(plan.pool_rows) or self._observer is not None:
            return None
        possible = self.scheduler.possible_steps(MAX_STEPS)
        if possible == 1:
            return None
        work = step_work(plan)
        durations = self._executor.decode_ns(plan, work)
        due = min(possible, len(durations))
        ends = self.now + np.cumsum(self._host_ns + durations)
        wakeup = self.scheduler.wakeup_ns()
        if wakeup is not None:
            due = min(due, int(np.searchsorted(ends, wakeup)))
        until = self.scheduler.repeats_until_ns()
        if until is not None:
            # A step begins where the one before it ends.
            due = min(due, 1 + int(np.searchsorted(ends, until)))
        return _Repeatable(plan, work, durations, ends, due) if due > 1 else None

    def _launch_repeatable(self, until: int, to_arrival: bool) -> None:
        """Launch the repeatable plan for all steps that end before `until`, at least one; with `to_arrival`, for one
        step more.
        """
        assert self._repeatable is not None
        again, self._repeatable = self._repeatable, None
        plan, durations, ends = again.plan, again.durations, again.ends
        self._must_commit = True
        steps = min(int(np.searchsorted(ends, until)) + to_arrival, again.due)
        if steps <= 1 or self.scheduler.multi_step(steps) == 1:
            self._launch(plan)
            return
        duration, end = int(durations[: plan.num_steps].sum()), int(ends[plan.num_steps - 1])
        result = self._executor.run_multi_step(plan, duration)
        self._in_flight.append(_SimulatedStep(plan, again.work, result, self.now + self._host_ns, end))
        self._hash_multi_step(plan, np.concatenate(([self.now], ends[: plan.num_steps - 1])))
        self._device_free_ns = end
        self.busy_ns += duration
        self.steps += plan.num_steps

    def _hash_multi_step(self, plan: StepPlan, launches: Int64Array) -> None:
        """Add the steps of a multi-step plan to the hash one by one, as `_launch` does."""
        rows = len(plan.pool_rows)
        steps = np.empty((len(launches), 2 + 3 * rows), np.int32)
        steps[:, :2] = launches.view(np.int32).reshape(-1, 2)
        steps[:, 2 : 2 + rows] = plan.pool_rows
        steps[:, 2 + rows : 2 + 2 * rows] = plan.starts + np.arange(len(launches), dtype=np.int32)[:, None]
        steps[:, 2 + 2 * rows :] = plan.counts
        self._hash.update(steps.data)

    def _commit(self) -> None:
        step = self._in_flight.popleft()
        self.now = max(self.now, step.end_ns)
        self.scheduler.commit(step.result, self.now)
        self._must_commit = False
        self._undrained += 1
        if self._undrained == COMMITS_PER_DRAIN or self.started is not None:
            self.drain(self.now)
        if self._observer is not None:
            self._observer(step.begin_ns, step.end_ns, step.plan, step.work, self.scheduler)

    def drain(self, now: int) -> None:
        """Deliver the outputs and events that the scheduler has emitted by `now` (ns)."""
        self._undrained = 0
        if not self.scheduler.has_output:
            return
        batch = self.scheduler.drain()
        if self.started is not None and self._awaited:
            numbers = batch.numbers.tolist()
            for number in sorted(self._awaited.intersection(numbers)):
                self._awaited.discard(number)
                self.started(number, int(batch.hits[numbers.index(number)]), now)
        if self._kv_events_sent is not None:
            self._kv_events_sent(self.scheduler.kv_records(), now)
        for finish in batch.finished:
            self._awaited.discard(finish.number)
            self._finished(finish)
