"""A naive scheduler for tests: it hands out rows and shuffled pages and makes plans, with no policy at all."""

import random
from dataclasses import dataclass, field

import numpy as np

from tokenyard.base import LAST_SAMPLED, LogprobOptions, RowLogprobs, RowStart, SamplingParams, StepPlan

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence:
    row: int
    known: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    options: LogprobOptions | None
    lora: str = ""
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    written: int = 0
    planned: int = 0
    in_flight: int = 0
    sent: bool = False
    logprobs: list[RowLogprobs] = field(default_factory=list)

    @property
    def total(self):
        return len(self.known) + self.in_flight

    @property
    def output(self):
        return self.known[self.prompt_tokens :]


class Driver:
    def __init__(self, executor, seed=0):
        self.executor = executor
        self.info = executor.info
        self.step_number = 0
        self.rows = list(range(self.info.max_pool_rows))
        self.pages = list(range(1, self.info.num_pages + 1))
        random.Random(seed).shuffle(self.rows)
        random.Random(seed + 1).shuffle(self.pages)

    def start(
        self, prompt, sampling=GREEDY, logprobs=None, *, known=None, shared_with=None, shared_tokens=0, adapter=("", 0)
    ):
        """Take a row; `known` continues an answer, `shared_tokens` (whole pages) come from another row's cache.

        `adapter`: name and slot.
        """
        sequence = Sequence(self.rows.pop(), list(known or prompt), len(prompt), sampling, logprobs, *adapter)
        if shared_with is not None:
            sequence.pages = shared_with.pages[: shared_tokens // self.info.page_size]
            sequence.planned = shared_tokens
        return sequence

    def retract(self, sequence):
        """Give a row and its pages back; returns what start() needs to take the request up again."""
        self.rows.append(sequence.row)
        self.pages += sequence.pages
        return {"prompt": sequence.known[: sequence.prompt_tokens], "known": sequence.known}

    def launch(self, *work, delay=False):
        """Launch a step over (sequence, count) pairs; count None means all that is left."""
        work = [(seq, count or seq.total - seq.planned) for seq, count in work]
        # Decode rows stand at the front.
        work.sort(key=lambda item: not (item[1] == 1 and item[0].planned == item[0].total - 1))
        plan = self.plan(work)
        plan.delay_sampling = delay
        return plan, [seq for seq, _ in work], self.executor.launch(plan)

    def collect(self, launched):
        plan, sequences, ticket = launched
        result = self.executor.collect(ticket)
        assert result.step == plan.step
        for sequence, token, sampled in zip(sequences, result.tokens.tolist(), plan.sampled.tolist(), strict=True):
            assert (token >= 0) == sampled
            if sampled:
                sequence.known.append(token)
                sequence.in_flight -= 1
        for entry in result.logprobs:
            sequences[entry.index].logprobs.append(entry)
        return result

    def step(self, *work):
        return self.collect(self.launch(*work))

    def prefill(self, sequence, chunk=None):
        end = sequence.total
        while sequence.planned < end:
            left = end - sequence.planned
            self.step((sequence, min(chunk or left, left)))

    def generate(self, sequence, tokens, chunk=None):
        """Prefill in chunks, decode until there are `tokens` of output; returns the output."""
        self.prefill(sequence, chunk)
        while len(sequence.output) < tokens:
            self.step((sequence, 1))
        return sequence.output

    def plan(self, work):
        self.step_number += 1
        columns = {"tokens": [], "pages": [], "starts": []}
        sampled, starts, decode_rows = [], [], 0
        for sequence, count in work:
            start, end = sequence.planned, sequence.planned + count
            decode_rows += count == 1 and end == sequence.total
            if not sequence.sent:
                known = np.array(sequence.known, dtype=np.int32)
                row = RowStart(sequence.row, sequence.sampling, known, sequence.prompt_tokens, sequence.options)
                row.lora, row.slot = sequence.lora, sequence.slot
                columns["starts"].append(row)
                sequence.sent = True
            columns["pages"] += self._grow(sequence, end)
            columns["tokens"] += [
                sequence.known[i] if i < len(sequence.known) else LAST_SAMPLED for i in range(start, end)
            ]
            starts.append(start)
            sampled.append(end == sequence.total)
            sequence.planned = end
            sequence.in_flight += end == sequence.total
        pages = np.array(columns["pages"], dtype=np.int32).reshape(-1, 3)
        return StepPlan(
            step=self.step_number,
            pool_rows=np.array([sequence.row for sequence, _ in work], dtype=np.int32),
            epochs=np.zeros(len(work), dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            counts=np.array([count for _, count in work], dtype=np.int32),
            samples=np.array(sampled, dtype=np.int32),
            tokens=np.array(columns["tokens"], dtype=np.int32),
            page_rows=pages[:, 0],
            page_columns=pages[:, 1],
            page_ids=pages[:, 2],
            row_starts=columns["starts"],
            decode_rows=decode_rows,
        )

    def _grow(self, sequence, tokens):
        """Page writes up to a number of tokens: all pages that were not yet written to the row."""
        while len(sequence.pages) * self.info.page_size < tokens:
            sequence.pages.append(self.pages.pop())
        columns = range(sequence.written, len(sequence.pages))
        sequence.written = len(sequence.pages)
        return [(sequence.row, column, sequence.pages[column]) for column in columns]
