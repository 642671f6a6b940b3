"""The states a request goes through and the gates that hold it back.

    WAITING -> (LOADING ->) PREFILL -> RUNNING -> gone
       ^           |           |          |
       +-----------+-----------+----------+   retracted, preempted or paused: back in the queue in order of arrival

A LOADING row has a pool row and pages, but no plan contains it: its KV is being loaded from the KV store or another
engine. If it is retracted before the load has ended, it may not start again until the load ends (`Gate.LOAD_OPEN`).

An ended request has no state: its table row is freed immediately, and `memory.Release` keeps the pages that the last
plan in flight still reads.
"""


class RowState:
    """The state of a row, as plain numbers: numpy compares several times slower with members of an enum."""

    FREE = 0
    WAITING = 1
    PREFILL = 2
    RUNNING = 3
    LOADING = 4


class Gate:
    """Why a waiting row may not start yet, as bits; a row with any of them is not a candidate."""

    GROUP = 1
    """Its group's first answer has not yet computed the common prompt."""
    PAUSED = 2
    """It is paused."""
    GRAMMAR = 4
    """Its grammar is being compiled."""
    ADAPTER = 8
    """Its LoRA adapter is being loaded."""
    KV = 16
    """It is not known yet whether its KV can be loaded, or another row loads the same KV."""
    LOAD_OPEN = 32
    """It was retracted while its KV was being loaded, and the load, which still writes to its pages, has not ended. A
    second load would have the same number as the first."""


HELD_BY = {
    Gate.PAUSED: "paused",
    Gate.ADAPTER: "adapter",
    Gate.GRAMMAR: "grammar",
    Gate.KV: "kv",
    Gate.LOAD_OPEN: "load",
    Gate.GROUP: "group",
}
"""The name of each gate. Where several hold a row back, the first of them is named."""
