"""Does the simulator foretell our own server on the CPU? The same requests, simulated and served, by several settings.

Run from the repository root: `python -m benchmarks.simulated_vs_served [--model smollm2] [--short]`. One thread
computes, so that client and server processes have a core to themselves. First a run of other traffic is recorded;
device costs and host time are fitted to its tape, and nothing else is learnt from the server. The arrival rate is the
one at which the simulated fcfs keeps the targets of 75 % of the requests. Then each setting serves the same requests,
measured at the client, beside its simulation. Prints attainment, goodput and first-token times of both and exits with 1
if a goodput is off by more than 10 % or the order of the settings is another one (settings whose goodput differs by
less than 5 % count as equal).
"""

import argparse
import asyncio
import json
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.mock_server import AnyServer
from benchmarks.vs_transformers import SHAPE
from tokenyard.bench.backends import CompletionsBackend, RequestOptions
from tokenyard.bench.datasets import Prompt
from tokenyard.bench.load import Target, run_load
from tokenyard.bench.metrics import tpot_s
from tokenyard.config import Settings
from tokenyard.cost import unloaded_prefill_s
from tokenyard.cost.profiles import Profile, save_profile
from tokenyard.scheduler.replay import Replay
from tokenyard.scheduler.tape import Tape
from tokenyard.sim.content import UniqueContent
from tokenyard.sim.engine import Outcome, Setup, simulate
from tokenyard.sim.search import largest_scale
from tokenyard.sim.synthetic import lengths, poisson
from tokenyard.sim.taped import History
from tokenyard.sim.workload import Workload, uniform_columns

CONTEXT, TARGET_SHARE = 1024, 0.75
SETTINGS = {
    "fcfs": {},
    "fcfs, mixed chunks of 256": {"enable_mixed_chunk": True, "chunked_prefill_size": 256},
    "short-first": {"schedule_policy": "short-first"},
    "slo": {"schedule_policy": "slo"},
}
MODELS = {
    # requests, time-to-first-token target (s), time per output token target (s), first guess of the rate
    "demo": (600, 0.25, 0.05, 8.0),
    "smollm2": (150, 2.0, 0.20, 1.0),
}
WORST_GOODPUT_ERROR, EQUAL = 0.10, 0.05


def traffic(requests: int, rate: float, seed: int) -> Workload:
    """Independent prompts of about 200 tokens, a few up to 880, and answers of about 40, at `rate` a second."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths(200, requests, rng, 880), lengths(40, requests, rng, 140)
    return uniform_columns("chat", poisson(requests, rate, rng), prompts, np.maximum(outputs, 2), UniqueContent())


def flags(settings: dict) -> list[str]:
    """Settings as flags of the server."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


def serve(model: list[str], settings: dict, workload: Workload, vocabulary: int) -> list:
    """What the clients saw of each request, at the server with `settings`."""
    prompts = [
        Prompt((workload.request(index).prompt_ids % (vocabulary - 8) + 8).tolist(), int(tokens), int(output))
        for index, (tokens, output) in enumerate(zip(workload.prompt_tokens, workload.output_tokens, strict=True))
    ]
    with AnyServer(*model, "--threads", "1", *flags(settings)) as (host, port):
        return asyncio.run(_load(f"http://{host}:{port}", prompts, workload.arrival_s.tolist()))


async def _load(url: str, prompts: list[Prompt], arrivals_s: list[float]) -> list:
    async with Target(url, {}) as target:
        name = (await target.get("/v1/models"))["data"][0]["id"]
        backend = CompletionsBackend(RequestOptions(model=name, ignore_eos=True, extra={}))
        await run_load(target, backend, prompts[:8], [0.0] * 8, max_concurrency=None)
        await target.flush_cache()
        answers = (await run_load(target, backend, prompts, arrivals_s, max_concurrency=None)).answers
    failed = [answer.error for answer in answers if answer.error]
    assert not failed, failed[0]
    return answers


def learn(tape_path: Path) -> tuple[Profile, float, float]:
    """Device costs, host seconds a step and the fit's relative error, from a tape."""
    tape = Tape(tape_path.read_bytes(), tape_path.name)
    history = History(tape.header.origin)
    Replay(tape, history, own_policies=False).run()
    profile, error = history.profile()
    return profile, history.host_s, error


def foretold(workload: Workload, profile: Profile, host_s: float, settings: dict) -> Outcome:
    """The same requests in the simulator."""
    chosen = Settings(page_size=profile.page_size, **settings).scheduler_settings(context_length=CONTEXT)
    return simulate(workload, Setup(profile=profile, settings=chosen, host_s=host_s, learn=True))


def measured(answers: list, workload: Workload, profile: Profile, targets: dict) -> dict[str, float]:
    """Numbers of the clients, as `simulated` has them."""
    cost = profile.cost()
    ttft = np.array([answer.ttft_s for answer in answers])
    tpot = np.array([tpot_s(answer) or 0.0 for answer in answers])
    unloaded = np.array([unloaded_prefill_s(cost, int(tokens)) for tokens in workload.prompt_tokens])
    most = np.maximum(targets["slo_ttft_ms"] / 1e3, targets["slo_ttft_scale"] * unloaded)
    met = (ttft <= most) & (tpot <= targets["slo_tpot_ms"] / 1e3)
    end_s = max(answer.sent_s + answer.latency_s for answer in answers)
    return numbers(met, end_s, ttft, tpot)


def simulated(outcome: Outcome) -> dict[str, float]:
    """Numbers of a simulated run."""
    return numbers(outcome.met, outcome.finished_ns.max() / 1e9, outcome.ttft_s, outcome.tpot_s)


def numbers(met: np.ndarray, end_s: float, ttft: np.ndarray, tpot: np.ndarray) -> dict[str, float]:
    """Attainment, goodput (requests in target a second), and quantiles in ms."""
    return {
        "attainment": float(met.mean()),
        "goodput": float(met.sum() / end_s),
        "ttft_p50_ms": float(np.median(ttft) * 1e3),
        "ttft_p90_ms": float(np.quantile(ttft, 0.9) * 1e3),
        "tpot_p50_ms": float(np.median(tpot) * 1e3),
    }


def same_order(rows: dict[str, tuple[dict, dict]]) -> bool:
    """Whether no two settings that differ clearly at the server stand the other way round in the simulator."""
    for (real_a, sim_a), (real_b, sim_b) in combinations(rows.values(), 2):
        apart = real_a["goodput"] / max(real_b["goodput"], 1e-9) - 1.0
        if abs(apart) > EQUAL and apart * (sim_a["goodput"] - sim_b["goodput"]) < 0.0:
            return False
    return True


def main() -> None:
    """Fit, choose the rate, and run all settings both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--short", action="store_true", help="a third of the requests")
    options = parser.parse_args()
    requests, ttft_s, tpot, rate = MODELS[options.model]
    requests //= 3 if options.short else 1
    targets = {"slo_ttft_ms": ttft_s * 1e3, "slo_ttft_scale": 5.0, "slo_tpot_ms": tpot * 1e3}
    with tempfile.TemporaryDirectory() as folder:
        model, vocabulary = [], 2048
        if options.model == "smollm2":
            shape = LlamaConfig(**SHAPE)
            AutoModelForCausalLM.from_config(shape).bfloat16().save_pretrained(folder)
            model = [folder, "--skip-tokenizer-init", "--context-length", str(CONTEXT)]
            vocabulary = SHAPE["vocab_size"]
        tape = Path(folder, "calibration.tape")
        serve([*model, "--record", str(tape)], {}, traffic(requests // 2, rate, seed=1), vocabulary)
        profile, host_s, error = learn(tape)
        save_profile(profile, Path(folder, "profile.json"))
        print(f"fitted to the tape: {100 * error:.1f} % mean error a step, {1e3 * host_s:.2f} ms host time a step")

        def kept(scale: float) -> bool:
            outcome = foretold(traffic(requests, scale, seed=2), profile, host_s, targets)
            return float(outcome.met.mean()) >= TARGET_SHARE

        rate = largest_scale(kept, start=rate)
        workload = traffic(requests, rate, seed=2)
        print(f"{requests} requests at {rate:.2f} a second; targets {json.dumps(targets)}")
        rows = {}
        for name, settings in SETTINGS.items():
            chosen = {**targets, **settings}
            told = simulated(foretold(workload, profile, host_s, chosen))
            served = serve([*model, "--cost-profile", str(Path(folder, "profile.json"))], chosen, workload, vocabulary)
            rows[name] = measured(served, workload, profile, targets), told
            for what, found in zip(("served", "simulated"), rows[name], strict=True):
                shown = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
                print(f"{name:>26} {what:>9}: {shown}", flush=True)
    errors = {name: told["goodput"] / max(real["goodput"], 1e-9) - 1.0 for name, (real, told) in rows.items()}
    print("goodput off by " + ", ".join(f"{name} {100 * error:+.1f} %" for name, error in errors.items()))
    alike = same_order(rows)
    print(f"the order of the settings is {'the same' if alike else 'ANOTHER ONE'}")
    sys.exit(0 if alike and all(abs(error) <= WORST_GOODPUT_ERROR for error in errors.values()) else 1)


if __name__ == "__main__":
    main()
