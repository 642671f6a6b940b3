"""Code of a user's own that must be ended together with its process, and a scheduler process that soon does so."""

import os

from tokenyard.base import NS_PER_S
from tokenyard.engine.processes.child import run_child
from tokenyard.engine.scheduler_process.health import watchdog
from tokenyard.engine.scheduler_process.process import run_scheduler
from tokenyard.policy import Policy


def never_ends():
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


class Swallows(Policy):
    """Ignores the request to stop."""

    def order(self, views):
        never_ends()


class Measures(Policy):
    """Hangs where it is asked for what it measures, once it has ordered a queue."""

    ordered = False

    def order(self, views):
        self.ordered = True
        return super().order(views)

    def measures(self, rows):
        if self.ordered:
            never_ends()
        return {}


class Exits(Policy):
    """Takes its process with it."""

    def order(self, views):
        os._exit(3)


def swallows(view, system):
    """A priority function that ignores the request to stop."""
    never_ends()


if __name__ == "__main__":
    watchdog.USER_CODE_TIMEOUT_NS = NS_PER_S
    run_child("scheduler", run_scheduler)
