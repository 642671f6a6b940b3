"""CPU cost of a whole engine per token and process: 256 answers at once over the mock executor, 5 ms a step.

The API process here only reads the deltas; the HTTP server's own cost is in http_streaming.py. Prints also how long
a step took in wall time, next to the 5 ms of the mock device, and the CPU share of each process when idle.

Run: python benchmarks/engine_cpu.py
"""

import asyncio
import time
from pathlib import Path

import psutil

from tokenyard.base import SamplingParams, TextOptions
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.launch import running_engine

ROWS, TOKENS, STEP_MS, IDLE_S = 256, 200, 5.0, 3.0
DEMO_MODEL = Path(__file__).resolve().parents[1] / "tokenyard" / "demo_model"


def config():
    options = {"step_ms": STEP_MS, "max_total_tokens": 400_000, "page_size": 16, "check_kv": False}
    return EngineConfig(str(DEMO_MODEL), executor="mock", executor_options=options, log_level="warning")


def cpu_s():
    """CPU seconds so far by process."""
    me = psutil.Process()
    names = {me: "api", **{child: child.cmdline()[0].removeprefix("tokenyard: ") for child in me.children()}}
    return {name: sum(process.cpu_times()[:2]) for process, name in names.items()}


async def answer(manager, index, stream):
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    spec = GenerateReqInput(
        text=f"Story {index}", sampling=sampling, text_options=TextOptions(stream=stream), seed=index
    )
    async for _ in manager.generate(spec):
        pass


async def measure(manager, stream):
    before, begin = cpu_s(), time.perf_counter()
    await asyncio.gather(*(answer(manager, index, stream) for index in range(ROWS)))
    wall_s, after = time.perf_counter() - begin, cpu_s()
    costs = ", ".join(f"{name} {(after[name] - before[name]) / ROWS / TOKENS * 1e6:.1f}" for name in after)
    kind = "streaming" if stream else "not streaming"
    print(f"{kind}: {wall_s / TOKENS * 1000:.2f} ms a step; CPU us a token: {costs}")


async def main():
    async with running_engine(config()) as manager:
        await answer(manager, 0, True)
        await measure(manager, True)
        await measure(manager, False)
        before = cpu_s()
        await asyncio.sleep(IDLE_S)
        after = cpu_s()
        shares = ", ".join(f"{name} {(after[name] - before[name]) / IDLE_S:.2%}" for name in after)
        print(f"idle: CPU share: {shares}")


if __name__ == "__main__":
    asyncio.run(main())
