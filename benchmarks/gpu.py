"""What the executor does on a CUDA device: is it right, how near to the device's limits, does overlap hide the host.

Run from the repository root: `python -m benchmarks.gpu [--steps 30] [--profiles FOLDER] [--shapes NAME] [--limit-s S]`.
It takes some minutes and needs no checkpoint; weights are random. Each result is one line of JSON, printed as soon as
it is there, with the seconds since the start. A part that fails, for want of a package for instance, says so in its
line, and the others go on. Parts that would begin after `--limit-s` are left out and say so. Ends with 1 if a part
failed or the device computes other tokens than the CPU. Without a CUDA device it says so and ends well; `--rehearse`
then runs all parts on the CPU with tiny shapes, where only failures mean something.

All parts need torch, triton, numpy, safetensors, tokenizers and jinja2; profile and comparison need msgspec, pyzmq,
setproctitle and rich too, and the comparison transformers.

The floor of a decode step is a sum over its products and attention: of each the time of its bytes, at the bandwidth of
a large copy measured in the same run, or that of its operations, at the rate of a large product, whichever is longer.
The pages of a step are written as a server writes them. The floor of a prefill is the time of its products, attention's
among them, at the rate of a large product. The device's idle share is one minus the time it works (profiler) over the
wall time of a step. Each figure with a target is printed next to it. The same requests go to transformers' continuous
batching too, and a cost profile of each shape is written, for `simulate --profile` and `serve --cost-profile`.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_choices import measure_choices
from benchmarks.step_plans import GREEDY, EqualRows
from tests.executor.driver import Driver
from tokenyard.base import SamplingParams
from tokenyard.cost.calibration import CalibrationRunner, measure_all, points
from tokenyard.cost.profiles import save_profile
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor
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
        # Twice its own, so that a context of 8k can grow.
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    },
}
FLOOR_TARGETS = {"Qwen3-0.6B": {1: 0.45, 32: 0.65}, "Llama-3-8B": {1: 0.80, 32: 0.80, 256: 0.65}}
"""Shares of its floor that a decode step should reach, by shape and batch size."""
PREFILL_TARGET = 0.70
"""Share of the measured rate of products that a prefill should reach."""
IDLE_TARGET = 0.02
"""Share of a step that the device should at most be idle, with two plans in flight."""
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
EXACT_STEPS = 24
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured, and where."""

    device: torch.device
    shapes: dict[str, dict]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk_tokens: int
    copy_bytes: int
    product_size: int
    steps: int
    peer: tuple[int, int, int]
    """Requests, prompt tokens and new tokens of the comparison with transformers."""
    calibration_s: float
    profiles: Path

    def tokens_per_row(self, context: int) -> int:
        """Most tokens that a row reaches if it starts with `context`."""
        return context + 4 * self.steps + 8

    @property
    def on_gpu(self) -> bool:
        """False in a rehearsal."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def full_scale(steps: int, profiles: Path) -> Scale:
    """What a run on a GPU measures."""
    device = torch.device("cuda:0")
    return Scale(
        *(device, SHAPES, (1, 32, 256), (1024, 8192), 4096, 4 << 30, 8192, steps),
        *((64, 512, 128), 45.0, profiles),
    )


def rehearsal(profiles: Path) -> Scale:
    """The same parts in less than a minute on a CPU."""
    shapes = {"tiny": {"architectures": ["LlamaForCausalLM"], **SMALL, **HEADS, "max_position_embeddings": 2048}}
    return Scale(*(torch.device("cpu"), shapes, (1, 4), (64, 200), 128, 1 << 24, 256, 3), *((2, 16, 4), 5.0, profiles))


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
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if with_weights:
        weights = RecordedWeights()
        Decoder(read_folder_config(folder), weights, torch.device("cpu"), context_length=1)
        save_file(weights.tensors, folder / "model.safetensors")
    return folder


def greedy_tokens(folder: Path, device: torch.device, page_size: int) -> list[list[int]]:
    """Answers of five rows in float32, with all that a schedule can do: prompts of unlike length at once, one that
    comes late in chunks while the others decode, pages out of order, two steps in flight.
    """
    executor = load_executor(
        str(folder), device=str(device), dtype="float32", page_size=page_size, max_total_tokens=2048, max_pool_rows=8
    )
    driver, draw = Driver(executor), np.random.default_rng(1)
    prompts = [draw.integers(0, executor.info.vocab_size, length).tolist() for length in (3, 150, 45, 46, 77)]
    *early, late = [driver.start(prompt) for prompt in prompts]
    flying = deque([driver.launch(*[(row, None) for row in early])])
    for step in range(EXACT_STEPS):
        joining = [(late, 30 if step < 2 else None)]
        flying.append(driver.launch(*joining, *[(row, 1) for row in early]))
        driver.collect(flying.popleft())
    driver.collect(flying.popleft())
    executor.close()
    return [row.output for row in (*early, late)]


def check_exactness(scale: Scale, scratch: Path) -> Iterator[dict]:
    """Whether greedy tokens in float32 are those of the CPU, which the tests hold to transformers."""
    for number, (name, fields) in enumerate(EXACT_CASES.items()):
        folder = write_model(scratch / f"exact{number}", {**SMALL, **fields}, with_weights=True)
        for page_size in (1, 16):
            here, on_cpu = (greedy_tokens(folder, device, page_size) for device in (scale.device, torch.device("cpu")))
            yield {"case": name, "page_size": page_size, "tokens_as_on_cpu": here == on_cpu}


def copy_bandwidth(scale: Scale) -> float:
    """Bytes a second that a large copy reads and writes, best of five."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        scale.synchronize()
        begin_s = time.perf_counter()
        target.copy_(source)
        scale.synchronize()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * scale.copy_bytes / best_s


def product_rate(scale: Scale) -> float:
    """Floating point operations a second of a large product in bfloat16, best of five."""
    size = scale.product_size
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=scale.device) for _ in range(2))
    best_s = float("inf")
    for _ in range(6):
        scale.synchronize()
        begin_s = time.perf_counter()
        left @ right
        scale.synchronize()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2.0 * size**3 / best_s


def describe(scale: Scale) -> Iterator[dict]:
    """The device, how fast it copies and how fast it multiplies."""
    name = torch.cuda.get_device_name(scale.device) if scale.on_gpu else "a CPU, as a rehearsal"
    yield {"device": name, "torch": torch.__version__, "copy_gb_s": copy_bandwidth(scale) / 1e9}
    yield {"product_tflop_s": product_rate(scale) / 1e12}


def weights_of_products(config: ModelConfig) -> tuple[int, int]:
    """How many weights the products of all layers have, and the head."""
    hidden, head_dim = config.hidden_size, config.head_dim
    attention = hidden * head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer, config.vocab_size * hidden


def decode_floor_s(config: ModelConfig, batch: int, context: int, bandwidth: float, rate: float) -> float:
    """Seconds that a decode step takes at least in bfloat16: each product and attention as long as its bytes or its
    operations take, whichever is longer. bandwidth: bytes a second; rate: operations a second.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inter = config.hidden_size, config.intermediate_size
    products = [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inter), (inter, hidden)] * config.num_layers
    products.append((hidden, config.vocab_size))

    def longest(numbers: float, operations: float) -> float:
        return max(2 * numbers / bandwidth, operations / rate)

    attention = longest(2.0 * batch * context * kv, 4.0 * batch * context * q)
    return config.num_layers * attention + sum(
        longest(inputs * outputs + batch * (inputs + outputs), 2.0 * batch * inputs * outputs)
        for inputs, outputs in products
    )


def prefill_operations(config: ModelConfig, tokens: int) -> float:
    """Floating point operations of a prompt: a query sees half of the keys on average, and the head sees one token."""
    layers, head = weights_of_products(config)
    attention = config.num_layers * config.num_heads * config.head_dim * 4.0 * tokens * (tokens + 1) / 2
    return 2.0 * (layers * tokens + head) + attention


def run(executor: ModelExecutor, plan) -> np.ndarray:
    """One step from launch to tokens."""
    return executor.collect(executor.launch(plan)).tokens


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


def device_per_step(executor: ModelExecutor, rows: EqualRows, scale: Scale) -> float:
    """Seconds per decode step that the device works."""
    activity = ProfilerActivity.CUDA if scale.on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        wall_per_step(executor, rows, 3, in_flight=2)
    # Events of the host repeat the time of the kernels that they launch.
    kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    total_us = sum(event.self_device_time_total for event in kernels)
    if scale.on_gpu and not total_us:
        raise RuntimeError("the profiler saw no kernel")
    return total_us / 1e6 / 3


def decoding_rows(
    executor: ModelExecutor, batch: int, context: int, scale: Scale, sampling: SamplingParams = GREEDY
) -> EqualRows:
    """Rows with `context` tokens each, after a few steps to warm up."""
    rows = EqualRows(executor.info, batch, scale.tokens_per_row(context), sampling)
    run(executor, rows.pretend(context))
    wall_per_step(executor, rows, 5, in_flight=1)
    return rows


def load_shape(folder: Path, scale: Scale, max_total_tokens: int | None, **options: str) -> ModelExecutor:
    """Load random weights in bfloat16; the pool is of the default size without `max_total_tokens`."""
    return load_executor(
        str(folder),
        device=str(scale.device),
        dtype="bfloat16",
        load_format="dummy",
        max_total_tokens=max_total_tokens,
        max_pool_rows=2 * max(scale.batches),
        **options,
    )


def measure_shape(name: str, folder: Path, scale: Scale) -> Iterator[dict]:
    """Decode figures of one model shape in bfloat16, by batch and context; what needs the profiler comes last."""
    bandwidth, rate, config = copy_bandwidth(scale), product_rate(scale), read_folder_config(folder)
    executor = load_shape(folder, scale, None)
    yield {"kernels": executor.info.kernels, "steps": type(executor.model).__name__}
    walls = {}
    for context, batch in product(scale.contexts, scale.batches):
        what = {"batch": batch, "context": context}
        if batch * scale.tokens_per_row(context) > executor.info.num_pages * executor.info.page_size:
            yield {**what, "skipped": "so much KV does not fit the device"}
            continue
        rows = decoding_rows(executor, batch, context, scale)
        alone_s, overlapped_s = walls[batch, context] = [
            wall_per_step(executor, rows, scale.steps, depth) for depth in (1, 2)
        ]
        floor_s = decode_floor_s(config, batch, context, bandwidth, rate)
        yield {
            **what,
            "step_ms": alone_s * 1e3,
            "step_overlapped_ms": overlapped_s * 1e3,
            "floor_ms": floor_s * 1e3,
            "floor_share": floor_s / overlapped_s,
            "floor_share_target": FLOOR_TARGETS.get(name, {}).get(batch),
            "tokens_per_s": batch / overlapped_s,
        }
    yield from measure_prefill(executor, config, scale)
    for (batch, context), (alone_s, overlapped_s) in walls.items():
        device_s = device_per_step(executor, decoding_rows(executor, batch, context, scale), scale)
        yield {
            "batch": batch,
            "context": context,
            "device_ms": device_s * 1e3,
            "idle_share": 1.0 - device_s / alone_s,
            "idle_share_overlapped": 1.0 - device_s / overlapped_s,
            "idle_share_target": IDLE_TARGET,
        }


@contextmanager
def kernel_constants(scale: Scale, values: dict[str, int]) -> Iterator[None]:
    """Within, the attention kernel has these constants; a rehearsal has no kernel."""
    if not scale.on_gpu:
        yield
        return
    from tokenyard.executor.attention.triton import attention_kernel

    before = {name: getattr(attention_kernel, name) for name in values}
    try:
        for name, value in values.items():
            setattr(attention_kernel, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(attention_kernel, name, value)


def measure_kernel_constants(folder: Path, scale: Scale) -> Iterator[dict]:
    """Decode steps with the constants of the attention kernel that were chosen without a device, and with others."""
    context, tokens = min(scale.contexts), scale.tokens_per_row(min(scale.contexts))
    for batch, name, values in (
        (min(scale.batches), "DECODE_STAGES", (3, 5)),
        (max(scale.batches), "MIN_SPLIT_PROGRAMS", (4, 16)),
    ):
        for value in values:
            # Steps are recorded as a model loads, so each value needs a load of its own.
            with kernel_constants(scale, {name: value}):
                executor = load_shape(folder, scale, (batch + 1) * tokens)
                step_s = wall_per_step(executor, decoding_rows(executor, batch, context, scale), scale.steps, 2)
                executor.close()
            del executor
            gc.collect()
            yield {"batch": batch, "context": context, name: value, "step_overlapped_ms": step_s * 1e3}


def measure_prefill(executor: ModelExecutor, config: ModelConfig, scale: Scale) -> Iterator[dict]:
    """A prompt of one chunk, by the device's own clock, best of four."""
    rate, draw = product_rate(scale), np.random.default_rng(3)
    driver, seconds = Driver(executor), float("inf")
    for _ in range(4):
        row = driver.start(draw.integers(0, executor.info.vocab_size, scale.chunk_tokens).tolist())
        seconds = min(seconds, driver.step((row, None)).seconds)
        driver.retract(row)
    floor_s = prefill_operations(config, scale.chunk_tokens) / rate
    yield {
        "prefill_tokens": scale.chunk_tokens,
        "prefill_ms": seconds * 1e3,
        "tokens_per_s": scale.chunk_tokens / seconds,
        "product_share": floor_s / seconds,
        "product_share_target": PREFILL_TARGET,
    }


def measure_varlen(folder: Path, scale: Scale) -> Iterator[dict]:
    """The prompt of `measure_prefill` by torch's varlen attention (a rehearsal has none), and whether the tokens that
    follow short prompts are those of Triton's.
    """
    name, config, first = "prefill_attention_backend", read_folder_config(folder), {}
    for backend in ("auto", "varlen") if scale.on_gpu else ("auto", "auto"):
        executor = load_shape(folder, scale, 2 * scale.chunk_tokens, **{name: backend})
        driver, draw = Driver(executor), np.random.default_rng(5)
        prompts = [draw.integers(0, executor.info.vocab_size, scale.chunk_tokens // 8).tolist() for _ in range(8)]
        rows = [driver.start(prompt) for prompt in prompts]
        driver.step(*[(row, None) for row in rows])
        same = [row.known[-1] == first.setdefault(number, row.known[-1]) for number, row in enumerate(rows)]
        for row in rows:
            driver.retract(row)
        found = next(measure_prefill(executor, config, scale))
        executor.close()
        del executor, driver
        gc.collect()
    # The goal is that of the default.
    del found["product_share_target"]
    yield {**found, name: backend, "same_tokens": sum(same), "prompts": len(same)}


def write_profile(name: str, folder: Path, scale: Scale) -> Iterator[dict]:
    """Calibrate as `tokenyard calibrate` does and write the profile."""
    from tokenyard.cli.calibrate import fit_and_judge, make_profile
    from tokenyard.config import Settings

    executor = load_shape(folder, scale, None)
    wanted = points(executor.info)
    measured = list(measure_all(CalibrationRunner(executor), wanted, time.monotonic, scale.calibration_s))
    terms, errors = fit_and_judge(measured)
    source = f"measured by benchmarks.gpu: {len(measured)} of {len(wanted)} steps"
    made = make_profile(executor.info, Settings(served_model_name=(name,)), terms, "", source)
    profile = replace(made, error=round(float(errors.mean()), 6))
    path = scale.profiles / f"{profile.device}-{profile.model}.json"
    save_profile(profile, path)
    yield {"profile": str(path), "steps": len(measured), "mean_error": profile.error}


def against_transformers(folder: Path, config: dict, scale: Scale) -> Iterator[dict]:
    """The same requests through our engine and through transformers' continuous batching."""
    from benchmarks.gpu_peer import compare

    requests, prompt_tokens, new_tokens = scale.peer
    what = {"requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    yield {**what, **compare(folder, config, str(scale.device), *scale.peer)}


def largest_steps(folder: Path, scale: Scale) -> Iterator[dict]:
    """Does a pool of the default size leave enough memory? Two chunks of a prompt, then full batches that sample."""
    if scale.on_gpu:
        torch.cuda.reset_peak_memory_stats(scale.device)
    executor = load_shape(folder, scale, None)
    driver = Driver(executor)
    prompt = np.random.default_rng(2).integers(0, executor.info.vocab_size, 2 * scale.chunk_tokens - 1).tolist()
    row = driver.start(prompt)
    seconds = [driver.step((row, count)).seconds for count in (scale.chunk_tokens, None)]
    yield {"pool_tokens": executor.info.num_pages, "chunk_tokens": scale.chunk_tokens, "chunks_s": seconds}
    for sampling in (GREEDY, NUCLEUS):
        rows = decoding_rows(executor, max(scale.batches), min(scale.contexts), scale, sampling)
        step_s = wall_per_step(executor, rows, scale.steps, in_flight=2)
        yield {"batch": max(scale.batches), "top_p": sampling.top_p, "step_overlapped_ms": step_s * 1e3}
    if scale.on_gpu:
        free_bytes, all_bytes = torch.cuda.mem_get_info(scale.device)
        peak_bytes = torch.cuda.max_memory_allocated(scale.device)
        yield {"gib": {"peak": peak_bytes / 2**30, "free": free_bytes / 2**30, "all": all_bytes / 2**30}}


def tell(part: str, lines: Iterator[dict], begin_s: float = 0.0, goals: list[tuple[bool, str]] | None = None) -> bool:
    """Print the lines of a part as they come; returns whether all went well. begin_s: when the run began. goals: takes
    each figure with a goal, and whether it is met.
    """

    def show(line: dict) -> None:
        line = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in line.items()}
        print(json.dumps({"part": part, **line, "at_s": round(time.monotonic() - begin_s, 1)}), flush=True)

    good = True
    try:
        for line in lines:
            show(line)
            if goals is not None:
                goals += judged(part, line)
            good = good and line.get("tokens_as_on_cpu", True)
    except Exception as error:  # whatever it is, the other parts are worth having
        show({"error": f"{type(error).__name__}: {error}"})
        good = False
    # A failure may have left a model behind, and the next part needs the memory.
    gc.collect()
    torch.cuda.empty_cache()
    return good


def judged(part: str, line: dict) -> Iterator[tuple[bool, str]]:
    """Yield whether each figure of a line meets its goal, and both in words."""
    for name, goal in line.items():
        if not name.endswith("_target") or goal is None:
            continue
        name = name.removesuffix("_target")
        met = line[name] <= goal if name == "idle_share" else line[name] >= goal
        where = ", ".join(f"{key} {line[key]}" for key in ("batch", "context") if key in line)
        yield met, f"{part}{where and ': ' + where}: {name} {line[name]:.3g}, goal {goal}"


def measure(scale: Scale, limit_s: float = float("inf")) -> bool:
    """Run all parts that begin within the limit, then say which goals are not met; returns whether all went well."""
    begin_s, goals = time.monotonic(), list[tuple[bool, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        good = True
        for part, lines in parts(scale, Path(scratch)):
            if time.monotonic() - begin_s > limit_s:
                lines = iter([{"left_out": "no time is left for it"}])
            good = tell(part, lines, begin_s, goals) and good
    if goals:
        missed = [text for met, text in goals if not met]
        tell("goals", iter([{"met": len(goals) - len(missed), "missed": missed}]), begin_s)
    return good


def parts(scale: Scale, scratch: Path) -> Iterator[tuple[str, Iterator[dict]]]:
    """The parts of a run, those without which the others mean nothing first."""
    yield "device", describe(scale)
    yield "float32 greedy", check_exactness(scale, scratch)
    folders = {}
    for number, (shape, config) in enumerate(scale.shapes.items()):
        folder = folders[shape] = write_model(scratch / f"shape{number}", config, with_weights=False)
        yield f"steps, {shape}", measure_shape(shape, folder, scale)
        yield f"choices, {shape}", measure_choices(config["vocab_size"], scale.batches, scale.steps, scale.device)
        yield f"kernel constants, {shape}", measure_kernel_constants(folder, scale)
        yield f"prompts by varlen, {shape}", measure_varlen(folder, scale)
        yield f"largest steps, {shape}", largest_steps(folder, scale)
        yield f"profile, {shape}", write_profile(shape, folder, scale)
    # Last, as most of their time is not ours.
    for shape, config in scale.shapes.items():
        yield f"compared with transformers, {shape}", against_transformers(folders[shape], config, scale)


def main() -> int:
    """Run all parts on the GPU, or what there is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="decode steps per figure")
    parser.add_argument("--profiles", type=Path, default=Path(), help="folder for cost profiles [here]")
    parser.add_argument("--rehearse", action="store_true", help="run all parts on the CPU with tiny shapes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which shapes [all]")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="start no further part of the benchmark after this many seconds",
    )
    options = parser.parse_args()
    if options.rehearse:
        with tempfile.TemporaryDirectory() as profiles:
            return 0 if measure(rehearsal(Path(profiles)), options.limit_s) else 1
    if not torch.cuda.is_available():
        print("no CUDA device here, nothing to measure")
        return 0
    scale = full_scale(options.steps, options.profiles)
    scale = replace(scale, shapes={name: SHAPES[name] for name in options.shapes})
    return 0 if measure(scale, options.limit_s) else 1


if __name__ == "__main__":
    raise SystemExit(main())
