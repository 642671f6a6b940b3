"""Where the time of a native step goes: phase by phase, compared with the limits of the machine.

Run from the repository root: `python -m benchmarks.native_step [--shape qwen] [--batches 1 8 32] [--prefill 512]`.
Builds the library once more with timers in it (the package's own has none), unless TOKENYARD_NATIVE_LIBRARY names one.
Random weights, fixed contexts over random slots, no scheduler and no sampling. Of all steps the fastest is shown, and
of each phase its fastest, as other work on the machine only ever adds time.

Attention at batch 32 and context 4,096: `--batches 32 --context 4096 --layers 4 --prefill`. The pool is first written
by one thread, as the engine's is; the read rate is of memory that each thread touched itself.

floor: the larger of reading the weights and keys once, at the read rate measured in the same run, and of multiplying at
the measured rate of the registers. With int8 weights both are twice as fast; of packed ones (q8, q4) only the reads of
their bytes count.
"""

import argparse
import ctypes
import json
import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.limits import product_rate, read_rate
from benchmarks.smollm2 import QWEN_SHAPE, SHAPE
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.native.build import build_library
from tokenyard.executor.native.library import LIBRARY_VARIABLE

SHAPES = {"smol": SHAPE, "qwen": QWEN_SHAPE}
PROFILE_FLAGS = ("-DTY_PROFILE",)
PHASES = (
    "embed",
    "prepare",
    "norm",
    "round",
    "shrink",
    "qkv",
    "place",
    "attend",
    "recur",
    "output",
    "gate_up",
    "down",
    "experts",
    "head",
)


def linears(shape: dict) -> dict[str, int]:
    """How many weights each phase reads in all layers."""
    hidden, inter, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    head = hidden // shape["num_attention_heads"]
    kv = 2 * shape["num_key_value_heads"] * head
    each = {
        "qkv": hidden * (hidden + kv),
        "output": hidden * hidden,
        "gate_up": 2 * hidden * inter,
        "down": hidden * inter,
    }
    return {name: layers * size for name, size in each.items()} | {"head": hidden * shape["vocab_size"]}


def floors(shape: dict, rows: int, logits: int, keys: int, options: argparse.Namespace) -> dict[str, float]:
    """Seconds that each phase takes at least. keys: how many keys are read, over all rows."""
    found = {}
    for name, weights in linears(shape).items():
        count = logits if name == "head" else rows
        faster = 2 if options.quantization == "int8" else 1
        size = {"q8": 34 / 32, "q4": 34 / 32 if name == "head" else 18 / 32}.get(options.quantization, 2 / faster)
        read_s = weights * size / options.read_rate
        products_s = (
            2 * weights * count / faster / options.product_rate if options.quantization in ("none", "int8") else 0
        )
        found[name] = max(read_s, products_s)
    head = shape["hidden_size"] // shape["num_attention_heads"]
    layers = shape["num_hidden_layers"]
    read_s = keys * layers * 4 * shape["num_key_value_heads"] * head / options.read_rate
    products = 4 * rows * keys * layers * shape["hidden_size"] / (2 if rows > 1 and logits < rows else rows)
    found["attend"] = max(read_s, products / options.product_rate)
    return found


def batch_of(executor, rows: int, start: int, count: int, rng: np.random.Generator) -> ForwardBatch:
    """Rows of `count` tokens after `start` others, on random slots."""
    pages = executor.pages
    slots = rng.permutation(executor.info.num_pages)[: rows * (start + count)].reshape(rows, -1) + 1
    pages.tensor[:rows, : start + count] = torch.from_numpy(slots).to(torch.int32)
    pool_rows = torch.arange(rows).repeat_interleave(count)
    positions = torch.arange(start, start + count).repeat(rows)
    return ForwardBatch(
        token_ids=torch.from_numpy(rng.integers(0, executor.info.vocab_size, rows * count)),
        positions=positions,
        slots=pages.slots(pool_rows, positions).long(),
        pool_rows=pool_rows,
        logit_tokens=torch.arange(1, rows + 1) * count - 1,
        starts=np.full(rows, start, dtype=np.int64),
        counts=np.full(rows, count, dtype=np.int64),
        decode_rows=rows if count == 1 else 0,
    )


def fastest(executor, batch: ForwardBatch, seconds: float) -> tuple[float, np.ndarray]:
    """The fastest step's time, and each phase's fastest."""
    model = executor.model
    profile = model._functions.ty_profile
    profile.argtypes = [ctypes.c_void_p]
    phases, best = np.empty(len(PHASES)), np.full(len(PHASES), np.inf)
    shortest, end_s = np.inf, time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end_s:
            profile(phases.ctypes.data)
            begin_s = time.perf_counter()
            model.step(batch)
            shortest = min(shortest, time.perf_counter() - begin_s)
            profile(phases.ctypes.data)
            best = np.minimum(best, phases)
    return shortest, best


def show(title: str, tokens: int, measured: tuple[float, np.ndarray], floor: dict[str, float]) -> dict:
    """Print one kind of step; returns what was printed."""
    step_s, phases = measured
    all_floors = sum(floor.values())
    print(f"{title}: {step_s * 1e3:.2f} ms, {tokens / step_s:.0f} tok/s, floor {all_floors * 1e3:.2f} ms", end="")
    print(f" ({all_floors / step_s:.0%} of what the machine allows)")
    for name, seconds in zip(PHASES, phases, strict=True):
        share = f" {floor[name] / seconds:4.0%} (floor {floor[name] * 1e3:.2f})" if floor.get(name) else ""
        print(f"    {name:8s} {seconds * 1e3:8.3f} ms{share}", flush=True)
    return {"step_ms": step_s * 1e3, "floor_ms": all_floors * 1e3}


def main() -> None:
    """Measure decodes of all batches, then one chunk of a prompt."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smol", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for contexts that fill the memory")
    parser.add_argument("--context", type=int, default=576, help="tokens that each decoding row has")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens of a first chunk")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of step")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "q8", "q4"])
    parser.add_argument("--deterministic", action="store_true", help="as with --enable-deterministic-inference")
    options = parser.parse_args()
    options.read_rate = read_rate(options.threads)
    options.product_rate = product_rate(options.threads, options.dtype) or math.inf
    print(f"read {options.read_rate / 1e9:.1f} GB/s, products {options.product_rate / 1e9:.0f} G operations/s")
    shape, rng = dict(SHAPES[options.shape]), np.random.default_rng(0)
    shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        if LIBRARY_VARIABLE not in os.environ:
            os.environ[LIBRARY_VARIABLE] = str(build_library(Path(folder), PROFILE_FLAGS))
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        executor = load(folder, options)
        for batch in options.batches:
            measured = fastest(executor, batch_of(executor, batch, options.context - 1, 1, rng), options.seconds)
            show(f"decode {batch}", batch, measured, floors(shape, batch, batch, batch * options.context, options))
        for tokens in options.prefill:
            measured = fastest(executor, batch_of(executor, 1, 0, tokens, rng), options.seconds)
            show(f"prefill {tokens}", tokens, measured, floors(shape, tokens, 1, tokens, options))


def load(folder: str, options: argparse.Namespace):
    """An executor with a pool for the largest batch."""
    from tokenyard.executor.model_loader import load_executor

    tokens = max([batch * options.context for batch in options.batches] + options.prefill)
    return load_executor(
        folder,
        device="cpu",
        dtype=options.dtype,
        load_format="dummy",
        max_total_tokens=tokens + 64,
        max_pool_rows=max([*options.batches, 1]),
        threads=options.threads,
        model_impl="native",
        quantization=options.quantization,
        deterministic=options.deterministic,
    )


if __name__ == "__main__":
    main()
