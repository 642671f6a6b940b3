"""The steps of the event loop. They connect the scheduler, which does no IO, to the executor and the message port."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from tokenyard.base import (
    NS_PER_S,
    AbortCause,
    Cancel,
    ConfigError,
    DeviceLostError,
    DistributedExecutor,
    Event,
    Executor,
    Finish,
    InvalidRequestError,
    Pause,
    Request,
    Resume,
    SetPolicy,
    StepPlan,
    StepResult,
    Submit,
    TokenyardError,
)
from tokenyard.engine.processes.messages import FromScheduler, RpcRequest, ToScheduler
from tokenyard.engine.scheduler_process.attachments.base import Attachment, VerbHandler
from tokenyard.engine.scheduler_process.attachments.hooks import AttachmentHooks
from tokenyard.engine.scheduler_process.health.incidents import Incidents
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.profiler import Profiler
from tokenyard.engine.scheduler_process.health.stalls import log_stall
from tokenyard.engine.scheduler_process.health.step_history import StepHistory
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.scheduler_process.health.user_code_guards import STALL_NS, StallGuard
from tokenyard.engine.scheduler_process.rpc import RpcHandlers
from tokenyard.scheduler.snapshot import Snapshot
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

COUNTERS_INTERVAL_NS = NS_PER_S // 4
MAX_WAIT_NS = 60 * NS_PER_S
MAX_STEP_FAILURES = 2
NAN_MESSAGE = "the model's logits are NaN; its weights may be damaged, or its numbers too large for --dtype"
FIRST_RETRY_NS, MAX_RETRY_NS = NS_PER_S // 10, NS_PER_S
"""Delays between tries while there is work but no step can be planned; each delay is twice the previous one."""


class Port(Protocol):
    """The channel for messages to and from the scheduler."""

    def receive(self, timeout_ns: int) -> list[ToScheduler] | None:
        """Return received messages, waiting up to `timeout_ns` for a first one; None means stop."""

    def send(self, message: FromScheduler) -> None:
        """Send one message on, without waiting."""


class DeviceBrokenError(TokenyardError):
    """The executor fails repeatedly; the process must end and report why."""

    code = "device_broken"


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A launched plan; `lost` once its result no longer counts."""

    plan: StepPlan
    ticket: Any = None
    lost: bool = False


class Driver:
    """One scheduler, one executor, a port and attachments, with the steps of an event loop as methods.

    After a step that fails all requests return to the queue and are computed again. If a step fails again right away,
    the requests in it end with an error. Three failures in a row, or one that the device cannot recover from, raise
    DeviceBrokenError; the process that replaces this one continues the requests. A user-defined policy that stalls is
    replaced by fcfs.
    """

    def __init__(
        self,
        scheduler: Core,
        executor: Executor,
        port: Port,
        *,
        log: StepLog,
        state: LoopState,
        attachments: Sequence[Attachment] = (),
        policy_note: str = "",
        rank: int = 0,
    ) -> None:
        """The order of the attachments is the order in which they see requests. Who made them closes them."""
        self._scheduler = scheduler
        self._executor = executor
        self._distributed = executor if isinstance(executor, DistributedExecutor) else None
        self._port = port
        self._log = log
        self._state = state
        self._launched: deque[LaunchedStep] = deque()
        self._refused: list[Finish] = []
        self._failures = 0
        self._counters_at_ns = 0
        self._counters_stale = False
        self._hooks = AttachmentHooks(attachments, state)
        self._guard = StallGuard(state.enter)
        self._incidents = Incidents()
        self._policy_failure = ""
        self._retry_ns = FIRST_RETRY_NS
        self._policy_note = policy_note
        self._rank = rank
        self._steps: StepHistory | None = None
        own_verbs: dict[str, VerbHandler] = {
            "snapshot": self._counters,
            "explain": self._explain,
            "set_policy": self._choose_policy,
            "flush": self._flush,
            "watch": self._watch,
            "outputs": lambda now, numbers: self._scheduler.outputs(numbers),
        }
        own_verbs |= Profiler(self, rank).verbs()
        self._rpc = RpcHandlers(self._hooks.verbs(own_verbs), port.send)
        self._check_policy()

    def receive(self, *, wait: bool) -> bool:
        """Handle all messages; with `wait`, block until one arrives or a timeout is due. False means stop."""
        timeout_ns = 0
        if wait:
            timeout_ns = self._wait_ns()
            self._check_idle()
        self._refresh_counters()
        if self._counters_stale and not self._scheduler.has_work:
            # Otherwise an idle engine would report its last busy counters until the next message.
            timeout_ns = min(timeout_ns, COUNTERS_INTERVAL_NS)
        if timeout_ns:
            self._state.enter("idle")
        messages = self._port.receive(timeout_ns)
        self._state.enter("host")
        for message in messages or ():
            self._handle(message)
        self._counters_stale = self._counters_stale or bool(messages)
        if wait:
            # The device is idle, so attachments see new requests before they are planned.
            self.while_device_runs()
        return messages is not None

    def plan(self) -> StepPlan | None:
        """Return the next step, if there is anything to do."""
        now = time.monotonic_ns()
        for poll in self._hooks.poll:
            self._apply_all(poll(now), now)
        with self._guard.watch():
            plan = self._scheduler.plan(now)
        if self._guard.stalled:
            self._replace_policy()
        # Loads begin while the step runs.
        if self._hooks.take:
            self._move_kv()
        if plan is not None:
            self._retry_ns = FIRST_RETRY_NS
        return plan

    def while_device_runs(self) -> None:
        """Let attachments work while the device runs."""
        now = time.monotonic_ns()
        for work in self._hooks.while_device_runs:
            self._apply_all(work(now), now)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step on the device."""
        step = LaunchedStep(plan)
        self._launched.append(step)
        self._state.enter("step")
        try:
            step.ticket = self._executor.launch(plan)
        except Exception as error:
            self._fail(error, plan)
        self._state.enter("host")
        self._state.steps += 1
        self._log.launched(plan, self._snapshot)
        self._refresh_counters()
        return step

    def sample(self, step: LaunchedStep) -> None:
        """Sample the tokens of a step whose sampling was delayed; other steps are unchanged."""
        if not step.plan.delay_sampling or step.lost:
            return
        self._state.enter("step")
        try:
            self._executor.sample(step.ticket)
        except Exception as error:
            self._fail(error, step.plan)
        self._state.enter("host")

    def process(self, step: LaunchedStep) -> None:
        """Wait for a launched step and commit its result."""
        self._counters_stale = True
        result = None if step.lost else self.collect(step)
        if result is not None:
            self.commit(result)

    def collect(self, step: LaunchedStep) -> StepResult | None:
        """Wait for a launched step; None if it failed."""
        self._state.enter("step")
        try:
            result = self._executor.collect(step.ticket)
        except Exception as error:
            self._fail(error, step.plan)
            return None
        finally:
            self._state.enter("host")
        self._failures = 0
        self._launched.popleft()
        if self._steps is not None:
            self._steps.add(step.plan, result.seconds, self._scheduler.cost, time.monotonic_ns())
        for place, message in result.failures.items():
            self._end_row(step.plan, place, message, "invalid")
        if result.nan_rows:
            logger.error("step %d: the model's logits are NaN for %d requests", step.plan.step, len(result.nan_rows))
        for place in result.nan_rows:
            self._end_row(step.plan, place, NAN_MESSAGE, "failed")
        return result

    def _end_row(self, plan: StepPlan, place: int, message: str, cause: AbortCause) -> None:
        number = self._scheduler.request_number(plan, place)
        if number is not None:
            self._scheduler.apply(Cancel([number], message, cause), time.monotonic_ns())

    def commit(self, result: StepResult) -> None:
        """Commit the result of a step."""
        with self._guard.watch():
            self._scheduler.commit(result, time.monotonic_ns())
        self._log.committed(result)

    def send(self) -> None:
        """Send the output since the last call."""
        batch = self._scheduler.drain()
        if self._refused:
            batch.finished += self._refused
            self._refused = []
        for on_output in self._hooks.on_output:
            on_output(batch)
        if self._hooks.take:
            self._move_kv()
        if batch.finished:
            self._incidents.on_finished(batch.finished)
        if not batch.empty:
            self._port.send(batch)
        for sent in self._hooks.sent:
            sent(batch)

    def _move_kv(self) -> None:
        """Have attachments start the loads, stores and handovers that the scheduler requests."""
        moves = self._scheduler.drain_moves()
        for take in self._hooks.take:
            if moves:
                moves = take(moves)

    def _wait_ns(self) -> int:
        """How long to wait for messages when nothing can be planned and nothing is in flight."""
        wakeups = [self._scheduler.wakeup_ns(), *(wakeup() for wakeup in self._hooks.wakeup_ns)]
        wakeup_ns = min((due for due in wakeups if due is not None), default=None)
        wait_ns = MAX_WAIT_NS if wakeup_ns is None else min(max(0, wakeup_ns - time.monotonic_ns()), MAX_WAIT_NS)
        if not self._scheduler.has_work:
            return wait_ns
        retry_ns = self._retry_ns
        self._retry_ns = min(2 * retry_ns, MAX_RETRY_NS)
        if retry_ns < MAX_RETRY_NS <= self._retry_ns:
            self._log_stall()
        return min(wait_ns, retry_ns)

    def _log_stall(self) -> None:
        """Log why no step can be planned although requests wait, unless the engine is paused or loads KV, or an
        attachment is busy.
        """
        state = self._snapshot()
        if state.paused or state.loading or any(busy() for busy in self._hooks.busy):
            return
        texts = [held_reasons() for held_reasons in self._hooks.held_reasons]
        log_stall(state, self._scheduler.held_back(), texts, MAX_RETRY_NS / NS_PER_S)

    def _check_idle(self) -> None:
        """Have the scheduler check its KV accounting while it has no work."""
        if not self._scheduler.has_work and (mismatch := self._scheduler.idle()) is not None:
            logger.error("KV accounting was wrong; the pool was reset: %s", mismatch)

    def _handle(self, message: ToScheduler) -> None:
        now = time.monotonic_ns()
        if isinstance(message, RpcRequest):
            self._rpc.answer(message, now)
        elif isinstance(message, Submit):
            self._submit(message, now)
        elif isinstance(message, SetPolicy):
            self._set_policy(message, now)
        else:
            self._apply(message, now)

    def _explain(self, now: int, number: int) -> Any:
        """Where the time of a request went, as plain data; None for an unknown request."""
        return msgspec.to_builtins(self._scheduler.explain(number, now))

    def _choose_policy(self, now: int, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order the queue by another policy. Raises ConfigError for an unknown policy or option."""
        refusal = self._set_policy(SetPolicy(name, options), now)
        if refusal:
            raise ConfigError(refusal)

    def _flush(self, now: int) -> bool:
        """Empty the prefix cache; False if it is in use."""
        if not self._scheduler.has_work:
            for release in self._hooks.before_flush:
                self._apply_all(release(now), now)
        return self._scheduler.flush(now)

    def _watch(self, now: int, prefixes: bool, bins: int) -> dict[str, Any]:
        """The state for a live page. The first call starts the step history."""
        if self._steps is None:
            self._steps = StepHistory()
        view = self._scheduler.live_view(now, prefixes=prefixes)
        return asdict(view) | {"bins": self._steps.latest(bins, now), "counters": self._state.counters}

    def _snapshot(self) -> Snapshot:
        """The state of the scheduler, with the gauges of its policy; hence the guard."""
        with self._guard.watch():
            return self._scheduler.snapshot(time.monotonic_ns())

    def _counters(self, now: int) -> dict[str, Any]:
        """The scheduler's snapshot, with the state of guards and attachments."""
        counters: dict[str, Any] = msgspec.to_builtins(self._snapshot())
        given_up = counters["policy_failure"] and f"using fcfs: {counters['policy_failure']}"
        counters["policy_note"] = self._policy_note or counters["policy_note"] or given_up
        if self._distributed is not None:
            counters["tp_ranks"] = {f"rank {self._rank}": self._distributed.describe_ranks()}
        for describe in self._hooks.describe:
            counters |= describe(now)
        return counters

    def _set_policy(self, event: SetPolicy, now: int) -> str:
        """Change the policy as an operator asks; return why not, "" if it was done."""
        refusal = self._change_policy(event, now)
        if not refusal:
            for changed in self._hooks.policy_changed:
                changed(event, now)
        return refusal

    def _change_policy(self, event: SetPolicy, now: int) -> str:
        """Change the policy; return why not, "" if it was done."""
        try:
            self._scheduler.apply(event, now)
        except Exception as error:
            logger.warning("the policy was not changed: %s", error, exc_info=not isinstance(error, ConfigError))
            return str(error)
        self._policy_note = self._policy_failure = ""
        self._check_policy()
        logger.info("the policy is now %s", self._snapshot().policy)
        return ""

    def _check_policy(self) -> None:
        """Guard the policy if it is user-defined, and log its note."""
        state = self._snapshot()
        self._guard.begin(state.policy)
        self._scheduler.time_policy(self._guard.asked, self._guard.answered)
        if note := self._policy_note or state.policy_note:
            logger.warning("%s", note)

    def _replace_policy(self) -> None:
        stalled = self._snapshot().policy
        self._set_policy(SetPolicy("fcfs"), time.monotonic_ns())
        limit_ms = STALL_NS * 1000 // NS_PER_S
        self._policy_note = f"{stalled} repeatedly took longer than {limit_ms} ms for a step: using fcfs"
        logger.error("%s", self._policy_note)

    def _submit(self, event: Submit, now: int) -> None:
        """Submit a request; if an attachment or the scheduler refuses it, it ends with an error."""
        numbers = _numbers(event.request)
        try:
            for submitted in self._hooks.submitted:
                event.request = submitted(event.request, now)
            with self._guard.watch():
                self._scheduler.apply(event, now)
        except Exception as error:
            cause = _log_refusal(event, error)
            self._refused += [Finish(number, "abort", message=str(error), cause=cause) for number in numbers]
            return
        try:
            for accepted in self._hooks.accepted:
                accepted(event.request, now)
        except Exception as error:
            # The scheduler has it, so it must end there.
            self._apply(Cancel(numbers, str(error), _log_refusal(event, error)), now)

    def _apply(self, event: Event, now: int) -> None:
        """Apply an event; one that the scheduler refuses is logged."""
        try:
            with self._guard.watch():
                self._scheduler.apply(event, now)
        except Exception as error:
            _log_refusal(event, error)

    def _apply_all(self, events: Sequence[Event], now: int) -> None:
        """Apply the events of an attachment."""
        for event in events:
            if isinstance(event, SetPolicy):
                self._change_policy(event, now)
            else:
                self._apply(event, now)

    def _fail(self, error: Exception, plan: StepPlan) -> None:
        """Retract all requests because a step failed. The second failure in a row ends the requests of the step, as one
        of them may be the cause. Plans in flight commit an empty result, which frees their pages.

        Raises DeviceBrokenError, without ending a request, if the device cannot recover.
        """
        logger.error("step %d failed: %s: %s", plan.step, type(error).__name__, error, exc_info=error)
        self._failures += 1
        message = f"the model step failed: {error}"
        if self._failures > MAX_STEP_FAILURES or "CUDA error" in str(error) or isinstance(error, DeviceLostError):
            raise DeviceBrokenError(message) from error
        now, paused = time.monotonic_ns(), self._snapshot().paused
        numbers = [self._scheduler.request_number(plan, place) for place in range(len(plan.pool_rows))]
        if self._failures == MAX_STEP_FAILURES and (suspects := [number for number in numbers if number is not None]):
            self._scheduler.apply(Cancel(suspects, message, "failed"), now)
        self._scheduler.apply(Pause("retract"), now)
        while self._launched:
            step = self._launched.popleft()
            step.lost = True
            self._scheduler.commit(empty_result(step.plan), now)
        if not paused:
            self._scheduler.apply(Resume(), now)

    def _refresh_counters(self) -> None:
        now = time.monotonic_ns()
        if now - self._counters_at_ns >= COUNTERS_INTERVAL_NS:
            self._counters_at_ns, self._counters_stale = now, False
            self._state.counters = counters = self._counters(now)
            self._incidents.on_counters(counters["counters"])
            self._incidents.log_due(now)
            if counters["policy_failure"] != self._policy_failure:
                self._policy_failure = counters["policy_failure"]
                logger.error("the policy failed and is replaced by fcfs: %s", self._policy_failure)
            if self._steps is not None and self._steps.expired(now):
                self._steps = None


def _log_refusal(event: Event, error: Exception) -> AbortCause:
    """Log that an event was refused; returns the abort cause of its request: whether the request is invalid."""
    trace = None if isinstance(error, TokenyardError) else error
    logger.warning("%s was refused: %s", type(event).__name__, error, exc_info=trace)
    return "invalid" if isinstance(error, InvalidRequestError | ConfigError) else "failed"


def _numbers(request: Request) -> list[int]:
    """The numbers of a request's answers."""
    return list(range(request.number, request.number + request.sampling.n))


def empty_result(plan: StepPlan) -> StepResult:
    """Return the result of a lost step: no token for any row."""
    tokens = plan.pool_rows.copy()
    tokens[:] = -1
    return StepResult(plan.step, tokens, 0.0)
