"""A scheduler process whose model takes longer to load than its watchdog waits."""

import time

from tokenyard.engine.processes.child import run_child
from tokenyard.engine.scheduler_process import process as scheduler_process
from tokenyard.engine.scheduler_process import scheduler_loop
from tokenyard.engine.scheduler_process.health.liveness import HEARTBEAT_INTERVAL_S
from tokenyard.engine.scheduler_process.scheduler_loop import SchedulerLoop
from tokenyard.executor import mock

LOAD_S = 2.5


def load_executor(model_path, **options):
    """The mock executor, after a while."""
    time.sleep(LOAD_S)
    return mock.load_executor(model_path, **options)


class HeardBeforeItRuns(SchedulerLoop):
    """Lets a heartbeat go out before the first turn of the loop, which it otherwise may or may not."""

    def run(self):
        time.sleep(HEARTBEAT_INTERVAL_S)
        super().run()


if __name__ == "__main__":
    scheduler_loop.EXECUTORS["mock"] = "tests.engine.slow_to_load"
    scheduler_process.SchedulerLoop = HeardBeforeItRuns
    run_child("scheduler", scheduler_process.run_scheduler)
