"""What LoRA adapters cost a step: rows with adapters compared with rows without, alternating in one process.

Run from the repository root: `python -m benchmarks.lora [--shape qwen] [--batches 1 8 32] [--rank 16] [--adapters 8]`.
Random weights and adapters of all seven projections, fixed contexts over random slots, no scheduler and no sampling. Of
all steps of a kind the fastest is shown, as other work on the machine only ever adds time. The kinds of steps:

base: no row has an adapter.
one: all rows have the same adapter. many: rows have different ones, as many as there are. half: every second row has
none, the others have different ones. chunk: one row of 256 prompt tokens with an adapter; its base is `base chunk`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.native_step import SHAPES, batch_of
from tokenyard.base import RowStart, SamplingParams, StepPlan
from tokenyard.base.request import NO_TOKENS
from tokenyard.executor.lora_weights import LoraMatrices, LoraWeights, projection_shapes
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.runner import ModelExecutor

CHUNK = 256


def random_adapter(executor: ModelExecutor, rank: int, seed: int) -> LoraWeights:
    """An adapter of all projections."""
    generator, config = torch.Generator().manual_seed(seed), executor._adapters._config
    pairs = {}
    for layer in range(config.num_layers):
        for name, (inputs, outputs) in projection_shapes(config, layer).items():
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            pairs[layer, name] = LoraMatrices(a * 0.02, b * 0.02, 1.0)
    return LoraWeights(pairs)


def fill_slots(executor: ModelExecutor, rank: int, count: int) -> float:
    """Put `count` adapters into the slots; returns the seconds that the last one took."""
    for number in range(count):
        executor._adapters._host[f"a{number}"] = random_adapter(executor, rank, number)
        begin_s = time.perf_counter()
        executor._adapters._fill(number, f"a{number}")
    return time.perf_counter() - begin_s


def give(executor: ModelExecutor, slots: list[int]) -> None:
    """Let the rows from 0 on have their adapters in these slots."""
    executor._adapters.take(
        [
            RowStart(row, SamplingParams(), NO_TOKENS, 0, lora=f"a{slot - 1}" if slot else "", slot=slot)
            for row, slot in enumerate(slots)
        ]
    )


def plan_of(rows: int, count: int) -> StepPlan:
    """The part of a plan that adapters look at."""
    column = np.arange(rows, dtype=np.int32)
    counts, none = np.full(rows, count, np.int32), np.zeros(0, np.int32)
    return StepPlan(0, column, column, column, counts, column, none, none, none, none)


def cases(executor: ModelExecutor, rows: int, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Functions that run a step of each kind and return its seconds."""
    rng, model = np.random.default_rng(rows), executor.model

    def run(slots: list[int], count: int) -> Callable[[], float]:
        batch = batch_of(executor, len(slots), options.context if count == 1 else 0, count, rng)
        plan = plan_of(len(slots), count)

        def step() -> float:
            give(executor, slots)
            begin_s = time.perf_counter()
            executor._adapters.begin(plan)
            model.step(batch)
            return time.perf_counter() - begin_s

        return step

    different = [row % options.adapters + 1 for row in range(rows)]
    kinds = {
        "base": run([0] * rows, 1),
        "one": run([1] * rows, 1),
        "many": run(different, 1),
        "half": run([slot if row % 2 == 0 else 0 for row, slot in enumerate(different)], 1),
    }
    return kinds if rows > 1 else kinds | {"base chunk": run([0], CHUNK), "chunk": run([1], CHUNK)}


def measure(kinds: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The fastest step of each kind, in seconds, taken by turns."""
    best = dict.fromkeys(kinds, float("inf"))
    with torch.inference_mode():
        for _ in range(rounds):
            for name, step in kinds.items():
                best[name] = min(best[name], step())
    return best


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smol")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the model's own")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model-impl", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shape = dict(SHAPES[options.shape])
    shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        executor = load_executor(
            folder,
            device="cpu",
            dtype=options.dtype,
            load_format="dummy",
            threads=options.threads,
            model_impl=options.model_impl,
            max_pool_rows=max(options.batches),
            max_total_tokens=max(max(options.batches) * (options.context + 2), 2 * CHUNK),
            context_length=max(options.context + 2, CHUNK),
            quantization=options.quantization,
            lora_slots=options.adapters,
            lora_rank=options.rank,
        )
    load_s, info = fill_slots(executor, options.rank, options.adapters), executor.info
    print(f"{options.shape}, {info.dtype}, {info.kernels}; {options.adapters} adapters of rank {options.rank}")
    print(f"{info.adapter_bytes / 1e6:.1f} MB each; {1e3 * load_s:.1f} ms to bring one to its slot")
    for rows in options.batches:
        best = measure(cases(executor, rows, options), options.rounds)
        for name, seconds in best.items():
            base = best["base chunk" if "chunk" in name else "base"]
            print(f"batch {rows:3}  {name:10}  {1e3 * seconds:8.2f} ms  {seconds / base:5.2f} x base", flush=True)


if __name__ == "__main__":
    main()
