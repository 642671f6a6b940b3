"""Simulations on a Ray cluster: the trace goes to each node once, and each run is a task on one of its cores.

Ray sends Python objects as pickles between its processes: anyone who can reach a cluster can run code on it. Every node
needs the same version of this package, and the files of a custom policy.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray

from tokenyard.base import ConfigError
from tokenyard.base.version import __version__
from tokenyard.sim.traces.workload import Workload


class RayRunner:
    """A cluster that holds a trace. A run whose node dies is retried on another one."""

    def __init__(self, address: str, workload: Workload) -> None:
        """`address` is one of `ray.init`, such as "auto". Raises ConfigError if no cluster answers there."""
        try:
            ray.init(address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(f"--ray {address}: {str(error).splitlines()[0]}") from None
        self._workload = ray.put(workload)

    def submit(self, do: Callable[[Workload, Any], Any], job: Any) -> "Future[Any]":
        """Run `do(workload, job)` on the cluster. `do` is a function of this package."""
        answer: Future[Any] = Future()
        _run.remote(self._workload, do, job, __version__).future().add_done_callback(lambda done: _settle(answer, done))
        return answer

    def shutdown(self) -> None:
        """Disconnect from the cluster; unfinished runs are abandoned."""
        ray.shutdown()


@ray.remote(num_cpus=1, max_retries=3)  # type: ignore[untyped-decorator]
def _run(workload: Workload, do: Callable[[Workload, Any], Any], job: Any, version: str) -> Any:
    if version != __version__:
        raise ConfigError(f"a node of the cluster has version {__version__} of tokenyard, and not {version}")
    return do(workload, job)


def _settle(answer: "Future[Any]", done: "Future[Any]") -> None:
    """Copy the result of `done` to `answer`, or the exception that the task raised."""
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(getattr(error, "cause", None) or error)
