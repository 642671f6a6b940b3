"""Takes in what a step did: lengths advance, tokens are appended, prompts go to the tree, finished requests end."""

import numpy as np

from tokenyard.base import Int32Array, StepPlan, StepResult, step_work
from tokenyard.scheduler.multi_step import append_but_last
from tokenyard.scheduler.planner import Planner
from tokenyard.scheduler.state import SchedulerState


class Committer:
    """Applies step results to the state; tells the planner of pages that the tree deduplicated."""

    def __init__(self, state: SchedulerState, planner: Planner) -> None:
        self._state = state
        self._planner = planner

    def commit(self, plan: StepPlan, rows: Int32Array, result: StepResult, now: int) -> None:
        """Apply `result` of `plan`, whose columns stand for table `rows` (int32[n]). Rows that lost their pages or
        their place since then are skipped.
        """
        state = self._state
        counts, sampled, tokens, decoding = plan.counts, plan.sampled, result.tokens, plan.decode_rows
        state.memory.committed(plan.last_step)
        alive = state.table.epoch[rows] == plan.epochs
        if result.logprobs:
            state.outbox.tell_logprobs(result.logprobs, state.table.number[rows], alive)
        if plan.num_steps > 1:
            by_step = tokens.reshape(plan.num_steps, -1)
            append_but_last(state, plan, rows[alive], by_step[:-1, alive])
            tokens = by_step[-1]
        if not alive.all():
            decoding = int(np.count_nonzero(alive[:decoding]))
            rows, counts, sampled, tokens = rows[alive], counts[alive], sampled[alive], tokens[alive]
        state.table.computed[rows] += counts
        ended = False
        if decoding < len(rows):
            ended = self._commit_chunks(rows[decoding:], now)
            rows, tokens = rows[sampled], tokens[sampled]
        ended |= self._append_tokens(rows, tokens, now)
        if ended:
            state.sweep()
        if state.cost is not None and state.cost.learns:
            state.cost.learn(step_work(plan), result.seconds)

    def _commit_chunks(self, rows: Int32Array, now: int) -> bool:
        """Give what prefill computed to the tree; end rows that wanted no token. Returns whether any row ended."""
        state, table, ended = self._state, self._state.table, False
        for row in rows.tolist():
            self._publish(row)
            if table.computed[row] < table.target[row]:
                continue
            state.open_group(row)
            if table.request(row).sampling.max_new_tokens == 0:
                state.end(row, "length", now)
                ended = True
                continue
            table.request_state(row).clock.enter("decode", now)
            if not table.first_token_ns[row]:
                table.first_token_ns[row] = now
        return ended

    def _publish(self, row: int) -> None:
        memory, table = self._state.memory, self._state.table
        request_state = table.request_state(row)
        first = int(table.cached[row]) // memory.page_size
        request_state.node, cached, deduplicated = memory.publish(
            int(table.pool_row[row]),
            request_state.node,
            int(table.cached[row]),
            int(table.computed[row]),
            request_state.request.priority or 0,
            int(table.last_step[row]),
        )
        table.cached[row] = cached
        if len(deduplicated):
            self._planner.deduplicated(row, first, deduplicated)

    def _append_tokens(self, rows: Int32Array, tokens: Int32Array, now: int) -> bool:
        """Append one sampled token to each row and end those that stop. Returns whether any row ended."""
        state, table = self._state, self._state.table
        if not len(rows):
            return False
        known, pool_rows = table.known[rows], table.pool_row[rows]
        state.memory.pool.token_ids[pool_rows, known] = tokens
        known += 1
        table.known[rows] = known
        state.outbox.tokens(table.number[rows], tokens, table.hit[rows])
        state.counters.generated_tokens += len(rows)
        stopped = state.stop_tokens.hit(pool_rows, tokens)
        done = stopped | (known > table.limit[rows])
        if not done.any():
            return False
        for index in np.flatnonzero(done).tolist():
            if stopped[index]:
                state.end(int(rows[index]), "stop", now, matched=int(tokens[index]))
            else:
                state.end(int(rows[index]), "length", now)
        return True
