"""How fast the library multiplies packed weights, by number of rows: what bounds decodes of a batch and prefill.

Run from the repository root: `python -m benchmarks.packed_products [--kinds Q4_0 Q4_K Q6_K Q8_0] [--rows 1 8 32]`. A
matrix of `--size` x `--size`, which fits the last-level cache, of random weights, inputs in bfloat16, one thread,
processor time, the median of `--rounds`. Prints 10^9 products of a weight and an input a second. AVX2's `vpmaddubsw`
by itself makes 32 of them an instruction, twice a clock.
"""

import argparse
import ctypes
import statistics
import time

import numpy as np
import torch

from benchmarks.formats import rows_of
from tokenyard.executor.formats.weight_format import FORMATS
from tokenyard.executor.native.library import load_library
from tokenyard.executor.native.runtime import DTYPES, NativeRuntime, address, int32s

PRODUCTS_OF_ROUND = 200_000_000


def rate(runtime: NativeRuntime, kind: str, size: int, rows: int, rounds: int) -> float:
    """10^9 products a second of float rows with a matrix of a format."""
    functions, dtype = runtime.functions, torch.bfloat16
    weights = rows_of(kind, size, size, np.random.default_rng(0))
    formats, outputs = int32s((FORMATS[kind].number,)), (ctypes.c_int64 * 1)(size)
    linear = functions.ty_linear_new(runtime.pool, runtime.level, DTYPES[dtype], size, False, 1, formats, outputs)
    functions.ty_linear_set(linear, 0, weights.ctypes.data, None)
    x, y = torch.randn(rows, size).to(runtime.active_dtype(dtype)), torch.empty(rows, size)
    times = max(1, PRODUCTS_OF_ROUND // (rows * size * size))
    taken_s = []
    for _ in range(rounds + 1):
        begin_s = time.process_time()
        for _ in range(times):
            functions.ty_linear_run(linear, address(x), rows, address(y))
        taken_s.append((time.process_time() - begin_s) / times)
    functions.ty_linear_free(linear)
    return rows * size * size / statistics.median(taken_s[1:]) / 1e9


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 96])
    parser.add_argument("--size", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    runtime = NativeRuntime(load_library(), 1)
    for kind in args.kinds:
        rates = {rows: rate(runtime, kind, args.size, rows, args.rounds) for rows in args.rows}
        print(f"{kind:5}", *(f"{rows} rows {found:.1f}" for rows, found in rates.items()), sep="   ", flush=True)


if __name__ == "__main__":
    main()
