"""What the executor does on a CUDA device: is it right, how near to the bandwidth floor, does overlap hide the host.

Run from the repository root: `python -m benchmarks.gpu [--output result.json]`. It takes a few minutes and needs no
checkpoint; weights are random. Without a CUDA device it says so and ends well.

The floor of a decode step is the time to read all weights and the KV of all rows once, at the bandwidth of a large
copy measured in the same run. The device's idle share is one minus the kernels' time (profiler) over the wall time of
a step.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_plans import EqualRows
from tokenyard.executor.load import load_executor, read_folder_config
from tokenyard.executor.models.config import ModelConfig
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.weights import DummyWeights

SHAPES = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
}
BATCHES = (1, 16, 64, 256)
CONTEXT_TOKENS = 1024

SMALL = {
    "vocab_size": 512,
    "hidden_size": 120,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 40}
EXACT_CASES = {
    "llama": {"architectures": ["LlamaForCausalLM"], **HEADS},
    "mistral, window 24": {"architectures": ["MistralForCausalLM"], "sliding_window": 24, **HEADS},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
    },
    "qwen3, tied": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, **HEADS},
}


class RecordedWeights(DummyWeights):
    """Random weights that can be saved, so that two devices get the same."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor and keep it."""
        self.tensors[name] = super().get(name, shape)
        return self.tensors[name]


def write_model(folder: Path, config: dict, *, with_weights: bool) -> Path:
    """Write a model folder with random weights, or with its config alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if with_weights:
        weights = RecordedWeights()
        Decoder(read_folder_config(folder), weights, torch.device("cpu"), context_length=1)
        save_file(weights.tensors, folder / "model.safetensors")
    return folder


def greedy_tokens(folder: Path, device: str, page_size: int) -> list[list[int]]:
    """Prefill five rows one by one and decode all of them 24 steps, greedily, in float32."""
    executor = load_executor(
        str(folder), device=device, dtype="float32", page_size=page_size, max_total_tokens=2048, max_pool_rows=8
    )
    rows = EqualRows(executor.info, 5, 128)
    prompts = np.random.default_rng(1).integers(0, executor.info.vocab_size, (5, 77))
    answers = [run(executor, rows.prefill(row, prompt)) for row, prompt in enumerate(prompts)]
    tokens = [np.concatenate(answers)] + [run(executor, rows.decode()) for _ in range(24)]
    executor.close()
    return np.stack(tokens, axis=1).tolist()


def run(executor: ModelExecutor, plan) -> np.ndarray:
    """One step from launch to tokens."""
    return executor.collect(executor.launch(plan)).tokens


def check_exactness(scratch: Path, device: str) -> dict[str, bool]:
    """Whether greedy tokens in float32 are those of the CPU, which the tests hold to transformers."""
    same = {}
    for number, (name, fields) in enumerate(EXACT_CASES.items()):
        folder = write_model(scratch / f"exact{number}", {**SMALL, **fields}, with_weights=True)
        for page_size in (1, 16):
            same[f"{name}, page {page_size}"] = greedy_tokens(folder, device, page_size) == greedy_tokens(
                folder, "cpu", page_size
            )
    return same


def copy_bandwidth(device: torch.device, num_bytes: int = 4 << 30) -> float:
    """Bytes a second that a large copy reads and writes, best of five."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * num_bytes / best_s


def weight_bytes_read(config: ModelConfig, bytes_per_value: int) -> int:
    """Bytes of weights that a decode step reads: all products and the head; of the embedding only some rows."""
    hidden, head_dim = config.hidden_size, config.head_dim
    attention = hidden * head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return (config.num_layers * layer + config.vocab_size * hidden) * bytes_per_value


def wall_per_step(executor: ModelExecutor, rows: EqualRows, steps: int, in_flight: int) -> float:
    """Seconds per decode step with so many plans in flight."""
    flying: deque = deque()
    begin_s = time.perf_counter()
    for _ in range(steps):
        flying.append(executor.launch(rows.decode()))
        if len(flying) >= in_flight:
            executor.collect(flying.popleft())
    while flying:
        executor.collect(flying.popleft())
    return (time.perf_counter() - begin_s) / steps


def kernels_per_step(executor: ModelExecutor, rows: EqualRows, steps: int) -> float:
    """Seconds per decode step that kernels run on the device."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall_per_step(executor, rows, steps, in_flight=2)
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / steps


def measure_decode(executor: ModelExecutor, batch: int, floor_s: float, steps: int) -> dict[str, float]:
    """Time decode steps of `batch` rows at CONTEXT_TOKENS of context."""
    rows = EqualRows(executor.info, batch, CONTEXT_TOKENS + 4 * steps + 8)
    run(executor, rows.pretend(CONTEXT_TOKENS))
    wall_per_step(executor, rows, 5, in_flight=1)
    alone_s = wall_per_step(executor, rows, steps, in_flight=1)
    overlapped_s = wall_per_step(executor, rows, steps, in_flight=2)
    kernels_s = kernels_per_step(executor, rows, 5)
    return {
        "step_ms": alone_s * 1e3,
        "step_overlapped_ms": overlapped_s * 1e3,
        "kernels_ms": kernels_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "floor_share": floor_s / overlapped_s,
        "idle_share": max(0.0, 1.0 - kernels_s / alone_s),
        "idle_share_overlapped": max(0.0, 1.0 - kernels_s / overlapped_s),
        "tokens_per_s": batch / overlapped_s,
    }


def measure_shape(folder: Path, device: str, bandwidth: float, steps: int) -> dict[str, dict[str, float]]:
    """Decode figures of one model shape in bfloat16, by batch; batches whose KV does not fit are left out."""
    per_row = CONTEXT_TOKENS + 4 * steps + 8
    config = read_folder_config(folder)
    weights = weight_bytes_read(config, 2)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    room_tokens = int((free_bytes * 0.8 - weights) // (2 * config.kv_values_per_token))
    batches = [batch for batch in BATCHES if batch * per_row <= room_tokens]
    if not batches:
        return {}
    executor = load_executor(
        str(folder),
        device=device,
        dtype="bfloat16",
        load_format="dummy",
        max_total_tokens=max(batches) * per_row,
        max_pool_rows=max(batches),
    )
    found = {}
    for batch in batches:
        kv_bytes = batch * CONTEXT_TOKENS * executor.info.kv_bytes_per_token
        found[str(batch)] = measure_decode(executor, batch, (weights + kv_bytes) / bandwidth, steps)
    executor.close()
    return found


def report(results: dict) -> None:
    """Print the results as text."""
    print(f"{results['device']}, torch {results['torch']}, copy {results['bandwidth_gb_s']:.0f} GB/s")
    for name, same in results["exact"].items():
        print(f"float32 greedy as on the CPU: {name}: {'yes' if same else 'NO'}")
    for shape, batches in results["decode"].items():
        for batch, row in batches.items():
            print(
                f"{shape} batch {batch}: {row['step_ms']:.2f} ms, overlapped {row['step_overlapped_ms']:.2f} ms"
                f" ({row['floor_share']:.0%} of the bandwidth floor), kernels {row['kernels_ms']:.2f} ms,"
                f" idle {row['idle_share']:.0%}, overlapped {row['idle_share_overlapped']:.0%}"
            )


def main() -> int:
    """Run everything; returns 1 if the device computes other tokens than the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file too")
    parser.add_argument("--steps", type=int, default=30, help="decode steps per figure")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here, nothing to measure")
        return 0
    device = "cuda:0"
    bandwidth = copy_bandwidth(torch.device(device))
    torch.cuda.empty_cache()
    results: dict = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "bandwidth_gb_s": bandwidth / 1e9,
        "context_tokens": CONTEXT_TOKENS,
        "decode": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        results["exact"] = check_exactness(Path(scratch), device)
        for number, (shape, config) in enumerate(SHAPES.items()):
            folder = write_model(Path(scratch) / f"shape{number}", config, with_weights=False)
            results["decode"][shape] = measure_shape(folder, device, bandwidth, options.steps)
    report(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))
    return 0 if all(results["exact"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
