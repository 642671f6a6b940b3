"""Takes in what a step did: lengths advance, tokens are appended, prompts go to the tree, finished requests end."""

import numpy as np

from tokenyard.base import Int32Array, StepPlan, StepResult, step_work
from tokenyard.scheduler.planner import Planner
from tokenyard.scheduler.repeats import append_but_last
from tokenyard.scheduler.roster import Roster


class Committer:
    """Applies step results to the roster; tells the planner of pages that the tree swapped."""

    def __init__(self, roster: Roster, planner: Planner) -> None:
        self._roster = roster
        self._planner = planner

    def commit(self, plan: StepPlan, rows: Int32Array, result: StepResult, now: int) -> None:
        """Apply `result` of `plan`, whose columns stand for table `rows` (int32[n]). Rows that lost their pages or
        their place since then are skipped.
        """
        roster = self._roster
        counts, sampled, tokens, decoding = plan.counts, plan.sampled, result.tokens, plan.decode_rows
        roster.memory.committed(plan.last_step)
        alive = roster.table.epoch[rows] == plan.epochs
        if result.logprobs:
            roster.outbox.tell_logprobs(result.logprobs, roster.table.number[rows], alive)
        if plan.repeats > 1:
            by_step = tokens.reshape(plan.repeats, -1)
            append_but_last(roster, plan, rows[alive], by_step[:-1, alive])
            tokens = by_step[-1]
        if not alive.all():
            decoding = int(np.count_nonzero(alive[:decoding]))
            rows, counts, sampled, tokens = rows[alive], counts[alive], sampled[alive], tokens[alive]
        roster.table.computed[rows] += counts
        ended = False
        if decoding < len(rows):
            ended = self._commit_chunks(rows[decoding:], now)
            rows, tokens = rows[sampled], tokens[sampled]
        ended |= self._append_tokens(rows, tokens, now)
        if ended:
            roster.sweep()
        if roster.cost is not None and roster.cost.learns:
            roster.cost.learn(step_work(plan), result.seconds)

    def _commit_chunks(self, rows: Int32Array, now: int) -> bool:
        """Give what prefill computed to the tree; end rows that wanted no token. Returns whether any row ended."""
        roster, table, ended = self._roster, self._roster.table, False
        for row in rows.tolist():
            self._publish(row)
            if table.computed[row] < table.target[row]:
                continue
            roster.open_group(row)
            if table.request(row).sampling.max_new_tokens == 0:
                roster.end(row, "length", now)
                ended = True
                continue
            table.cold(row).clock.enter("decode", now)
            if not table.first_token_ns[row]:
                table.first_token_ns[row] = now
        return ended

    def _publish(self, row: int) -> None:
        memory, table = self._roster.memory, self._roster.table
        cold = table.cold(row)
        first = int(table.cached[row]) // memory.page_size
        cold.node, cached, swapped = memory.publish(
            int(table.pool_row[row]),
            cold.node,
            int(table.cached[row]),
            int(table.computed[row]),
            cold.request.priority or 0,
            int(table.last_step[row]),
        )
        table.cached[row] = cached
        if len(swapped):
            self._planner.swapped(row, first, swapped)

    def _append_tokens(self, rows: Int32Array, tokens: Int32Array, now: int) -> bool:
        """Append one sampled token to each row and end those that stop. Returns whether any row ended."""
        roster, table = self._roster, self._roster.table
        if not len(rows):
            return False
        known, pool_rows = table.known[rows], table.pool_row[rows]
        roster.memory.pool.token_ids[pool_rows, known] = tokens
        known += 1
        table.known[rows] = known
        roster.outbox.tokens(table.number[rows], tokens, table.hit[rows])
        roster.counters.generated_tokens += len(rows)
        stopped = roster.stop_tokens.hit(pool_rows, tokens)
        done = stopped | (known > table.limit[rows])
        if not done.any():
            return False
        for index in np.flatnonzero(done).tolist():
            if stopped[index]:
                roster.end(int(rows[index]), "stop", now, matched=int(tokens[index]))
            else:
                roster.end(int(rows[index]), "length", now)
        return True
