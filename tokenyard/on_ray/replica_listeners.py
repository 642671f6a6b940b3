"""What is told of the replicas of a deployment in this process.

It is a module of its own, as Ray copies the module of a request router wherever it sends the class.
"""

from collections.abc import Callable

ReplicaListener = Callable[[list[str]], None]

replica_listeners: list[ReplicaListener] = []
"""Called with the addresses of all replicas that run, at each change and now and then."""


def replicas_changed(urls: list[str]) -> None:
    """Tell all watchers."""
    for watcher in replica_listeners:
        watcher([url for url in urls if url])
