"""A scheduler process whose model takes longer to load than its watchdog waits."""

import time

from tokenyard.engine.processes import scheduler_loop, scheduler_process
from tokenyard.engine.processes.child import run_child
from tokenyard.engine.processes.scheduler_loop import SchedulerLoop
from tokenyard.engine.watch.liveness import BEAT_EVERY_S
from tokenyard.executor import mock

LOAD_S = 2.5


def load_executor(model_path, **options):
    """The mock executor, after a while."""
    time.sleep(LOAD_S)
    return mock.load_executor(model_path, **options)


class HeardBeforeItRuns(SchedulerLoop):
    """Lets a heartbeat go out before the first turn of the loop, which it otherwise may or may not."""

    def run(self):
        time.sleep(BEAT_EVERY_S)
        super().run()


if __name__ == "__main__":
    scheduler_loop.EXECUTORS["mock"] = "tests.engine.slow_to_load"
    scheduler_process.SchedulerLoop = HeardBeforeItRuns
    run_child("scheduler", scheduler_process.run_scheduler)
