"""Does the simulator predict our own server on the CPU? The same requests, simulated and served, by several settings.

Run from the repository root: `python -m benchmarks.simulated_vs_served [--model smollm2] [--short]`. One thread
computes, so that client and server processes have a core to themselves.

The traffic is bursts that build up a queue and drain: half of the prompts begin with one of a few long prefixes. Their
size is what the simulated server works off in a few seconds. A run is one burst, and each run brings other requests,
the same ones for every setting. The targets are absolute: a first token as 70 % of the clients had it with fcfs, which
is served first, and one and a half times the time per further token that 90 % of them had. With closer targets few
requests of the slow settings keep them, and a goodput hangs on which ones.

The speed of a machine changes. So runs are short, each setting has its own server which is calibrated by one more
burst of other requests before and after every measured run, and a run is simulated with the costs and the host time
that the tape has of the two bursts around it; nothing else is learnt from the server, and nothing from the measured
run. No burst comes twice, for steps of shapes that were there before are faster. How much the machine changed its speed
is how much longer the run takes when simulated with the second of the two bursts alone than with the first alone. A few
more runs are done than count: the steadiest do. The output says how far apart their bursts are. A third row, which
counts for nothing, is simulated with the costs of the measured runs themselves: where it agrees with the server and the
second row does not, the machine changed its speed.

Exits with 1 if a goodput is off by more than 10 % or the order of the settings is another one (settings whose goodput
differs by less than 5 % count as equal).
"""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.mock_server import AnyServer
from benchmarks.vs_transformers import SHAPE
from tokenyard.base import Event, Flush, StepPlan, StepResult, TokenBatch
from tokenyard.bench.backends import NativeBackend, RequestFuncOutput, RequestOptions
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.load_generator import ServerClient, run_load
from tokenyard.bench.results import tpot_s
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.prompt_ids import SegmentContent
from tokenyard.sim.traces.synthetic import lengths
from tokenyard.sim.traces.tape_workload import TapeHistory
from tokenyard.sim.traces.workload import Workload, uniform_columns
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.replay import Replay

CONTEXT = 1024
WARM_UP = 8
GROUPS, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 4, 256, 96, 32
OFFERED_SHARE = 0.3
"""A burst's requests come within this share of the time it takes."""

COMMON = {"chunked_prefill_size": 128, "max_running_requests": 16, "slo_ttft_scale": 0.0}
SETTINGS = {
    "fcfs": {},
    "fcfs, nothing cached": {"disable_radix_cache": True},
    "fcfs, mixed chunks of 64": {"enable_mixed_chunk": True, "chunked_prefill_size": 64},
    "lpm": {"schedule_policy": "lpm"},
    "short-first": {"schedule_policy": "short-first"},
    "slo": {"schedule_policy": "slo"},
}
SPARE_SHARE = 0.25
WORST_GOODPUT_ERROR, EQUAL = 0.10, 0.05
CALIBRATION_SEED, MEASURED_SEED = 1, 1001


@dataclass(frozen=True)
class Model:
    """A model to serve. `scale` shrinks all lengths; `burst_s` is how long a burst is to take, `runs` how many of them
    are measured, `first_guess` how many requests a burst has until that is known.
    """

    scale: float
    burst_s: float
    runs: int
    first_guess: int
    vocabulary: int


MODELS = {
    "demo": Model(scale=1.0, burst_s=3.0, runs=10, first_guess=48, vocabulary=2048),
    "smollm2": Model(scale=0.5, burst_s=5.0, runs=10, first_guess=12, vocabulary=SHAPE["vocab_size"]),
}


@dataclass(frozen=True)
class Run:
    """One measured run at the server: what was asked and the answers. `number` is its place among all of its server."""

    number: int
    workload: Workload
    answers: list[RequestFuncOutput]


@dataclass
class Calibrations:
    """Watches a replay (`scheduler.replay.Observer`) in which each flush of the cache begins the next part: first
    a warm-up, then a calibration, then by turns a measured run and a calibration.

    alone[i]: what calibration i tells. around[i]: what calibrations i and i + 1, before and after run i, tell. own[i]:
    what the run itself would have told. Several tapes of the same parts, one after the other, are heard together.
    """

    origin: Origin
    alone: list[TapeHistory] = field(default_factory=list)
    around: list[TapeHistory] = field(default_factory=list)
    own: list[TapeHistory] = field(default_factory=list)
    _part: int = -1

    def hear(self, tape: Tape) -> None:
        """Replay a whole tape."""
        self._part = -1
        report = Replay(tape, self, own_policies=False).run()
        assert report.difference is None, report.difference

    @property
    def _listeners(self) -> list[TapeHistory]:
        turn, measured = divmod(self._part, 2)
        if self._part < 0:
            return []
        if measured:
            return self.own[turn : turn + 1]
        return [*self.alone[turn : turn + 1], *self.around[max(turn - 1, 0) : turn + 1]]

    def applied(self, event: Event, now: int) -> None:
        """See `Observer.applied`."""
        if isinstance(event, Flush):
            self._part += 1
            for histories in (self.own,) if self._part % 2 else (self.alone, self.around):
                if len(histories) <= self._part // 2:
                    histories.append(TapeHistory(self.origin))
        for history in self._listeners:
            history.applied(event, now)

    def committed(self, plan: StepPlan, result: StepResult, now: int) -> None:
        """See `Observer.committed`."""
        for history in self._listeners:
            history.committed(plan, result, now)

    def on_output(self, batch: TokenBatch) -> None:
        """See `Observer.on_output`."""
        for history in self._listeners:
            history.on_output(batch)

    def setup(self, history: TapeHistory) -> Setup:
        """What to simulate with. The clients ask for as many tokens as they get, hence `oracle`."""
        return Setup(
            history.profile(),
            self.origin.settings,
            host_s=history.host_s,
            learn=self.origin.learns,
            oracle=True,
            speculation=history.speculation,
        )

    def drift(self, run: Run) -> float:
        """How much slower the machine was after a run than before it, as a share."""
        before, after = (
            simulate(run.workload, self.setup(history)).finished_ns.max()
            for history in self.alone[run.number : run.number + 2]
        )
        return float(after / before - 1.0)


def burst(model: Model, count: int, seed: int) -> Workload:
    """A burst of `count` requests; the groups' prefixes differ from seed to seed."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0.0, OFFERED_SHARE * model.burst_s, count))
    arrivals -= arrivals[0]
    shared = (rng.random(count) < 0.5) * int(PREFIX_TOKENS * model.scale)
    own = lengths(OWN_TOKENS * model.scale, count, rng, CONTEXT // 2)
    outputs = np.maximum(lengths(OUTPUT_TOKENS * model.scale, count, rng, 4 * OUTPUT_TOKENS), 2)
    first_stream = 1_000_000 * seed
    streams = np.stack((first_stream + rng.integers(0, GROUPS, count), first_stream + GROUPS + np.arange(count)), 1)
    parts = np.stack((shared, own), 1).astype(np.int32)
    content = SegmentContent(streams.ravel(), parts.ravel(), 2 * np.arange(count + 1))
    return uniform_columns("burst", arrivals, (shared + own).astype(np.int32), outputs, content)


def prompts_of(workload: Workload, model: Model) -> list[DatasetRow]:
    """The requests with token ids that the model knows."""
    rows = enumerate(zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True))
    few = model.vocabulary - 8
    return [
        DatasetRow((workload.request(index).prompt_ids % few + 8).tolist(), tokens, output)
        for index, (tokens, output) in rows
    ]


def flags(settings: dict) -> list[str]:
    """Settings as flags of the server."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


class Client:
    """Sends traffic to a server, each part after emptying its cache."""

    def __init__(self, target: ServerClient, backend: NativeBackend, model: Model) -> None:
        self._target, self._backend, self._model = target, backend, model

    async def play(self, workload: Workload) -> list[RequestFuncOutput]:
        """All answers to a workload. Ends the benchmark if one is an error."""
        await self._target.flush_cache()
        prompts, times = prompts_of(workload, self._model), workload.arrival_s.tolist()
        answers = (await run_load(self._target, self._backend, prompts, times, max_concurrency=None)).answers
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            sys.exit(f"{len(failed)} requests failed: {failed[0]}")
        return answers

    async def runs(self, requests: int, count: int) -> list[Run]:
        """`count` bursts of `requests` between calibrations."""
        runs: list[Run] = []
        await self.play(burst(self._model, requests, CALIBRATION_SEED))
        for number in range(count):
            workload = burst(self._model, requests, MEASURED_SEED + number)
            runs.append(Run(number, workload, await self.play(workload)))
            await self.play(burst(self._model, requests, CALIBRATION_SEED + number + 1))
        return runs


def end_s(answers: list[RequestFuncOutput]) -> float:
    """Seconds from the first request to the last answer's end."""
    return max(answer.sent_s + answer.latency_s for answer in answers)


def serve(command: list[str], model: Model, settings: dict, requests: int, count: int) -> tuple[list[Run], Tape]:
    """`count` runs of `requests` each at a server with `settings`, and its tape."""

    async def load(url: str) -> list[Run]:
        async with ServerClient(url, {}) as target:
            name = (await target.get("/v1/models"))["data"][0]["id"]
            backend = NativeBackend(RequestOptions(model=name, ignore_eos=True, extra={}))
            client = Client(target, backend, model)
            warm_up = prompts_of(burst(model, WARM_UP, CALIBRATION_SEED), model)
            await run_load(target, backend, warm_up, [0.0] * len(warm_up), max_concurrency=None)
            return await client.runs(requests, count)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tape")
        with AnyServer(*command, "--threads", "1", "--record", str(path), *flags(settings)) as (host, port):
            runs = asyncio.run(load(f"http://{host}:{port}"))
        return runs, Tape(path.read_bytes(), path.name)


def calibrated(tape: Tape) -> Calibrations:
    """What the calibrations on a tape tell."""
    found = Calibrations(tape.header.origin)
    found.hear(tape)
    return found


def fitting_size(model: Model, setup: Setup) -> int:
    """How many requests the simulated server works off in `burst_s`."""
    for requests in range(4, 1000, 2):
        if simulate(burst(model, requests, MEASURED_SEED), setup).finished_ns.max() / 1e9 >= model.burst_s:
            return requests
    sys.exit("this machine is too fast for these bursts; make the requests longer")


def targets_seen(runs: list[Run]) -> dict[str, float]:
    """Targets that about 70 % of the requests in these runs kept, as settings."""
    ttft, tpot = latencies(runs)
    return {
        "slo_ttft_ms": round(1e3 * float(np.quantile(ttft, 0.7)), 1),
        "slo_tpot_ms": round(1.5e3 * float(np.quantile(tpot, 0.9)), 1),
    }


def numbers(ttft: np.ndarray, tpot: np.ndarray, seconds: float, targets: dict[str, float]) -> dict[str, float]:
    """Attainment, goodput (requests in target a second), and latencies in ms."""
    met = (1e3 * ttft <= targets["slo_ttft_ms"]) & (1e3 * tpot <= targets["slo_tpot_ms"])
    return {
        "goodput": float(met.sum() / seconds),
        "attainment": float(met.mean()),
        "seconds": seconds,
        "ttft_p50_ms": float(np.median(ttft) * 1e3),
        "ttft_p90_ms": float(np.quantile(ttft, 0.9) * 1e3),
        "tpot_p50_ms": float(np.median(tpot) * 1e3),
        "tpot_p90_ms": float(np.quantile(tpot, 0.9) * 1e3),
    }


def latencies(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to the first token and per further one, of each answer in these runs."""
    answers = [answer for run in runs for answer in run.answers]
    return np.array([answer.ttft_s for answer in answers]), np.array([tpot_s(answer) or 0.0 for answer in answers])


def measured_numbers(runs: list[Run], targets: dict[str, float]) -> dict[str, float]:
    """What the clients saw in these runs."""
    ttft, tpot = latencies(runs)
    return numbers(ttft, tpot, sum(end_s(run.answers) for run in runs), targets)


def simulated_numbers(outcomes: list[Outcome], targets: dict[str, float]) -> dict[str, float]:
    """The same of simulated runs."""
    ttft = np.concatenate([outcome.ttft_s for outcome in outcomes])
    tpot = np.concatenate([outcome.tpot_s for outcome in outcomes])
    return numbers(ttft, tpot, sum(outcome.finished_ns.max() / 1e9 for outcome in outcomes), targets)


def same_order(rows: dict[str, tuple[dict, dict]]) -> bool:
    """Whether no two settings that differ clearly at the server stand the other way round in the simulator."""
    for (real_a, sim_a), (real_b, sim_b) in combinations(rows.values(), 2):
        disagg = real_a["goodput"] / max(real_b["goodput"], 1e-9) - 1.0
        if abs(disagg) > EQUAL and disagg * (sim_a["goodput"] - sim_b["goodput"]) < 0.0:
            return False
    return True


def compare(name: str, runs: list[Run], found: Calibrations, drifts: list[float], targets: dict) -> tuple:
    """Numbers of a setting, served and simulated, over the runs that count; prints them."""
    real = measured_numbers(runs, targets)
    told, own = (
        simulated_numbers([simulate(run.workload, found.setup(heard[run.number])) for run in runs], targets)
        for heard in (found.around, found.own)
    )
    worst = max(abs(drifts[run.number]) for run in runs)
    print(f"{name}: {len(runs)} of {len(drifts)} runs, calibrations {100 * worst:.1f} % apart at most")
    for what, row in (("served", real), ("simulated", told), ("at the run's own speed", own)):
        print(f"{what:>24}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
    return real, told


def command_of(model_name: str, folder: str) -> list[str]:
    """The server's arguments for a model, which is written to `folder` if it has to be made."""
    if model_name == "demo":
        return []
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
    return [folder, "--skip-tokenizer-init", "--context-length", str(CONTEXT)]


def main() -> None:
    """Choose the load and the targets, and run all settings both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--short", action="store_true", help="two runs for each setting")
    options = parser.parse_args()
    model = MODELS[options.model]
    wanted = 2 if options.short else model.runs
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(options.model, folder)
        first = calibrated(serve(command, model, COMMON, model.first_guess, 1)[1])
        requests = fitting_size(model, first.setup(first.around[0]))
        print(f"{wanted} bursts of {requests} requests for each setting")
        targets: dict[str, float] = {}
        rows = {}
        for name, settings in SETTINGS.items():
            chosen = {**COMMON, **targets, **settings}
            runs, tape = serve(command, model, chosen, requests, round(wanted * (1.0 + SPARE_SHARE)))
            found = calibrated(tape)
            drifts = [found.drift(run) for run in runs]
            steadiest = sorted(runs, key=lambda run: abs(drifts[run.number]))[:wanted]
            if not targets:  # fcfs, which does not go by any
                targets = targets_seen(steadiest)
                print(f"targets {targets}", flush=True)
            rows[name] = compare(name, steadiest, found, drifts, targets)
    # Where both are 0 they agree, though there is nothing to divide.
    errors = {
        name: (told["goodput"] - real["goodput"]) / (real["goodput"] or told["goodput"] or 1.0)
        for name, (real, told) in rows.items()
    }
    print("goodput off by " + ", ".join(f"{name} {100 * error:+.1f} %" for name, error in errors.items()))
    alike = same_order(rows)
    print(f"the order of the settings is {'the same' if alike else 'ANOTHER ONE'}")
    sys.exit(0 if alike and all(abs(error) <= WORST_GOODPUT_ERROR for error in errors.values()) else 1)


if __name__ == "__main__":
    main()
