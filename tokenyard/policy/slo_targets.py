"""The targets of each request: when its first token is due, and how much time each later token may take."""

import numpy as np

from tokenyard.base import NS_PER_MS, NS_PER_S, CostModel, Int32Array, Int64Array, SchedulerSettings, SloTargets
from tokenyard.cost import unloaded_prefill_s
from tokenyard.policy.views import NO_DEADLINE, Columns, tokens_generated


def class_ttft_ns(settings: SchedulerSettings, unloaded_ns: int) -> int:
    """Target time to first token in ns of a request without its own, whose prefill takes `unloaded_ns` on an idle
    engine.
    """
    return max(round(settings.slo_ttft_ms * NS_PER_MS), round(settings.slo_ttft_scale * unloaded_ns))


def slo_targets(columns: Columns, row: int, settings: SchedulerSettings, cost: CostModel | None) -> SloTargets:
    """The targets of the request in `row`. Without a cost model, the class's ttft is `slo_ttft_ms` for any prompt."""
    own, deadline = int(columns.ttft_ns[row]), int(columns.deadline_ns[row])
    due = deadline - int(columns.arrival_ns[row]) if deadline != NO_DEADLINE else 0
    if own <= 0 and not due:
        prompt = int(columns.prompt_tokens[row])
        own = class_ttft_ns(settings, 0 if cost is None else round(unloaded_prefill_s(cost, prompt) * NS_PER_S))
    return SloTargets(own, int(columns.tpot_ns[row]) or round(settings.slo_tpot_ms * NS_PER_MS), due)


def tpot_ns(columns: Columns, rows: Int32Array, settings: SchedulerSettings) -> Int64Array:
    """Target time per output token of each row, int64[len(rows)] in ns: its own, or else the class's."""
    own = columns.tpot_ns[rows]
    targets: Int64Array = np.where(own > 0, own, round(settings.slo_tpot_ms * NS_PER_MS))
    return targets


def tpot_slack_ns(columns: Columns, rows: Int32Array, settings: SchedulerSettings, now: int) -> Int64Array:
    """How long after `now` each decoding row's next token may come to keep its mean time per token, int64[n] in ns.

    The token after `g` tokens is due at first token + g * target; below 0 for rows that are late already. A row whose
    first token is still in flight counts as due now.
    """
    return ahead_of_ns(columns, rows, tpot_ns(columns, rows, settings), now)


def ahead_of_ns(columns: Columns, rows: Int32Array, targets_ns: Int64Array, now: int) -> Int64Array:
    """`tpot_slack_ns` for other targets per token than the rows' own, int64[n] in ns."""
    first = columns.first_token_ns[rows]
    written = np.maximum(tokens_generated(columns, rows), 0)
    due = first + written * targets_ns
    slack: Int64Array = np.where(first > 0, due - now, 0)
    return slack
