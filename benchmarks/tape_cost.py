"""What a tape costs: CPU time and bytes per decode step while it is written, and how fast it replays.

The workload is that of decode_step.py, whose figures are the step without a tape. The file is a real one.

Run: python benchmarks/tape_cost.py
"""

import gc
import statistics
import tempfile
import time
from pathlib import Path

from decode_step import answer, running_scheduler

from tokenyard.base import Submit
from tokenyard.engine.scheduler_process.build_scheduler import TapeFile
from tokenyard.tape.anonymizer import Anonymizer
from tokenyard.tape.codec import Origin, Tape, TapeEncoder
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay

STEPS, VOCAB_SIZE, KEY = 400, 128256, b"benchmark"


def write(rows, path):
    """Median microseconds of thread CPU time per step, and bytes per step."""
    scheduler, file, encoder = running_scheduler(rows, 1), TapeFile(path), TapeEncoder(Anonymizer(VOCAB_SIZE, KEY))
    micros = []
    gc.disable()
    for step in range(STEPS):
        plan = scheduler.plan(step + 2)
        result = answer(plan)
        begin = time.thread_time_ns()
        file.write(encoder.planned(step, plan))
        file.write(encoder.committed(step, result))
        micros.append((time.thread_time_ns() - begin) / 1000)
        scheduler.commit(result, step + 2)
        scheduler.drain()
    gc.enable()
    file.close()
    return statistics.median(micros), statistics.fmean(micros), path.stat().st_size / STEPS


def replayed_steps_per_s(rows, path):
    """How many steps a second a replay takes in."""
    live = running_scheduler(rows, 1)
    file = TapeFile(path)
    recorder = RecordingScheduler(Origin(live.state.settings, live.state.info), file, KEY, "benchmark")
    for row in live.state.running.rows.tolist():
        recorder.apply(Submit(live.state.table.request(row)), 1)
    for step in range(STEPS):
        recorder.commit(answer(recorder.plan(step + 2)), step + 2)
        recorder.drain()
    file.close()
    tape = Tape(path.read_bytes(), "tape")
    begin = time.perf_counter()
    report = replay(tape)
    assert report.difference is None
    return report.plans / (time.perf_counter() - begin)


def main():
    print("rows  us CPU a step: median  mean   bytes a step  replayed steps/s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tape"
        for rows in (32, 256, 1024):
            median, mean, size = write(rows, path)
            print(f"{rows:4}  {median:22.1f}  {mean:4.1f}  {size:13.0f}  {replayed_steps_per_s(rows, path):16.0f}")


if __name__ == "__main__":
    main()
