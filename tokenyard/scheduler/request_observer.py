"""Observability: timings of stages, history, priority inversion and counters.

The state reports what happens to each request; no plan depends on what is kept here.
"""

from dataclasses import dataclass

import numpy as np

from tokenyard.base import Explanation, Finish, Int32Array, RequestTimings, RetractReason, Stage
from tokenyard.policy import Policy
from tokenyard.scheduler.priority_inversion import PriorityInversion
from tokenyard.scheduler.request_history import AdmissionRecord, RequestHistory
from tokenyard.scheduler.request_table import RequestTable


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    steps, prefill_steps, decode_steps: plans; a step with both kinds of rows counts as both.
    submitted, rejected, finished, aborted: answers.
    retracted, preempted: retractions for lack of pages, and for more urgent requests.
    prompt_tokens: tokens of submitted prompts.
    hit_tokens: prompt tokens found in the tree at first admission.
    prefill_tokens: tokens computed in chunks.
    recomputed_tokens: tokens computed again after a retraction.
    generated_tokens: tokens sampled and kept.
    verify_rows: rows that verified drafts, counted in each step.
    draft_tokens, accepted_draft_tokens: drafts verified, and those of them that were right.
    adapter_loads: LoRA adapters loaded into slots.
    evicted_sessions: idle sessions that lost KV of their latest prompt before their next turn.
    """

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    submitted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    verify_rows: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adapter_loads: int = 0
    evicted_sessions: int = 0


class RequestObserver:
    """Called for every move of a request; keeps its timings (in ns), the history and the counters."""

    def __init__(self, table: RequestTable) -> None:
        self.counters = Counters()
        self._table = table
        self._history = RequestHistory()
        self._inversion = PriorityInversion()
        self._policy: Policy | None = None
        self._priorities_count = False

    def policy_changed(self, policy: Policy, priorities_count: bool, rows: list[int], now: int) -> None:
        """`policy` orders the queue from `now` on; `rows` are all rows. Without priorities all have one level."""
        self._policy, self._priorities_count = policy, priorities_count
        for row in rows:
            self._timings(row).inverted_ns += self._inversion.removed(row, now)
            self.moved(row, now)

    def submitted(self, prompt_tokens: int, answers: int) -> None:
        """A request for `answers` answers has arrived."""
        self.counters.submitted += answers
        self.counters.prompt_tokens += prompt_tokens * answers

    def joined(self, row: int, waiting: int, admitted: int, now: int) -> None:
        """`row` joins the queue, in which `waiting` rows wait, while `admitted` rows are admitted."""
        timings = self._timings(row)
        timings.waiting_ahead, timings.admitted_ahead = waiting, admitted
        self.moved(row, now)

    def loads(self, row: int, now: int) -> None:
        """The KV of `row` is being loaded."""
        self._table.request_state(row).clock.enter("loading", now)

    def prefills(self, row: int, now: int) -> None:
        """`row` computes its prompt, or recomputes after a retraction."""
        again = self._table.first_token_ns[row] and self._table.retractions[row]
        stage: Stage = "recompute" if again else "prefill"
        self._table.request_state(row).clock.enter(stage, now)

    def decodes(self, row: int, now: int) -> None:
        """The first token of `row` is sampled, or its first one after a retraction."""
        self._table.request_state(row).clock.enter("decode", now)

    def evicted_before(self, row: int, tokens: int, evicted_ns: int, pool_short_tokens: int) -> None:
        """When `row` starts, `tokens` of its session's prompt before are gone, see `RequestTimings`."""
        timings = self._timings(row)
        timings.evicted_tokens, timings.evicted_ns = tokens, evicted_ns
        timings.pool_short_tokens = pool_short_tokens

    def admitted(self, row: int, hit: int, now: int) -> None:
        """`row` was admitted with `hit` tokens from the tree."""
        table, timings = self._table, self._timings(row)
        self.moved(row, now)
        tokens = int(table.target[row]) - hit
        if table.admitted_ns[row]:
            self.counters.recomputed_tokens += tokens
            timings.recomputed_tokens += tokens
            return
        self._name_policy(timings)
        self.counters.hit_tokens += min(hit, int(table.prompt_tokens[row]))
        self._history.started(AdmissionRecord(now, int(table.seq[row]), int(table.number[row]), tokens))

    def chunk_planned(self, row: int) -> None:
        """A chunk of the prompt of `row` is planned."""
        self._timings(row).prefill_chunks += 1

    def verified(self, counts: Int32Array, accepted: Int32Array) -> None:
        """Rows verified drafts: each computed `counts` tokens and yields `accepted` of them; both int32[n]."""
        counters = self.counters
        counters.verify_rows += len(counts)
        counters.draft_tokens += int(counts.sum()) - len(counts)
        counters.accepted_draft_tokens += int(accepted.sum()) - len(accepted)

    def retracted(self, row: int, why: RetractReason, now: int) -> None:
        """`row` was retracted."""
        self._table.request_state(row).clock.enter("requeued", now)
        self.moved(row, now)
        timings = self._timings(row)
        if why == "preempted":
            self.counters.preempted += 1
            timings.preemptions += 1
        elif why == "out of pages":
            self.counters.retracted += 1
            timings.page_shortages += 1
        else:
            timings.pauses += 1

    def held(self, row: int, held: bool, now: int) -> None:
        """A pause holds `row` back from now on, or ends."""
        self._table.request_state(row).clock.hold(held, now)
        self.moved(row, now)

    def ends(self, row: int, now: int) -> RequestTimings:
        """`row` ends now; returns its timings."""
        self._timings(row).inverted_ns += self._inversion.removed(row, now)
        return self._table.request_state(row).clock.read(now)

    def ended(self, row: int, finish: Finish) -> None:
        """`row` has ended with `finish`."""
        self._history.ended(int(self._table.seq[row]), finish)
        if finish.reason == "abort":
            self.counters.aborted += 1
        else:
            self.counters.finished += 1

    def moved(self, row: int, now: int) -> None:
        """Update priority inversion after a move of `row`: the time it waited while a less urgent one had a place."""
        if not self._priorities_count or self._policy is None:
            return
        clock = self._table.request_state(row).clock
        if clock.stage == "paused":
            inverted_ns = self._inversion.removed(row, now)
        else:
            verb = self._inversion.enqueued if clock.stage in ("queue", "requeued") else self._inversion.admitted
            level = int(self._policy.urgency.levels(self._table, np.array([row], np.int32))[0])
            inverted_ns = verb(row, level, now)
        clock.timings.inverted_ns += inverted_ns

    def explain(self, number: int, now: int) -> Explanation | None:
        """Where the time of a request went until `now`, or until it ended; None if the request is unknown or its entry
        was dropped.
        """
        row, end = self._table.row_of(number), self._history.end_of(number)
        if row is not None:
            return self._explain_open(row, now)
        return None if end is None else self._history.explain(end)

    def _explain_open(self, row: int, now: int) -> Explanation:
        table, clock = self._table, self._table.request_state(row).clock
        admitted_ns = int(table.admitted_ns[row])
        earlier, later, complete = self._history.admissions_between(
            int(table.seq[row]), int(table.arrival_ns[row]), admitted_ns or now
        )
        self.moved(row, now)
        timings = clock.read(now)
        if not admitted_ns:
            self._name_policy(timings)
        return Explanation(
            number=int(table.number[row]),
            stage=clock.stage,
            timings=timings,
            prompt_tokens=int(table.prompt_tokens[row]),
            cached_tokens=int(table.hit[row]),
            completion_tokens=int(table.known[row] - table.prompt_tokens[row]),
            earlier=earlier,
            later=later,
            complete=complete,
            evicted_for=self._history.admitted_at(timings.evicted_ns),
        )

    def _name_policy(self, timings: RequestTimings) -> None:
        assert self._policy is not None
        timings.policy, timings.overtaking = self._policy.describe(), self._policy.overtaking

    def _timings(self, row: int) -> RequestTimings:
        return self._table.request_state(row).clock.timings
