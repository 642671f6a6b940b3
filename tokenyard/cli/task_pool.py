"""Runs jobs over one trace in this process, in worker processes, or on a Ray cluster."""

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rich.progress import Progress

from tokenyard.base import ConfigError
from tokenyard.sim.traces.workload import Workload

TaskArgs = TypeVar("TaskArgs")
TaskResult = TypeVar("TaskResult")

_workload: Workload | None = None
"""In a worker process: the trace."""


def add_ray_argument(group: argparse._ArgumentGroup) -> None:
    """The flag that selects a Ray cluster for the runs."""
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="do the runs on the cores of a Ray cluster, such as auto or 10.0.0.1:6379 (needs tokenyard[ray])",
    )


class Runner(Protocol):
    """Runs `do(workload, job)` in another process."""

    def submit(self, do: Callable[[Workload, Any], Any], job: Any) -> "Future[Any]":
        """Start a job."""

    def shutdown(self) -> None:
        """Cancel the jobs that have not started."""


class Processes:
    """Processes on this machine that hold the trace."""

    def __init__(self, workload: Workload, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool: Executor = ProcessPoolExecutor(jobs, context, _take, (workload,))

    def submit(self, do: Callable[[Workload, Any], Any], job: Any) -> "Future[Any]":
        """Start a job."""
        return self._pool.submit(_do, do, job)

    def shutdown(self) -> None:
        """Cancel the jobs that have not started."""
        self._pool.shutdown(cancel_futures=True)


class TaskPool:
    """Runs jobs and shows how many are complete. With one process and no cluster, they run in this process."""

    def __init__(self, workload: Workload, jobs: int, bar: Progress, ray: str | None = None) -> None:
        """Raises ConfigError if Ray is not installed, or there is no cluster at the address `ray`."""
        self._workload, self._bar = workload, bar
        self._runner: Runner | None = None
        if ray is not None:
            self._runner = _on_ray(ray, workload)
        elif jobs > 1:
            self._runner = Processes(workload, jobs)

    def __enter__(self) -> "TaskPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.shutdown()

    def each(
        self, what: str, do: Callable[[Workload, TaskArgs], TaskResult], jobs: Sequence[TaskArgs]
    ) -> list[TaskResult]:
        """Results in the order of the jobs. Raises the error of the first one that fails."""
        task = self._bar.add_task(what, total=len(jobs))
        answers: dict[int, TaskResult] = {}
        if self._runner is None:
            for place, job in enumerate(jobs):
                answers[place] = do(self._workload, job)
                self._bar.advance(task)
        else:
            futures = {self._runner.submit(do, job): place for place, job in enumerate(jobs)}
            for future in as_completed(futures):
                answers[futures[future]] = future.result()
                self._bar.advance(task)
        self._bar.remove_task(task)
        return [answers[place] for place in range(len(jobs))]


def _on_ray(address: str, workload: Workload) -> Runner:
    try:
        from tokenyard.on_ray.task_runner import RayRunner
    except ImportError:
        raise ConfigError("--ray needs the package ray; pip install 'tokenyard[ray]'") from None
    return RayRunner(address, workload)


def _take(workload: Workload) -> None:
    global _workload
    _workload = workload


def _do(do: Callable[[Workload, TaskArgs], TaskResult], job: TaskArgs) -> TaskResult:
    assert _workload is not None
    return do(_workload, job)
