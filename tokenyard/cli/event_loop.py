"""The event loop of servers."""

from typing import Any


def loop_factory() -> Any:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
