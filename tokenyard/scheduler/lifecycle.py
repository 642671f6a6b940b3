"""The states a request goes through and the gates that hold it back.

    WAITING -> (LOADING ->) PREFILL -> RUNNING -> gone
       ^           |           |          |
       +-----------+-----------+----------+   retracted, preempted or paused: back in line at its old place

A LOADING row has a place and pages, but no plan contains it: its KV is on the way from a store or another engine.

There is no state for a request that has left: its table row is free at once, and `memory.Release` keeps what the last
plan in flight still reads.
"""


class State:
    """Where a row stands. Plain numbers, as numpy takes several times longer to compare with members of an enum."""

    FREE = 0
    WAITING = 1
    PREFILL = 2
    RUNNING = 3
    LOADING = 4


class Gate:
    """Why a waiting row may not start yet, as bits; a row with any of them is no candidate."""

    GROUP = 1
    """Its group's first answer has not put the common prompt into the tree yet."""
    PAUSED = 2
    """Someone paused it."""
    GRAMMAR = 4
    """Its grammar is being compiled."""
    ADAPTER = 8
    """Its LoRA adapter is being loaded."""
    KV = 16
    """Where its KV is has not been said yet, or another row loads the same."""
