"""Log lines about steps, with the fields of SGLang's lines in their order."""

import logging
import time
from collections.abc import Callable

import numpy as np

from tokenyard.base import StepPlan, StepResult
from tokenyard.scheduler.snapshot import Snapshot

logger = logging.getLogger(__name__)


class StepLog:
    """One line for each step with prefill, and one every `decode_interval` steps of decoding alone; 0 for none."""

    def __init__(self, decode_interval: int = 40) -> None:
        self._decode_interval = decode_interval
        self._decode_steps = 0
        self._generated = 0
        self._prefill_since = self._decode_since = time.monotonic()

    def launched(self, plan: StepPlan, snapshot: Callable[[], Snapshot]) -> None:
        """Write about a step that has just begun; `snapshot` gives the scheduler's state."""
        if plan.decode_rows == len(plan.pool_rows):
            self._decode_steps += 1
            if self._decode_interval and self._decode_steps % self._decode_interval == 0:
                self._decode_line(snapshot())
        elif self._decode_interval and logger.isEnabledFor(logging.INFO):
            self._prefill_line(plan, snapshot())

    def committed(self, result: StepResult) -> None:
        """Count the tokens of a step that has ended."""
        self._generated += int(np.count_nonzero(result.tokens >= 0))

    def _prefill_line(self, plan: StepPlan, state: Snapshot) -> None:
        now = time.monotonic()
        new_rows = [start.pool_row for start in plan.row_starts]
        chunks = slice(plan.decode_rows, None)
        new_tokens = int(plan.counts[chunks].sum())
        cached = int(plan.starts[chunks][np.isin(plan.pool_rows[chunks], new_rows)].sum())
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d, cuda graph: False, input throughput (token/s): %.2f",
            len(new_rows),
            new_tokens,
            cached,
            state.used_tokens / max(1, state.total_tokens),
            state.running,
            state.waiting,
            new_tokens / max(1e-9, now - self._prefill_since),
        )
        self._prefill_since = now

    def _decode_line(self, state: Snapshot) -> None:
        now = time.monotonic()
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: False, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            state.running,
            state.used_tokens,
            state.used_tokens / max(1, state.total_tokens),
            self._generated / max(1e-9, now - self._decode_since),
            state.waiting,
        )
        self._generated, self._decode_since = 0, now
