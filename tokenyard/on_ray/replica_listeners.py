"""Listeners in this process for changes of a deployment's replicas.

This is a separate module because Ray copies the module of a request router wherever it sends the class, and a copy
would have its own list.
"""

from collections.abc import Callable

ReplicaListener = Callable[[list[str]], None]

replica_listeners: list[ReplicaListener] = []
"""Called with the addresses of all running replicas at each update from Serve."""


def replicas_changed(urls: list[str]) -> None:
    """Notify all listeners."""
    for listener in replica_listeners:
        listener([url for url in urls if url])
