"""What drawing tokens costs a step: `python -m benchmarks.sampling`.

Random logits, rows with equal settings, by torch and by the native kernels of this machine, alternating in one run.
Prints the fastest of a few rounds in milliseconds for each vocabulary, number of rows and setting, and the ratio.
"""

import argparse
import time

import numpy as np
import torch

from tokenyard.base import RowStart, SamplingParams
from tokenyard.executor.native.library import load_library
from tokenyard.executor.native.runtime import NativeRuntime
from tokenyard.executor.native.sampling import NativeSamplingBackend
from tokenyard.executor.sampling.sampler import Sampler

VOCABULARIES = (49_152, 151_936)
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}


def samplers(engine: NativeRuntime, vocabulary: int, rows: int, setting: dict) -> dict[str, Sampler]:
    """One that draws by torch and one by the native kernels, with equal rows."""
    made = {}
    for name, sampling_backend in (("torch", None), ("native", NativeSamplingBackend(engine, vocabulary))):
        made[name] = Sampler(rows, vocabulary, (), torch.device("cpu"), sampling_backend)
        prompt = np.arange(3, dtype=np.int32)
        made[name].take([RowStart(row, SamplingParams(seed=row, **setting), prompt, 3) for row in range(rows)])
    return made


def fastest_ms(both: dict[str, Sampler], logits: torch.Tensor, rounds: int) -> dict[str, float]:
    """The fastest of the rounds, which take turns."""
    rows = np.arange(len(logits), dtype=np.int32)
    positions, best = np.full(len(logits), 5), dict.fromkeys(both, float("inf"))
    for _ in range(rounds):
        for name, sampler in both.items():
            own = logits.clone()
            begin_s = time.perf_counter()
            with torch.inference_mode():
                sampler.sample(own, rows, positions)
            best[name] = min(best[name], 1000 * (time.perf_counter() - begin_s))
    return best


def main() -> None:
    """Print a line for each vocabulary, number of rows and setting."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = NativeRuntime(load_library(), options.threads)
    print(f"{'vocabulary':>10} {'rows':>4}  {'setting':14} {'torch ms':>9} {'native ms':>9}  ratio")
    for vocabulary in VOCABULARIES:
        for rows in options.rows:
            logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
            for name, setting in SETTINGS.items():
                found = fastest_ms(samplers(engine, vocabulary, rows, setting), logits, options.rounds)
                ratio = found["torch"] / found["native"]
                line = f"{vocabulary:10} {rows:4}  {name:14} {found['torch']:9.2f} {found['native']:9.2f} {ratio:6.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
