"""What each request is promised: when its first token is due and how fast the others must follow."""

import numpy as np

from tokenyard.base import Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.views import Columns, tokens_generated

NS_PER_MS = 1_000_000


def tpot_ns(columns: Columns, rows: Int32Array, settings: SchedulerSettings) -> Int64Array:
    """Target time per output token of each row, int64[len(rows)] in ns: its own, or else the class's."""
    own = columns.tpot_ns[rows]
    targets: Int64Array = np.where(own > 0, own, round(settings.slo_tpot_ms * NS_PER_MS))
    return targets


def ahead_ns(columns: Columns, rows: Int32Array, settings: SchedulerSettings, now: int) -> Int64Array:
    """How long after `now` each decoding row's next token may come with its mean time per token in target, int64[n].

    The token after `g` tokens is due at first token + g * target; below 0 for rows that are late already. A row whose
    first token is still in flight counts as due now.
    """
    first = columns.first_token_ns[rows]
    written = np.maximum(tokens_generated(columns, rows), 0)
    due = first + written * tpot_ns(columns, rows, settings)
    slack: Int64Array = np.where(first > 0, due - now, 0)
    return slack
