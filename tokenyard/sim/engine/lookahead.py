"""Lookahead for policy `adaptive`: simulates the next seconds of a running scheduler under each candidate.

The simulation runs the scheduler itself over a cost model. It starts from a `LookaheadState` with a `forecast`, the
same for all candidates. Steps do not overlap in it, and policies start without what they have learned about lengths and
service. If running requests have drafts, all requests get drafts like theirs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Finish,
    SchedulerSettings,
    SetPolicy,
    Submit,
)
from tokenyard.cost import LinearCost
from tokenyard.policy.adaptive import CANDIDATES, CandidateScore, changed
from tokenyard.policy.speculation import ACCEPTANCE_RATE_UNIT
from tokenyard.scheduler.lookahead_state import LookaheadState
from tokenyard.scheduler.row_state import RowState
from tokenyard.scheduler.scheduler import Scheduler
from tokenyard.sim.engine.forecast import RecentTraffic, SampledFuture, forecast
from tokenyard.sim.engine.sim_scheduler import SimExecutor, SimScheduler
from tokenyard.sim.engine.speculation import SimDrafter, Speculation
from tokenyard.sim.traces.prompt_ids import EOS_TOKEN, VOCAB_SIZE

UNLIMITED = 1 << 30


def look_ahead(
    traffic: RecentTraffic, state: LookaheadState, candidates: Sequence[str], horizon_s: float, number: int
) -> list[CandidateScore]:
    """Score each candidate by the `horizon_s` seconds after `state`.

    Only the first candidate, which is in use, is scored if no other could be clearly better. Equal arguments give equal
    scores.
    """
    future = forecast(traffic, state, horizon_s, number)
    end_ns = state.now + round(horizon_s * NS_PER_S)
    scores: list[CandidateScore] = []
    for name in candidates:
        scores.append(CandidateRun(state, future, CANDIDATES[name]).score(name, end_ns))
        if not scores[0].beatable:
            break
    return scores


class CandidateRun:
    """One candidate in one future."""

    def __init__(self, state: LookaheadState, future: SampledFuture, event: SetPolicy) -> None:
        self._state, self._future = state, future
        self.finishes: dict[int, Finish] = {}
        cost = LinearCost(state.terms)
        info = replace(state.info, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN,))
        self.scheduler = Scheduler(_restore_settings(state.settings), info, cost)
        outputs = np.array(future.outputs, np.int32)
        drafter = make_drafter(state, len(outputs), info.max_pool_rows)
        self._executor = SimExecutor(info, cost, outputs, not state.settings.disable_radix_cache, drafter)
        self._restore_requests()
        self._change(event)

    def _restore_requests(self) -> None:
        """Fill the cache and restore the running requests, without virtual time."""
        scheduler, future, now = self.scheduler, self._future, self._state.now
        memory = scheduler.state.memory
        if memory.tree.enabled:
            for ids in future.cached:
                memory.insert_prefix(ids)
        for request in future.requests[: future.running]:
            scheduler.submit(Submit(request), now)
        while len(scheduler.state.waiting):
            plan = scheduler.plan(now)
            if plan is None:
                break
            _, result = self._executor.run(plan)
            scheduler.commit(result, now)
            if plan.decode_rows:
                break
        table = scheduler.state.table
        for row in scheduler.state.running.rows.tolist():
            number = int(table.number[row])
            # The row restarts here without output. Its first token is dated to when its next token is due, so that it
            # is as far ahead of its target pace as before.
            table.first_token_ns[row] = future.first_ns[number] + future.written[number] * future.tpot_ns[number]

    def _change(self, event: SetPolicy) -> None:
        """Continue under the candidate's settings, with the lengths of earlier answers in the headroom."""
        state, given = self.scheduler.state, self._state
        state.settings = replace(given.settings, max_in_flight=1)
        state.set_policy(changed(state.settings, event), given.now)
        headroom = state.policy.headroom
        for tokens in self._future.answers.tolist():
            headroom.finished(tokens)
        if given.new_token_ratio and headroom.ratio:
            headroom.ratio = given.new_token_ratio

    def score(self, name: str, end_ns: int) -> CandidateScore:
        """Run to `end_ns` and return the score."""
        future, now = self._future, self._state.now
        replica = SimScheduler(self.scheduler, self._executor, self._note, depth=1)
        replica.now = now
        first_to_come = future.running + future.waiting
        for request in future.requests[future.running : first_to_come]:
            replica.submit(request, now)
        for request in future.requests[first_to_come:]:
            replica.advance(request.arrival_ns, to_arrival=True)
            replica.submit(request, request.arrival_ns)
        replica.advance(end_ns)
        return replace(self._score_requests(name, end_ns), steps=replica.steps)

    def _note(self, finish: Finish) -> None:
        self.finishes[finish.number] = finish

    def _score_requests(self, name: str, end_ns: int) -> CandidateScore:
        """Score the requests.

        Requests that missed their targets before the lookahead are left out, and so are those with time left for a
        first token.
        """
        future, met, judged, ttft_ns, waits = self._future, 0, 0, 0, 0
        for number, request in enumerate(future.requests):
            begin_ns, due_ns = future.first_ns[number], future.due_ns[number]
            if begin_ns > due_ns or (not begin_ns and due_ns < self._state.now):
                continue
            first_ns, last_ns, tokens = self._progress(number, end_ns)
            if not begin_ns:
                ttft_ns += (first_ns or end_ns) - request.arrival_ns
                waits += 1
            if not first_ns and tokens >= 0 and due_ns >= end_ns:
                continue
            judged += 1
            in_pace = last_ns - first_ns <= future.tpot_ns[number] * max(tokens - 1, 1)
            met += 0 < first_ns <= due_ns and in_pace
        return CandidateScore(
            name, met / judged if judged else 1.0, ttft_ns / NS_PER_S / waits if waits else 0.0, judged
        )

    def _progress(self, number: int, end_ns: int) -> tuple[int, int, int]:
        """When the first token came (0: not yet), when the last one did, and how many there are (-1: refused)."""
        future, table = self._future, self.scheduler.state.table
        first_ns, written = future.first_ns[number], future.written[number]
        finish = self.finishes.get(number)
        if finish is not None:
            if finish.reason == "abort":
                return 0, finish.finished_ns, -1
            return first_ns or finish.first_token_ns, finish.finished_ns, written + finish.completion_tokens
        row = table.row_of(number)
        if row is None:
            return 0, end_ns, -1
        tokens = written + int(table.known[row] - table.prompt_tokens[row])
        # Its next token is late only after one more time per token.
        return first_ns or int(table.first_token_ns[row]), end_ns, tokens + 1


def make_drafter(state: LookaheadState, requests: int, pool_rows: int) -> SimDrafter | None:
    """The drafter for `requests` requests, modelled on the running rows of `state`; None if no row has drafts.

    The coverage is the share of running rows with drafts. A draft is right with their mean chance.
    """
    rows = state.rows
    drafts, running = rows["drafts"], rows["state"] == RowState.RUNNING
    ready = running & (drafts > 0)
    if not ready.any():
        return None
    chance = float(rows["acceptance_rate"][ready].mean()) / ACCEPTANCE_RATE_UNIT
    coverage = float(np.count_nonzero(ready) / np.count_nonzero(running))
    speculation = Speculation(int(drafts[ready].max()), (chance, chance), coverage)
    return SimDrafter(speculation, speculation.marks(requests, 0), pool_rows)


def _restore_settings(settings: SchedulerSettings) -> SchedulerSettings:
    """Settings that admit all running requests in one step."""
    return replace(
        settings,
        schedule_policy="fcfs",
        policy_options={},
        chunked_prefill_size=-1,
        max_prefill_tokens=UNLIMITED,
        prefill_max_requests=-1,
        # The lookahead has no KV store.
        enable_hierarchical_cache=False,
        max_queued_requests=-1,
        prefill_decode_interval=0,
        enable_mixed_chunk=False,
        enable_dynamic_chunking=False,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
        enable_service_levels=False,
        max_overtaken_tokens=-1,
        step_budget="tokens",
        headroom="none",
        enable_kv_events=False,
        max_in_flight=1,
    )
