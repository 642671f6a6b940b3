"""A scheduler process with an attachment that raises or stalls in the middle of an answer, once."""

import time
from pathlib import Path

from tokenyard.engine.processes.child import run_child
from tokenyard.engine.scheduler_process import process as scheduler_process
from tokenyard.engine.scheduler_process import scheduler_loop
from tokenyard.engine.scheduler_process.attachments.base import Attachment

TOKENS_BEFORE = 20


class Broken(Attachment):
    """`order` is "raises" or "stalls", and the file that says that it has done so."""

    name = "broken"

    def __init__(self, order):
        self.deed, path = order.split(":")
        self.done = Path(path)
        self.tokens = 0

    def on_output(self, batch):
        self.tokens += len(batch.tokens)
        if self.tokens < TOKENS_BEFORE or self.done.exists():
            return
        self.done.touch()
        if self.deed == "stalls":
            time.sleep(600)
        raise RuntimeError("out of luck")


if __name__ == "__main__":
    scheduler_loop.create_priority_updates = lambda order, core: Broken(order)
    run_child("scheduler", scheduler_process.run_scheduler)
