"""CPU cost of one decode step in the core: plan, columns, commit and the output message, all rows streaming.

The workload of the SGLang 0.5.7 figures it is compared with (660 us at 256 rows: update of the running batch, worker
batch, result processing and stream output, pickling): 60 decode steps, prompts of 512 tokens of which 256 are one of
eight system prompts, page size 1, no stop strings, no waiting requests. Prints thread CPU time per step.

Run: python benchmarks/decode_step.py
"""

import gc
import statistics
import time

import numpy as np

from tokenyard.base import ExecutorInfo, Request, SamplingParams, SchedulerSettings, StepResult, Submit, TextOptions
from tokenyard.engine.processes.ipc import FROM_SCHEDULER
from tokenyard.scheduler import Scheduler

STEPS = 60
SGLANG_US = {32: 124, 256: 660}
TARGET_US = {256: 130, 4096: 400}


def prompt(index):
    system = np.random.default_rng(10_000_000 + index % 8).integers(1000, 128000, 256)
    own = np.random.default_rng(70_000_000 + index).integers(1000, 128000, 256)
    return np.concatenate((system, own)).astype(np.int32)


def running_scheduler(rows, depth):
    """A scheduler whose `rows` requests have all been prefilled."""
    settings = SchedulerSettings(
        max_running_requests=rows,
        context_length=4096,
        chunked_prefill_size=-1,
        max_prefill_tokens=10**9,
        schedule_conservativeness=0.01,
        max_in_flight=depth,
    )
    info = ExecutorInfo("bench", "none", "none", 128256, 4096, (1, 2), 1, rows * 1024 + 4096, rows + 2)
    scheduler = Scheduler(settings, info)
    for index in range(rows):
        sampling = SamplingParams(max_new_tokens=2000, temperature=0.0)
        request = Request(index + 1, f"r{index}", prompt(index), sampling, TextOptions(stream=True))
        scheduler.apply(Submit(request), 1)
    while (plan := scheduler.plan(1)).decode_rows == 0:
        scheduler.commit(answer(plan), 1)
    scheduler.commit(answer(plan), 1)
    scheduler.drain()
    return scheduler


def answer(plan):
    tokens = np.full(len(plan.pool_rows), 77, np.int32)
    tokens[~plan.sampled] = -1
    return StepResult(plan.step, tokens, 0.01)


def measure(rows, depth):
    """Median microseconds of thread CPU time per part of a step."""
    scheduler = running_scheduler(rows, depth)
    parts = {"plan": [], "commit": [], "message": []}
    flying = [scheduler.plan(2) for _ in range(depth - 1)]
    gc.disable()
    for step in range(STEPS):
        t0 = time.thread_time_ns()
        flying.append(scheduler.plan(step + 2))
        t1 = time.thread_time_ns()
        result = answer(flying.pop(0))
        t2 = time.thread_time_ns()
        scheduler.commit(result, step + 2)
        t3 = time.thread_time_ns()
        FROM_SCHEDULER.encode(scheduler.drain())
        t4 = time.thread_time_ns()
        for name, value in (("plan", t1 - t0), ("commit", t3 - t2), ("message", t4 - t3)):
            parts[name].append(value / 1000)
    gc.enable()
    return {name: statistics.median(values) for name, values in parts.items()}


def main():
    print("rows  depth   plan  commit  message    sum   target  SGLang 0.5.7   (us CPU, medians)")
    for rows in (32, 256, 1024, 4096):
        for depth in (1, 2):
            parts = measure(rows, depth)
            total = sum(parts.values())
            target, sglang = TARGET_US.get(rows, ""), SGLANG_US.get(rows, "")
            print(
                f"{rows:4}  {depth:5}  {parts['plan']:5.1f}  {parts['commit']:6.1f}  {parts['message']:7.1f}"
                f"  {total:5.1f}  {target!s:>7}  {sglang!s:>12}"
            )


if __name__ == "__main__":
    main()
