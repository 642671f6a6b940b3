"""Commits the result of a step: advances lengths, appends tokens, inserts prompts into the tree, ends requests."""

import numpy as np

from tokenyard.base import BoolArray, Int32Array, StepPlan, StepResult, step_work
from tokenyard.scheduler.multi_step import append_earlier_steps
from tokenyard.scheduler.scheduler_state import DeduplicatedPages, SchedulerState


class Committer:
    """Applies step results to the state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def commit(self, plan: StepPlan, rows: Int32Array, result: StepResult, now: int) -> None:
        """Apply the `result` of `plan`, whose columns belong to table `rows` (int32[n]).

        Rows that were retracted or ended since then are skipped.
        """
        state = self._state
        state.memory.committed(plan.last_step)
        alive = state.table.epoch[rows] == plan.epochs
        if result.logprobs:
            state.outbox.add_logprobs(result.logprobs, state.table.number[rows], alive)
        for place, vector in result.vectors.items():
            if alive[place]:
                state.table.request_state(int(rows[place])).vector = vector
        if result.accepted is None:
            ended = self._commit_tokens(plan, rows, alive, result.tokens, now)
        else:
            ended = self._commit_runs(plan, rows, alive, result.tokens, result.accepted, now)
        if result.ended is not None:
            ended |= self._end_grammars(plan, rows, result.ended, now)
        if state.memory.windows is not None:
            alive = rows[state.table.epoch[rows] == plan.epochs]
            state.memory.advance(state.table.pool_row[alive], state.table.cached[alive], state.table.computed[alive])
        if result.drafted is not None:
            state.drafting = True
            alive = state.table.epoch[rows] == plan.epochs
            state.table.drafts[rows[alive]] = result.drafted[alive]
            if result.chances is not None:
                state.table.acceptance_rate[rows[alive]] = result.chances[alive]
        if ended:
            state.sweep()
        # The fitted terms do not include the time to copy adapters to the device.
        if state.cost is not None and state.cost.learns and not plan.adapter_loads:
            state.cost.learn(step_work(plan), result.seconds)

    def _commit_tokens(self, plan: StepPlan, rows: Int32Array, alive: BoolArray, tokens: Int32Array, now: int) -> bool:
        """Apply a result of at most one token a row; returns whether any row ended."""
        state = self._state
        counts, samples, decoding = plan.counts, plan.samples, plan.decode_rows
        if plan.num_steps > 1:
            tokens = tokens.reshape(plan.num_steps, -1)
        if not alive.all():
            decoding = int(np.count_nonzero(alive[:decoding]))
            rows, counts, samples, tokens = rows[alive], counts[alive], samples[alive], tokens[..., alive]
        if plan.num_steps > 1:
            append_earlier_steps(state, plan, rows, tokens[:-1])
            tokens = tokens[-1]
        state.table.computed[rows] += counts
        ended = False
        if decoding < len(rows):
            ended = self._commit_chunks(rows[decoding:], now)
            sampled = samples > 0
            rows, tokens = rows[sampled], tokens[sampled]
        return self._append_tokens(rows, tokens, now) or ended

    def _commit_runs(
        self, plan: StepPlan, rows: Int32Array, alive: BoolArray, tokens: Int32Array, accepted: Int32Array, now: int
    ) -> bool:
        """Apply a result of runs of tokens: row i yields `accepted[i]` of them. Returns whether any row ended.

        Each token of a run confirms the draft before it, so a row computes as many tokens as it yields. A stop token
        cuts a run.
        """
        table, epochs = self._state.table, plan.epochs
        verify, chunks = slice(plan.decode_rows, plan.chunks_from), slice(plan.chunks_from, None)
        chunk_rows = rows[chunks][alive[chunks]]
        table.computed[chunk_rows] += plan.counts[chunks][alive[chunks]]
        ended = self._commit_chunks(chunk_rows, now)
        self._count_drafts(plan, rows, alive, accepted)
        firsts = np.cumsum(accepted) - accepted
        decodes = np.arange(len(rows)) < plan.chunks_from
        for place in range(int(accepted.max(initial=0))):
            live = (accepted > place) & (table.epoch[rows] == epochs)
            if place:
                # The plan charged the first token of each row.
                self._state.charge_tokens(rows[live])
            table.computed[rows[live & decodes]] += 1
            ended |= self._append_tokens(rows[live], tokens[firsts[live] + place], now)
        verified = rows[verify][table.epoch[rows[verify]] == epochs[verify]]
        self._state.verified(verified)
        return ended

    def _count_drafts(self, plan: StepPlan, rows: Int32Array, alive: BoolArray, accepted: Int32Array) -> None:
        """Count the drafts that a step verified, in total and for each row that is still alive."""
        verify, table = slice(plan.decode_rows, plan.chunks_from), self._state.table
        self._state.observer.verified(plan.counts[verify], accepted[verify])
        own, live = rows[verify], alive[verify]
        table.verified_drafts[own[live]] += plan.counts[verify][live] - 1
        table.accepted_drafts[own[live]] += accepted[verify][live] - 1

    def _end_grammars(self, plan: StepPlan, rows: Int32Array, complete: BoolArray, now: int) -> bool:
        """End the rows whose grammar is complete; returns whether there was any."""
        done = rows[complete & (self._state.table.epoch[rows] == plan.epochs)]
        for row in done.tolist():
            self._state.end(row, "stop", now)
        return bool(len(done))

    def _commit_chunks(self, rows: Int32Array, now: int) -> bool:
        """Insert computed prompts into the tree; end rows with max_new_tokens 0. Returns whether any row ended."""
        state, table, ended = self._state, self._state.table, False
        for row in rows.tolist():
            self._cache_unfinished(row)
            if table.computed[row] < table.target[row]:
                continue
            state.memory.prompt_computed(int(table.pool_row[row]), int(table.computed[row]))
            state.open_group(row)
            if table.request(row).sampling.max_new_tokens == 0:
                state.end(row, "length", now)
                ended = True
                continue
            state.observer.decodes(row, now)
            if not table.first_token_ns[row]:
                table.first_token_ns[row] = now
        return ended

    def _cache_unfinished(self, row: int) -> None:
        state = self._state
        first = int(state.table.cached[row]) // state.memory.page_size
        pages = state.cache_unfinished(row)
        if len(pages):
            state.deduplicated.append(DeduplicatedPages(row, int(state.table.epoch[row]), first, pages))

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
        state.observer.counters.generated_tokens += len(rows)
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
