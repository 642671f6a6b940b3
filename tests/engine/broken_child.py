"""A scheduler process that gets ready and then meets a broken device."""

from tokenyard.engine.processes.child import run_child
from tokenyard.engine.processes.engine_config import ChildReport
from tokenyard.engine.scheduler_process.driver import DeviceBrokenError
from tokenyard.engine.scheduler_process.scheduler_loop import load_executor


def work(task, report):
    report(ChildReport(info=load_executor(task.config).info))
    raise DeviceBrokenError("the device is on fire")


if __name__ == "__main__":
    run_child("scheduler", work)
