"""The traffic on a tape: a workload to simulate, its recorded outcome, and the costs of device and host."""

import json
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from tokenyard.base import (
    NS_PER_S,
    Event,
    Finish,
    Int32Array,
    Request,
    Slo,
    StepPlan,
    StepResult,
    StepWork,
    Submit,
    TokenBatch,
    step_work,
)
from tokenyard.cost import LinearCost, OnlineCost, Profile, unloaded_prefill_s
from tokenyard.scheduler.request_observer import Counters
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.sim.engine.speculation import MarksOnTape, Speculation
from tokenyard.sim.simulate import FINISHED, REJECTED, UNFINISHED, Outcome, SchedulerRun, Setup
from tokenyard.sim.traces.conversations import Conversations
from tokenyard.sim.traces.read_options import REJECTED_REASONS
from tokenyard.sim.traces.workload import LENGTH_KNOWN, NO_PRIORITY, Workload, WorkloadBuilder
from tokenyard.tape.codec import Origin
from tokenyard.tape.replay import ReplayObserver

FIT_STEPS = 20_000
FIT_PASSES = 3
MAX_HOST_SHARE = 0.99
CLIENT_CANCELLED = ("cancelled", "client_gone", "slow_reader", "draining")
"""Causes of an end that came from outside: the client saw the answer until then."""


@dataclass(slots=True)
class RecordedRequest:
    """One answer on the tape: its request, its arrival (ns), its tokens so far, and its end if it has one."""

    request: Request
    arrival_ns: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer, as far as it came."""
        return len(self.tokens) if self.finish is None else self.finish.completion_tokens

    @property
    def complete(self) -> bool:
        """Whether the answer ended by itself, so that its length is known."""
        return self.finish is not None and self.finish.complete


class TapeHistory(ReplayObserver):
    """Observes a replay (`tape.replay.ReplayObserver`) and records what a simulation needs."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._answers: dict[int, RecordedRequest] = {}
        self._events: Counter[str] = Counter()
        self._steps: deque[tuple[StepWork, float]] = deque(maxlen=FIT_STEPS)
        self._host_ns: deque[int] = deque(maxlen=FIT_STEPS)
        self._marks = MarksOnTape()
        self._busy_s = 0.0
        self._end_ns = 0
        self._open = 0
        self._rested = True
        self._rows_before: Int32Array = np.zeros(0, np.int32)

    @override
    def applied(self, event: Event, now: int) -> None:
        if not isinstance(event, Submit):
            self._events[type(event).__name__] += 1
            return
        request = event.request
        self._rested = self._rested or self._open == 0
        self._open += request.sampling.n
        for number in range(request.number, request.number + request.sampling.n):
            self._answers[number] = RecordedRequest(request, request.arrival_ns or now)

    @override
    def committed(self, plan: StepPlan, result: StepResult, now: int) -> None:
        self._steps.append((step_work(plan), result.seconds))
        if not self._rested and self._waited_for_commit(plan):
            self._host_ns.append(now - self._end_ns - round(result.seconds * NS_PER_S))
        self._marks.committed(plan, result)
        self._busy_s += result.seconds
        self._end_ns, self._rested, self._rows_before = now, False, plan.pool_rows

    def _waited_for_commit(self, plan: StepPlan) -> bool:
        """Whether a plan was made only after the last step's commit: with overlap, if a row of both verifies drafts."""
        if self._origin.settings.max_in_flight == 1:
            return True
        verified = plan.pool_rows[plan.decode_rows : plan.chunks_from]
        return bool(np.isin(verified, self._rows_before).any())

    @override
    def on_output(self, batch: TokenBatch) -> None:
        for number, token in zip(batch.numbers.tolist(), batch.tokens.tolist(), strict=True):
            self._answers[number].tokens.append(token)
        for finish in batch.finished:
            if finish.number in self._answers:
                self._answers[finish.number].finish = finish
                self._open -= 1

    def workload(self, name: str) -> Workload:
        """The answers in order of arrival, each as a request.

        The length of those that did not end by themselves is drawn from the others. Raises ConfigError if there is
        none.
        """
        builder, conversations = WorkloadBuilder(name), Conversations()
        answers = self._in_order()
        for index, answer in enumerate(answers):
            request, tokens = answer.request, answer.output_tokens
            slo = request.slo or Slo()
            prompt = conversations.add(index, request.prompt_ids, np.array(answer.tokens[:tokens], np.int32))
            builder.add(
                f"{name}, request {request.number}",
                (answer.arrival_ns - answers[0].arrival_ns) / NS_PER_S,
                len(prompt),
                tokens,
                max_new_tokens=max(request.sampling.max_new_tokens, 1),
                ids=prompt,
                tenant=request.tenant,
                service_class=request.service_class or "",
                priority=request.priority,
                deadline_s=_seconds(request.deadline_ns),
                slo_ttft_s=_seconds(slo.ttft_ns),
                slo_tpot_s=_seconds(slo.tpot_ns),
                complete=answer.complete,
                adapter=request.lora,
            )
        return builder.build()

    def profile(self) -> Profile:
        """The device's costs, fitted to the steps on the tape, with the mean relative error of the fit."""
        info = self._origin.info
        prior = self._origin.prior or prior_cost_model(info)
        for _ in range(FIT_PASSES):
            # Each pass uses the terms of the pass before to decide whether a step is on the floor and what its error is
            # relative to.
            fit = OnlineCost(prior, forgetting=1.0)
            for work, seconds in self._steps:
                fit.learn(work, seconds)
            fit.refit()
            prior = LinearCost(fit.terms, prior.links)
        return Profile(
            device=info.device,
            model=info.model,
            terms=prior.terms,
            kv_pool_tokens=info.num_pages * info.page_size,
            kv_bytes_per_token=max(info.kv_bytes_per_token, 1),
            context_length=info.context_length,
            source="fitted to a tape",
            page_size=info.page_size,
            links=prior.links,
            error=fit.relative_error,
        )

    @property
    def speculation(self) -> Speculation | None:
        """Which drafts were right on the tape, None if nothing was drafted."""
        return self._marks.speculation()

    @property
    def host_s(self) -> float:
        """Mean time between two steps beyond the device's work: the host's share of a turn without overlap, 0 with
        overlap.

        Turns that began without a waiting request are left out, and the longest hundredth of the others (pauses).
        """
        if not self._host_ns:
            return 0.0
        turns = np.sort(np.array(self._host_ns))
        return max(float(turns[: max(int(MAX_HOST_SHARE * len(turns)), 1)].mean()), 0.0) / NS_PER_S

    def outcome(self, workload: Workload, setup: Setup, counters: Counters) -> Outcome:
        """The recorded outcome of `workload`, for the same numbers and charts as a simulated run."""
        answers, truth = self._in_order(), setup.profile.cost()
        finishes = [answer.finish or Finish(0, "abort") for answer in answers]
        begin_ns = answers[0].arrival_ns
        times = np.array([(one.admitted_ns, one.first_token_ns, one.finished_ns) for one in finishes], np.int64)
        times = np.where(times > 0, times - begin_ns, 0)
        return Outcome(
            workload=workload,
            setup=setup,
            status=np.array([_status(answer) for answer in answers], np.int32),
            admitted_ns=times[:, 0],
            first_token_ns=times[:, 1],
            finished_ns=times[:, 2],
            completion_tokens=_column([answer.output_tokens for answer in answers]),
            cached_tokens=_column([one.cached_tokens for one in finishes]),
            retractions=_column([one.retractions for one in finishes]),
            place=np.zeros(len(answers), np.int32),
            sent_ns=np.array([answer.arrival_ns - begin_ns for answer in answers], np.int64),
            unloaded_s=np.array([unloaded_prefill_s(truth, len(one.request.prompt_ids)) for one in answers]),
            counters=asdict(counters),
            sim_seconds=(self._end_ns - begin_ns) / NS_PER_S,
            schedulers=[SchedulerRun(self._busy_s, asdict(counters))],
        )

    def notes(self) -> list[str]:
        """What a simulation of this workload leaves out, one sentence each."""
        answers = self._in_order()
        gone = sum(one.finish is not None and one.finish.cause in CLIENT_CANCELLED for one in answers)
        disagg = sum(bool(one.request.cache_salt) for one in answers)
        changes = sum(self._events[name] for name in ("Update", "Pause", "SetPolicy"))
        found = (
            (gone, "answers were given up by their clients: on the tape they count as served if they had begun"),
            (self._never_served, "requests could never be served (invalid, too_long): these are left out"),
            (disagg, "answers had a cache salt: these are left out"),
            (changes, "changes of urgency or policy, or pauses, happened on the way: these are left out"),
        )
        return [f"{count} {what}" for count, what in found if count]

    @property
    def _never_served(self) -> int:
        return sum(_was_rejected(answer) for answer in self._answers.values())

    def _in_order(self) -> list[RecordedRequest]:
        usable = (one for one in self._answers.values() if len(one.request.prompt_ids) and not _was_rejected(one))
        return sorted(usable, key=lambda answer: answer.arrival_ns)


def _was_rejected(answer: RecordedRequest) -> bool:
    return answer.finish is not None and answer.finish.cause in REJECTED_REASONS


def _seconds(nanoseconds: int | None) -> float | None:
    return nanoseconds / NS_PER_S if nanoseconds else None


def _status(answer: RecordedRequest) -> int:
    """The status. A request that its client cancelled counts as served if it had any output."""
    if answer.finish is None:
        return UNFINISHED
    if answer.finish.cause in CLIENT_CANCELLED:
        return FINISHED if answer.tokens else UNFINISHED
    return REJECTED if answer.finish.reason == "abort" else FINISHED


def _column(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)


def write_trace(workload: Workload, path: Path) -> None:
    """Write a workload as a trace of format `tokenyard`, one request per line; unknown lengths stay unknown."""
    with path.open("w", encoding="utf-8") as file:
        for index in range(len(workload)):
            request = workload.request(index)
            slo = request.slo or Slo()
            line = {
                "arrival_s": float(workload.arrival_s[index]),
                "token_ids": request.prompt_ids.tolist(),
                **_length(workload, index),
                "max_new_tokens": request.sampling.max_new_tokens,
                "tenant": request.tenant,
                "class": request.service_class or "",
                "lora": request.lora,
                "priority": None if workload.priority[index] == NO_PRIORITY else int(workload.priority[index]),
                "deadline_s": _seconds(request.deadline_ns),
                "slo_ttft_s": _seconds(slo.ttft_ns),
                "slo_tpot_s": _seconds(slo.tpot_ns),
            }
            file.write(json.dumps({key: value for key, value in line.items() if value not in (None, "")}) + "\n")


def _length(workload: Workload, index: int) -> dict[str, Any]:
    """The fields for the length of an answer, or for what was seen of it."""
    seen = int(workload.seen_tokens[index])
    if seen == LENGTH_KNOWN:
        return {"output_tokens": int(workload.output_tokens[index])}
    return {"output_tokens": seen, "complete": False}
