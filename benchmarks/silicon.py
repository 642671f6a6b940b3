"""How far are predicted latencies from measured ones? Public runs of vLLM and SGLang, replayed as closed loops.

    python benchmarks/silicon.py [--rows FILE] [--sample N] [--jobs N] [--json FILE]
    python benchmarks/silicon.py --closed-form   # the loop's steady state, without the scheduler
    python benchmarks/silicon.py --fit          # prints the efficiencies of tokenyard/sim/hardware/efficiencies.py
    python benchmarks/silicon.py --errors       # prints the table of tokenyard/sim/hardware/measured_errors.py, too

Each row of the file is a run of some engine: a model, GPUs, lengths, a number of clients, and the mean TTFT and TPOT.
As many clients send one request after the other through our scheduler with that engine's rules, in virtual time, with
step times from the roofline. Printed are, per family, GPU and engine, the median and the 90th
percentile of the absolute relative error, and the median signed one (minus: predicted too fast).

What the rows do not say is taken from the public scripts of these runs (InferenceX): prompts and answers of 0.8 to 1.0
of the nominal length, all clients at once, and the server's flags (`SCRIPTS`). Runs of other origin have the nominal
lengths and the engine's defaults. Their clients begin at once with SGLang; with vLLM they begin at random within the
time that one answer takes to decode. No row says so: with equal lengths every prompt meets all others if clients begin
together, and the fitted runs agree with that for SGLang and not for vLLM. A run has ten requests per client; three are
simulated, and the first one of each client, which meets all others, counts a tenth.

`--fit` uses the configurations of which `held_out` is false; the table keeps both kinds apart. `calibrated` corrects
the predictions of a deployment (model, types, GPU, engine, parallelism, flags) by what its fitted rows say
(`Correction`), so it exists for held-out rows whose deployment has such rows.

The rows run in a random order that is the same in every run. With `--json FILE` each is written as it ends, and the
same call goes on after an interruption.
"""

import argparse
import csv
import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

from tokenyard.base import ConfigError
from tokenyard.cost import Profile, closest_terms
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.hardware.devices import Device, find_device
from tokenyard.sim.hardware.efficiencies import efficiency_of
from tokenyard.sim.hardware.model_shape import ModelShape, find_model
from tokenyard.sim.hardware.roofline import Efficiency, Parallel, Roofline
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
from tokenyard.sim.traces.sessions import SessionOptions, SessionRecord, Turn
from tokenyard.sim.traces.workload import Workload

ROWS = Path(__file__).resolve().parents[2] / "shared/traces/silicon/agg_vllm_sglang.csv.gz"
NODE = 8
HELD_OUT = 4
"""One configuration in so many is held out of the fit."""

MIN_HELD_OUT = 5
ROUNDS = 3
REQUESTS_PER_CLIENT = 10
MAX_CLIENTS = 1024
COLLECTION = ("db-dump", "source_file=2026-")


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a server that the rows do not name.

    kv_bits: of a number of the KV cache.
    chunk: tokens of a step's prefill; 0 for twice the nominal prompt.
    memory: share of the device's memory for weights, activations and KV.
    polls: whether SGLang's receiver looks at new requests only every 10 (fewer than 16 clients) or 30 decode steps.
    """

    kv_bits: int = 16
    chunk: int = 8192
    memory: float = 0.9
    polls: bool = False


HOPPER = ("h100_sxm", "h200_sxm")
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200")

SCRIPTS: tuple[tuple[str, tuple[str, ...], str, str, Flags], ...] = (
    ("DeepSeek", BLACKWELL, "nvfp4", "", Flags(8, 16384, 0.85, polls=True)),
    ("DeepSeek", BLACKWELL, "fp8", "", Flags(8, 32768, 0.82, polls=True)),
    ("DeepSeek", HOPPER, "", "", Flags(16, 32768, 0.82)),
    ("GLM-5", BLACKWELL, "", "", Flags(8, 32768, 0.85)),
    ("GLM-5", HOPPER, "", "", Flags(16, 8192, 0.85)),
    ("Qwen3.5", ("b300_sxm",), "fp8", "", Flags(8, 16384, 0.8, polls=True)),
    ("Qwen3.5", BLACKWELL, "fp8", "", Flags(8, 32768, 0.82, polls=True)),
    ("Qwen3.5", BLACKWELL, "nvfp4", "", Flags(8, 32768, 0.85, polls=True)),
    ("Qwen3.5", BLACKWELL, "", "", Flags(16, 32768, 0.82, polls=True)),
    ("Qwen3.5", HOPPER, "", "", Flags(8, 16384, 0.8)),
    ("Kimi", ("b200_sxm",), "nvfp4", "2026-04-20", Flags(8, 0)),
    ("Kimi", HOPPER + BLACKWELL, "int4_wo", "", Flags(memory=0.95)),
    ("Llama-3.1-70B", HOPPER + BLACKWELL, "", "", Flags(8)),
    ("MiniMax", BLACKWELL, "", "2026-04-03", Flags(8, 0)),
    ("MiniMax", ("h200_sxm", "b200_sxm"), "", "", Flags(memory=0.95)),
    ("gpt-oss", ("b200_sxm",), "", "2025-12-05", Flags(8)),
)
"""Flags in the scripts of InferenceX (github.com/SemiAnalysisAI/InferenceX, `benchmarks/`), by part of the model's
name, device, type of the weights and first day of the runs ("" for all); the first line that fits counts."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs: a model with its types on devices, under an engine with its flags."""

    model: str
    precision: str
    system: str
    engine: str
    parallel: Parallel
    flags: Flags = field(default=Flags(), repr=False)
    """Not in `repr`, so that a better reading of the scripts holds out the same runs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run, times in ms."""

    name: str
    deployment: Deployment
    prompt: int
    output: int
    clients: int
    drawn_lengths: bool
    ttft_ms: float
    tpot_ms: float

    @property
    def held_out(self) -> bool:
        """Whether its configuration is kept out of fits."""
        return crc32(repr((self.deployment, self.prompt, self.output, self.clients)).encode()) % HELD_OUT == 0

    @property
    def mean_length(self) -> float:
        """The mean of a length over the nominal one."""
        return 0.9 if self.drawn_lengths else 1.0


def read_runs(path: Path) -> tuple[list[Run], dict[str, int]]:
    """The runs of a file, and how many could not be read, by reason."""
    runs, refused = [], defaultdict(int)
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            try:
                runs.append(_run(row))
            except ConfigError as error:
                refused[error.message] += 1
    return runs, dict(refused)


def _run(row: dict[str, str]) -> Run:
    clients = int(row["concurrency"])
    if clients > MAX_CLIENTS:
        raise ConfigError(f"more than {MAX_CLIENTS} clients")
    deployment = Deployment(
        row["model_path"], _precision(row), row["system"], row["backend"], parallel_of(row), flags_of(row)
    )
    return Run(
        row["id"],
        deployment,
        int(row["isl"]),
        int(row["osl"]),
        clients,
        row["silicon_data_source"].startswith(COLLECTION),
        float(row["silicon_ttft_ms"]),
        float(row["silicon_tpot_ms"]),
    )


def _precision(row: dict[str, str]) -> str:
    """The types of the weights, "" for the checkpoint's own. Labels of gpt-oss and of Kimi's int4 are wrong."""
    if "gpt-oss" in row["model_path"] or "int4" in row["gemm_quant_mode"]:
        return ""
    return row["gemm_quant_mode"].replace("fp8_block", "fp8") or ("" if "FP8" in row["model_path"] else "bf16")


def flags_of(row: dict[str, str]) -> Flags:
    """The flags of the server, from the scripts."""
    day = re.search(r"measured=([0-9-]{10})", row["silicon_data_source"])
    for model, systems, types, since, flags in SCRIPTS:
        dated = not since or (day is not None and day[1] >= since)
        if model in row["model_path"] and row["system"] in systems and types in row["gemm_quant_mode"] and dated:
            return replace(flags, polls=flags.polls and row["silicon_data_source"].startswith(COLLECTION))
    return Flags()


def parallel_of(row: dict[str, str]) -> Parallel:
    """How the run was divided. Where tp is labelled as tp times ep or dp, the parts are taken (reference page)."""
    tp, dp = int(row["tp_size"]), int(row["attention_dp_size"] or 1)
    moe_tp, ep = int(row["moe_tp_size"] or 1), int(row["moe_ep_size"] or 1)
    if dp > 1:
        return Parallel(1, dp, dp) if moe_tp == 1 else Parallel(tp, dp, ep)
    if moe_tp * ep > 1 and moe_tp * ep != tp:
        raise ConfigError("expert parallelism that does not match tp")
    if tp > NODE and moe_tp == ep:
        return Parallel(moe_tp, 1, ep)
    if tp > NODE:
        raise ConfigError(f"tp {tp} over several nodes")
    return Parallel(tp, 1, ep)


@cache
def shape_of(model: str, precision: str, kv_bits: int = 16) -> ModelShape:
    """The model of a deployment with its types. Four-bit checkpoints of MoE models keep attention in 16 bits."""
    shape = replace(find_model(model), kv_bits=kv_bits)
    if not precision:
        return shape
    typed = shape.with_types(precision)
    if precision == "nvfp4" and shape.is_moe:
        return replace(typed, attention_bits=16, attention_math_bits=16)
    return typed


def roofline_of(deployment: Deployment, efficiency: Efficiency | None = None) -> Roofline:
    """Its step times."""
    device = find_device(deployment.system)
    shape = shape_of(deployment.model, deployment.precision, deployment.flags.kv_bits)
    efficiency = efficiency or efficiency_of(deployment.engine, device, shape.family)
    return Roofline(shape, device, deployment.parallel, efficiency)


# The closed loop


def polls_every(run: Run) -> int:
    """Decode steps between two looks of SGLang's receiver at new requests; 0 for every step."""
    return (30 if run.clients >= 16 else 10) if run.deployment.flags.polls else 0


def workload_of(run: Run, profile: Profile, efficiency: Efficiency, seed: int = 0) -> Workload:
    """The clients as sessions of `ROUNDS` turns. What passes before the scheduler sees a request is its gap."""
    rng = np.random.default_rng(seed)
    low = 0.8 if run.drawn_lengths else 1.0
    rows = run.clients // run.deployment.parallel.dp or 1
    step_s = float(profile.cost().decodes(rows, np.array([rows * (run.prompt + run.output // 2)]))[0])
    records = []
    for client in range(run.clients):
        turns = []
        for turn in range(ROUNDS):
            prompt, output = (max(round(n * rng.uniform(low, 1.0)), 1) for n in (run.prompt, run.output))
            gap_s = efficiency.request_ms / 1e3 + efficiency.request_us_per_token * prompt / 1e6
            gap_s += polls_every(run) * step_s * rng.uniform() if turn else 0.0
            turns.append(Turn(prompt, output, (turn - 1,) if turn else (), gap_s))
        spread = run.deployment.engine == "vllm" and not run.drawn_lengths
        start_s = rng.uniform(0.0, step_s * run.output) if spread else 0.0
        records.append(SessionRecord(f"client {client}", turns, start_s))
    return session_workload(SessionTrace(run.name, records, 1), SessionOptions())


def predicted(run: Run, profile: Profile, efficiency: Efficiency) -> tuple[float, float]:
    """Mean TTFT and TPOT in ms of the simulated run."""
    workload = workload_of(run, profile, efficiency)
    context = workload.max_prompt_tokens + workload.max_output_tokens + 1
    settings = replace(
        preset(f"{run.deployment.engine}-default", context),
        chunked_prefill_size=run.deployment.flags.chunk or 2 * run.prompt,
        max_running_requests=max(run.clients, 2),
    )
    outcome = simulate(workload, Setup(profile, settings, dp_size=run.deployment.parallel.dp))
    return _means(outcome, workload)


def _means(outcome: Outcome, workload: Workload) -> tuple[float, float]:
    sessions = workload.sessions
    assert sessions is not None
    first = sessions.turn == 0
    ttft_s = outcome.ttft_s + sessions.gap_s
    weight = 1.0 / REQUESTS_PER_CLIENT

    def mean(values: np.ndarray) -> float:
        return float(weight * np.nanmean(values[first]) + (1.0 - weight) * np.nanmean(values[~first]))

    return 1e3 * mean(ttft_s), 1e3 * mean(outcome.tpot_s)


@cache
def profile_of(deployment: Deployment) -> Profile:
    """The deployment as a cost profile, from the roofline."""
    roofline = roofline_of(deployment)
    tp, table = deployment.parallel.tp, roofline.table("roofline")
    pool = roofline.kv_pool_tokens(deployment.flags.memory, 256, 8192)
    return Profile(
        deployment.system, deployment.model, closest_terms(table), pool, roofline.shape.kv_bytes_per_token(),
        1 << 20, table.origin, tp, table=table,
    )  # fmt: skip


def one(run: Run) -> tuple[float, float] | str:
    """Predicted TTFT and TPOT in ms, or why there are none."""
    try:
        efficiency = roofline_of(run.deployment).efficiency
        return predicted(run, profile_of(run.deployment), efficiency)
    except ConfigError as error:
        return error.message


def one_in_closed_form(run: Run) -> tuple[float, float] | str:
    """The same from `estimate`."""
    ttft_ms, tpot_ms = estimate(roofline_of(run.deployment), [run])[0]
    return float(ttft_ms), float(tpot_ms)


# The fit


FITTED = tuple(name for name in asdict(Efficiency()) if name not in ("link", "imbalance"))
RIDGE = 2.0
MAX_OVERHEAD = {"request_ms": 100.0, "request_us_per_token": 50.0}
"""Where the closed form lacks a queue, a fit would call it overhead of the request."""

SWEEPS = 12
MIN_LOG_ERROR = 0.03
CALIBRATION_RIDGE = 10.0
"""Chosen on the fitted runs, each left out in turn."""

TTFT_WEIGHT = 0.5


def estimate(roofline: Roofline, runs: Sequence[Run]) -> np.ndarray:
    """float64[n, 2], TTFT and TPOT in ms of runs of one deployment, in closed form: the steady state of the loop."""
    share = roofline.efficiency
    rows = np.array([max(run.clients / roofline.parallel.dp, 1.0) for run in runs])
    scale = np.array([run.mean_length for run in runs])
    prompt, output = np.array([run.prompt for run in runs]) * scale, np.array([run.output for run in runs]) * scale
    context, zero = prompt + output / 2, np.zeros(len(runs))
    base = roofline.base_ms(rows, chunks=False)
    attention = roofline.rows_ms(rows, context)
    decode = base + attention + share.host_ms
    if runs[0].deployment.engine == "vllm":
        added = roofline.base_ms(rows + prompt, chunks=True) - base + roofline.chunk_ms(prompt, zero)
        alone = added + decode
    else:
        alone = roofline.base_ms(prompt, chunks=True) + roofline.chunk_ms(prompt, zero) + share.host_ms
        added = alone
    tpot = decode + (rows - 1) / output * added
    wait = np.array([polls_every(run) for run in runs]) * decode / 2 * (1 - 1 / REQUESTS_PER_CLIENT)
    burst = (rows - 1) / 2 * added / REQUESTS_PER_CLIENT
    request = share.request_ms + share.request_us_per_token * prompt / 1e3
    return np.stack((alone + tpot / 2 + wait + burst + request, tpot), axis=1)


def fit(runs: Sequence[Run], prior: Efficiency) -> Efficiency:
    """The efficiencies of one engine on one kind of GPU: least squares of the log errors of `estimate`, the large ones
    bounded, by Gauss-Newton on the logs of the parameters, with a ridge towards `prior`.
    """
    grouped: dict[Deployment, list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.deployment].append(run)
    groups = list(grouped.values())
    measured = np.concatenate([[(run.ttft_ms, run.tpot_ms) for run in group] for group in groups])

    def errors(logs: np.ndarray) -> np.ndarray:
        efficiency = replace(prior, **{name: float(np.exp(log)) for name, log in zip(FITTED, logs, strict=True)})
        found = [estimate(roofline_of(group[0].deployment, efficiency), group) for group in groups]
        logged = np.log(np.concatenate(found) / measured)
        # The measured TTFT of a queue that a server's own limit made says nothing of its steps.
        return (logged * np.array([TTFT_WEIGHT, 1.0])).ravel()

    start = np.array([np.log(getattr(prior, name)) for name in FITTED])
    logs = start.copy()
    for _ in range(SWEEPS):
        now = errors(logs)
        jacobian = np.stack([(errors(logs + 0.05 * unit) - now) / 0.05 for unit in np.eye(len(logs))], axis=1)
        weights = 1.0 / np.maximum(np.abs(now), 0.1)
        left = (jacobian.T * weights) @ jacobian + RIDGE * np.eye(len(logs))
        step = np.linalg.solve(left, -(jacobian.T * weights) @ now - RIDGE * (logs - start))
        logs = np.clip(logs + np.clip(step, -0.3, 0.3), start - 2.0, start + 2.0)
        for i, name in enumerate(FITTED):
            if name.startswith(("memory", "expert_memory", "kv_memory", "compute", "attention")):
                logs[i] = min(logs[i], np.log(0.95))
            logs[i] = min(logs[i], np.log(MAX_OVERHEAD.get(name, np.inf)))
    return replace(prior, **{name: float(f"{np.exp(log):.3g}") for name, log in zip(FITTED, logs, strict=True)})


def generation(device: Device) -> str:
    """The kind of GPU whose runs are fitted together."""
    return "hopper" if device.name in ("h100_sxm", "h200_sxm") else "blackwell"


def fit_all(runs: Iterable[Run]) -> None:
    """Fit each engine on each kind of GPU, and from there each family of models on it, and print the numbers."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.deployment.engine, generation(find_device(run.deployment.system))].append(run)
    for key, group in sorted(groups.items()):
        of_all = fit([run for run in group if not run.held_out], Efficiency())
        print(f"    {(*key, '')!r}: {of_all!r},", flush=True)
        for family in sorted({family_of(run) for run in group}):
            kin = [run for run in group if family_of(run) == family]
            found = fit([run for run in kin if not run.held_out], of_all)
            print(f"    {(*key, family)!r}: {found!r},", flush=True)


def family_of(run: Run) -> str:
    """The family of its model."""
    return shape_of(run.deployment.model, run.deployment.precision).family


# The table


@dataclass(frozen=True, slots=True)
class Result:
    """A run with its predicted times, in ms."""

    run: Run
    ttft_ms: float
    tpot_ms: float


def error_cell(errors: Sequence[float]) -> str:
    """Median, 90th percentile and signed median of relative errors, in percent."""
    if not len(errors):
        return "-"
    wrong = np.array(errors) * 100
    return f"{np.median(np.abs(wrong)):.0f} / {np.percentile(np.abs(wrong), 90):.0f} / {np.median(wrong):+.0f}"


@dataclass(frozen=True, slots=True)
class Correction:
    """What a calibration multiplies the predictions of one deployment with: a power of clients, prompt and output.

    centre: float64[3], mean logs of clients, prompt and output.
    level: float64[2], logs of the factors of TTFT and TPOT there.
    slopes: float64[3, 2], how these change with the logs.
    """

    centre: np.ndarray
    level: np.ndarray
    slopes: np.ndarray

    def of(self, run: Run) -> np.ndarray:
        """float64[2], the factors of TTFT and TPOT of `run`."""
        return np.exp(self.level + (_logs_of(run) - self.centre) @ self.slopes)


def _logs_of(run: Run) -> np.ndarray:
    return np.log([run.clients, run.prompt, run.output])


def calibration(results: Sequence[Result]) -> dict[Deployment, Correction]:
    """The corrections of deployments with fitted runs: least absolute log errors, by reweighting, with a ridge that
    keeps the slopes near 0 where there are few runs.
    """
    grouped: dict[Deployment, list[Result]] = defaultdict(list)
    for result in results:
        if not result.run.held_out:
            grouped[result.run.deployment].append(result)
    return {deployment: correction_of(group) for deployment, group in grouped.items()}


def correction_of(group: Sequence[Result]) -> Correction:
    """The correction that the runs of one deployment show."""
    logs = np.array([_logs_of(r.run) for r in group])
    wrong = np.log([(r.run.ttft_ms / r.ttft_ms, r.run.tpot_ms / r.tpot_ms) for r in group])
    centre = logs.mean(axis=0)
    level, slopes = np.median(wrong, axis=0), np.zeros((3, 2))
    at = logs - centre
    for _ in range(SWEEPS):
        for kind in range(2):
            weights = 1.0 / np.maximum(np.abs(wrong[:, kind] - level[kind] - at @ slopes[:, kind]), MIN_LOG_ERROR)
            level[kind] = np.average(wrong[:, kind] - at @ slopes[:, kind], weights=weights)
            left = (at.T * weights) @ at + CALIBRATION_RIDGE * np.eye(3)
            slopes[:, kind] = np.linalg.solve(left, (at.T * weights) @ (wrong[:, kind] - level[kind]))
    return Correction(centre, level, slopes)


def errors_of(results: Sequence[Result], corrections: dict[Deployment, Correction] | None = None) -> np.ndarray:
    """float64[n, 2], relative errors of TTFT and TPOT, with the deployments' corrections where given."""
    wrong = []
    for r in results:
        factor = np.ones(2) if corrections is None else corrections[r.run.deployment].of(r.run)
        wrong.append(factor * (r.ttft_ms / r.run.ttft_ms, r.tpot_ms / r.run.tpot_ms) - 1.0)
    return np.array(wrong).reshape(-1, 2)


def print_table(results: Sequence[Result], key: Callable[[Run], str]) -> None:
    """One line per value of `key`."""
    corrections = calibration(results)
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[key(result.run)].append(result)
    print("| rows | n | TTFT bare | TPOT bare | n | TTFT calibrated | TPOT calibrated |")
    print("| --- | ---: | --- | --- | ---: | --- | --- |")
    for name, group in sorted(groups.items()):
        bare = errors_of(group)
        known = [r for r in group if r.run.held_out and r.run.deployment in corrections]
        tuned = errors_of(known, corrections)
        cells = [error_cell(bare[:, 0]), error_cell(bare[:, 1]), str(len(known)), error_cell(tuned[:, 0])]
        print(f"| {name} | {len(group)} | {' | '.join(cells)} | {error_cell(tuned[:, 1])} |")


def place(run: Run) -> str:
    """Family, GPU and engine of a run: what its error is stated for."""
    return f"{family_of(run)}, {run.deployment.system}, {run.deployment.engine}"


def print_errors(results: Sequence[Result]) -> None:
    """The entries of `measured_errors.MEASURED`: held-out rows where there are enough, else all."""
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[tuple(place(result.run).split(", "))].append(result)  # type: ignore[index]
    for key, group in sorted(groups.items()):
        kept = [result for result in group if result.run.held_out]
        used = kept if len(kept) >= MIN_HELD_OUT else group
        ttft, tpot = np.median(np.abs(errors_of(used)), axis=0) * 100
        print(f"    {key!r}: MeasuredError({ttft:.0f}, {tpot:.0f}, {len(used)}),")


def shuffled(runs: Iterable[Run]) -> list[Run]:
    """The runs in a random order that is always the same, so that the first ones are a fair sample."""
    return sorted(runs, key=lambda run: crc32(run.name.encode()))


def replay(
    runs: Sequence[Run], predict: Callable[[Run], tuple[float, float] | str], jobs: int, path: Path | None
) -> Iterator[tuple[Run, tuple[float, float] | str]]:
    """Each run with its predicted TTFT and TPOT in ms, or why there are none. `path`: what earlier calls found, and
    what this one adds.
    """
    known = {}
    if path is not None and path.exists():
        known = {line["name"]: line["answer"] for line in map(json.loads, path.read_text().splitlines())}
    yield from ((run, known[run.name]) for run in runs if run.name in known)
    left = [run for run in runs if run.name not in known]
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        for run, answer in zip(left, pool.map(predict, left) if pool else map(predict, left), strict=True):
            if path is not None:
                with path.open("a") as lines:
                    lines.write(json.dumps({"name": run.name, "answer": answer}) + "\n")
            yield run, answer


def main() -> None:
    """Print the table, or the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="the measured runs")
    parser.add_argument("--fit", action="store_true", help="fit the roofline's efficiencies and print them")
    parser.add_argument("--closed-form", action="store_true", help="the loop's steady state instead of the scheduler")
    parser.add_argument(
        "--errors", action="store_true", help="print the errors as the entries of a table in the package"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="replay N of the rows, drawn at random [all]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [all cores]")
    parser.add_argument("--json", type=Path, help="keep what is predicted in a file, and go on from it")
    args = parser.parse_args()
    runs, refused = read_runs(args.rows)
    if args.fit:
        fit_all(runs)
        return
    predict = one_in_closed_form if args.closed_form else one
    results = []
    for run, answer in replay(shuffled(runs)[: args.sample], predict, args.jobs, args.json):
        if isinstance(answer, str):
            refused[answer] = refused.get(answer, 0) + 1
        else:
            results.append(Result(run, *answer))
    print_results(results, refused)
    if args.errors:
        print_errors(results)


def print_results(results: Sequence[Result], refused: dict[str, int]) -> None:
    """All tables, and why rows are not in them."""
    for title, key in (("all", lambda run: "held out" if run.held_out else "fitted"), ("", place)):
        print(f"\nmedian / 90th percentile of the absolute error, signed median, in % {title}\n")
        print_table(results, key)
    for reason, count in sorted(refused.items(), key=lambda item: -item[1]):
        print(f"not done: {count} rows: {reason}")


if __name__ == "__main__":
    main()
