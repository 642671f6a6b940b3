"""Does the simulator predict a real engine? vLLM on an RTX PRO 6000, as LLMServingSim recorded it.

    python benchmarks/vllm_fidelity.py [--folder FOLDER] [--workload FILE --run FOLDER] [--json OUT]
    python benchmarks/vllm_fidelity.py --blind [...]  # nothing fitted: the roofline of the card's data sheet

The cost terms are fitted to the times of half of the requests and judged on the other half, which the fit has not seen:
once with every other request, once with the earlier ones predicting the later ones (which end in small batches that the
earlier ones never saw). The record holds times per request, no steps, so the fit runs the simulator to see which steps
an answer spans, and solves for terms that give the spans their recorded length, from values that the device's data
sheet suggests. Errors are those of the distribution: the simulated p50 against the recorded p50, and so on; `tpot` is
the mean relative error over requests. vLLM 0.19 plans a step ahead, and so does the simulated engine. Where the record
is of several data-parallel engines, as many are simulated, and they get requests in turn. vLLM stamps a request as
queued between two steps (in these records 23 and 27 ms on average after the client's own stamp), so a short TTFT is
recorded shorter than it was.
"""

import argparse
import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokenyard.base import StepPlan, StepWork
from tokenyard.cost import LinearTerms, Profile
from tokenyard.scheduler import Scheduler
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.engine.sim_scheduler import StepObserver
from tokenyard.sim.hardware.device_profile import Hardware, find_device_profile
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.prompt_ids import TokenContent
from tokenyard.sim.traces.workload import Workload, uniform_columns

TRACES = Path(__file__).resolve().parents[2] / "shared/traces/vllm-measured"
WORKLOAD, RUN = "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz", "RTXPRO6000/Llama-3.1-8B"
KV_BYTES_PER_TOKEN, KV_POOL_TOKENS = 131_072, 500_000

# 16 GB of weights at 1.8 TB/s; 131 kB of KV per token at the same; 250 TFLOP/s at half use for 16 GFLOP a token.
FIRST_GUESS = LinearTerms(0.0, 12.0, 7.0, 0.1, 8e-5, 2e-6, 0.02)
FITTED = ("floor_ms", "dense_ms", "token_ms", "context_ms", "area_ms", "row_ms")
ROUNDS, SWEEPS, RIDGE = 16, 400, 1e-5


@dataclass(frozen=True)
class Record:
    """The recorded run: arrivals and times in seconds, columns by request in order of arrival."""

    workload: Workload
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    settings: dict

    @property
    def replicas(self) -> int:
        """Engines side by side."""
        return int(self.settings.get("data_parallel_size") or 1)


def read_record(workload_file: Path, run_folder: Path) -> Record:
    """The workload with its recorded arrivals, and what became of it."""
    with gzip.open(workload_file, "rt") as lines:
        sent = [json.loads(line) for line in lines]
    with open(run_folder / "requests.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: row["queued_ts"])
    sources = [sent[int(row["request_id"].removeprefix("bench-"))] for row in rows]
    queued = np.array([row["queued_ts"] for row in rows])
    first = np.array([row["first_token_ts"] for row in rows])
    last = np.array([row["last_token_ts"] for row in rows])
    outputs = np.array([row["output_toks"] for row in rows], np.int32)
    prompts = [np.array(source["input_tok_ids"], np.int32) for source in sources]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    workload = uniform_columns("vllm-measured", queued - queued[0], lengths, outputs, TokenContent(prompts))
    settings = json.loads((run_folder / "meta.json").read_text())["engine_kwargs"]
    return Record(workload, first - queued, (last - first) / (outputs - 1), settings)


def run(record: Record, terms: LinearTerms | Profile, observer: StepObserver | None = None) -> Outcome:
    """The recorded workload through the simulator, with the recorded engine's settings."""
    context = record.workload.max_prompt_tokens + record.workload.max_output_tokens + 1
    settings = replace(
        preset("vllm-default", context),
        chunked_prefill_size=record.settings["max_num_batched_tokens"],
        max_running_requests=record.settings["max_num_seqs"],
        disable_radix_cache=False,
        max_in_flight=2,
    )
    if isinstance(terms, Profile):
        profile = terms
    else:
        profile = Profile("rtx-pro-6000", "llama-3.1-8b", terms, KV_POOL_TOKENS, KV_BYTES_PER_TOKEN, context, "fitted")
    return simulate(record.workload, Setup(profile, settings, record.replicas), observer)


def blind(record: Record) -> str:
    """A line with the signed errors of the roofline, in %: of the TPOT's median and p90, and of the makespan."""
    replicas, spread = record.replicas, record.settings["enable_expert_parallel"]
    hardware = Hardware(dp=replicas if spread else 1, ep=replicas if spread else 1)
    model = record.settings["model"].rpartition("/")[2]
    outcome = run(record, find_device_profile("rtx_pro_6000", model, hardware))
    answers_s = record.ttft_s + record.tpot_s * (record.workload.output_tokens - 1)
    pairs = {
        "TPOT p50": (np.quantile(outcome.tpot_s, 0.5), np.quantile(record.tpot_s, 0.5)),
        "TPOT p90": (np.quantile(outcome.tpot_s, 0.9), np.quantile(record.tpot_s, 0.9)),
        "makespan": (outcome.finished_ns.max() / 1e9, (record.workload.arrival_s + answers_s).max()),
    }
    return ", ".join(f"{name} {100 * (found / known - 1):+.1f} %" for name, (found, known) in pairs.items())


class StepFeatures:
    """Notes what each fitted term is multiplied with, and when the step ended, for the steps of the first engine."""

    def __init__(self, terms: LinearTerms) -> None:
        self.terms = terms
        self.ends_ns: list[int] = []
        self.rows: list[tuple[float, ...]] = []

    def __call__(self, begin_ns: int, end_ns: int, plan: StepPlan, work: StepWork, scheduler: Scheduler) -> None:
        """See `StepObserver`."""
        above = self.terms.dense_ms + self.terms.token_ms * work.tokens > self.terms.floor_ms
        line = (0.0, 1.0, float(work.tokens)) if above else (1.0, 0.0, 0.0)
        self.ends_ns.append(end_ns)
        self.rows.append((*line, float(work.decode_context), work.chunk_area, float(work.rows)))

    def between(self, first_ns: np.ndarray, last_ns: np.ndarray) -> np.ndarray:
        """float64[n, terms], features summed over the steps that end after `first_ns` and up to `last_ns`."""
        sums = np.concatenate((np.zeros((1, len(FITTED))), np.cumsum(np.array(self.rows), axis=0)))
        ends = np.array(self.ends_ns)
        return sums[np.searchsorted(ends, last_ns, "right")] - sums[np.searchsorted(ends, first_ns, "right")]


def fit(record: Record, half: slice) -> LinearTerms:
    """Gauss-Newton: simulate, see which steps each request's answer would span, and solve for the terms that give
    those spans their recorded length; keep the terms that predict the fitted half best.
    """
    terms, best, best_error = FIRST_GUESS, FIRST_GUESS, float("inf")
    for _ in range(ROUNDS):
        features = StepFeatures(terms)
        outcome = run(record, terms, features)
        error = errors(record, outcome, half)["tpot"] + errors(record, outcome, half)["ttft_p90"]
        if error < best_error:
            best, best_error = terms, error
        seen = np.arange(len(record.workload))[half]
        seen = seen[outcome.replica[seen] == 0]
        spans_ms = 1000.0 * record.tpot_s[seen] * (record.workload.output_tokens[seen] - 1)
        matrix = features.between(outcome.first_token_ns[seen], outcome.finished_ns[seen]) / spans_ms[:, None]
        solved = _not_negative(matrix, np.array([getattr(FIRST_GUESS, name) for name in FITTED]))
        now = {name: 0.5 * (getattr(terms, name) + value) for name, value in zip(FITTED, solved, strict=True)}
        terms = replace(terms, **now)
    return best


def _not_negative(matrix: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Terms x >= 0 with `matrix @ x` near 1, and near `prior` where the matrix says nothing."""
    scaled = matrix * prior
    gram = scaled.T @ scaled + RIDGE * len(matrix) * np.eye(len(prior))
    moment = scaled.sum(axis=0) + RIDGE * len(matrix)
    x = np.ones(len(prior))
    for _ in range(SWEEPS):
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (moment[i] - gram[i] @ x) / gram[i, i])
    return x * prior


def errors(record: Record, outcome: Outcome, half: slice) -> dict[str, float]:
    """Relative errors of the simulated against the recorded values."""
    found = {"tpot": float(np.mean(np.abs(outcome.tpot_s - record.tpot_s)[half] / record.tpot_s[half]))}
    for name, simulated, measured in (
        ("ttft", outcome.ttft_s[half], record.ttft_s[half]),
        ("tpot", outcome.tpot_s[half], record.tpot_s[half]),
    ):
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            known = float(np.quantile(measured, share))
            found[f"{name}_{label}"] = abs(float(np.quantile(simulated, share)) - known) / known
    return found


def main() -> None:
    """Fit, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=TRACES)
    parser.add_argument("--workload", default=WORKLOAD, help="file in the folder")
    parser.add_argument("--run", default=RUN, help="folder in the folder, with requests.jsonl and meta.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blind", action="store_true", help="fit nothing")
    args = parser.parse_args()
    record = read_record(args.folder / args.workload, args.folder / args.run)
    if args.blind:
        print(blind(record))
        return
    middle = len(record.workload) // 2
    splits = {
        "every other": (slice(0, None, 2), slice(1, None, 2)),
        "later": (slice(0, middle), slice(middle, None)),
    }
    result = {}
    for name, (seen, unseen) in splits.items():
        terms = fit(record, seen)
        outcome = run(record, terms)
        print(f"{name}, terms in ms:", ", ".join(f"{term} {getattr(terms, term):.4g}" for term in FITTED))
        result[f"{name}, fitted on"] = errors(record, outcome, seen)
        result[f"{name}, predicted"] = errors(record, outcome, unseen)
    columns = list(next(iter(result.values())))
    print("| requests | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for name, values in result.items():
        print(f"| {name} | " + " | ".join(f"{100 * value:.1f} %" for value in values.values()) + " |")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
