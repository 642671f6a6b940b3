"""Sessions of coding agents at a real server on the CPU, and what the simulator forecasts for it.

Run from the repository root: `python -m benchmarks.agents_served [--concurrent 12] [--sessions 24] [--seed 0]`.

Lengths and gaps of kv-cache-tester's sessions, the chunk, and the times that `hits-first` reads are all divided by one
factor, 64. The pool is such that the contexts of the active sessions are 3.2 times as large. A small Llama with random
weights computes on one thread. First the server runs other sessions, with another seed, and the tape of that run says
how long steps take. This is all that the forecasts know of the server. Then each policy serves the same sessions, at a
server of its own. The calibration is repeated at the end: how far it is from the first one is how much the machine
changed its speed meanwhile, and no forecast can be better.

Exits with 1 if the policies come in another order than in the simulator, if `hits-first` makes less than 1.5 times the
turns of fcfs, or if a forecast is off by more than 15 %.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.agents import TRACE
from benchmarks.mock_server import AnyServer
from tokenyard.bench.backends import NativeBackend, RequestOptions
from tokenyard.bench.datasets import Vocabulary
from tokenyard.bench.load_generator import ServerClient
from tokenyard.bench.session_load import measured_sessions, run_sessions
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.sessions import SessionOptions
from tokenyard.sim.traces.tape_workload import TapeHistory
from tokenyard.sim.traces.workload import Workload
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import Replay

FACTOR = 64
CONTEXT = 100_000 // FACTOR
CONTEXTS_PER_POOL = 3.2
PAGE = 16
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2 * CONTEXT,
}
COMMON = (
    "--skip-tokenizer-init --threads 1 --enable-mixed-chunk --max-running-requests 20 "
    f"--page-size {PAGE} --chunked-prefill-size {8192 // FACTOR} --session-max-wait-s {600 / FACTOR}"
)
POLICIES = {
    "fcfs": "--schedule-policy fcfs",
    "lpm": "--schedule-policy lpm",
    "hits-first": f"--schedule-policy hits-first --policy-options cheap_s={1.5 / FACTOR}",
}
CALIBRATION_SEED = 1000
LEAST_RATIO, WORST_ERROR, EQUAL = 1.5, 0.15, 0.05


def sessions_of(concurrent: int, sessions: int, seed: int) -> Workload:
    """Sessions drawn from the trace, divided by `FACTOR`."""
    chosen = SessionOptions(
        concurrent=concurrent, sessions=sessions, think_cap_s=600.0, context_length=CONTEXT, shrink=FACTOR, seed=seed
    )
    return read_trace(TRACE, "kv-cache-tester", ReadOptions(seed=seed, sessions=chosen))


def pool_tokens(workload: Workload, concurrent: int) -> int:
    """The pool of which the contexts of the active sessions are `CONTEXTS_PER_POOL` times, at least one context."""
    contexts = concurrent * float(workload.prompt_tokens.mean())
    return max(int(contexts / CONTEXTS_PER_POOL), CONTEXT + PAGE) // PAGE * PAGE


def served(model: str, policy: str, pool: int, workload: Workload) -> tuple[dict[str, Any], Tape]:
    """The figures of the sessions at a server of its own, and its tape. Ends the benchmark if a turn fails."""

    async def load(url: str) -> dict[str, Any]:
        async with ServerClient(url, {}) as target:
            name = (await target.get("/v1/models"))["data"][0]["id"]
            backend = NativeBackend(RequestOptions(model=name, ignore_eos=True, extra={}))
            words = {str(token): token for token in range(SHAPE["vocab_size"])}
            vocabulary = Vocabulary(Tokenizer(WordLevel(words, unk_token="0")))
            run = await run_sessions(target, backend, workload, vocabulary)
            failed = [answer.error for answer in run.answers if answer.error]
            if failed:
                sys.exit(f"{len(failed)} turns failed: {failed[0]}")
            return measured_sessions(workload, run)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tape")
        flags = f"{COMMON} {policy} --context-length {CONTEXT} --max-total-tokens {pool} --record {path}".split()
        with AnyServer(model, *flags) as (host, port):
            found = asyncio.run(load(f"http://{host}:{port}"))
        return found, Tape(path.read_bytes(), path.name)


def history_of(tape: Tape) -> TapeHistory:
    """What a tape tells of the server."""
    history = TapeHistory(tape.header.origin)
    report = Replay(tape, history, own_policies=False).run()
    assert report.difference is None, report.difference
    return history


def forecast(speed: TapeHistory, tape: Tape, workload: Workload) -> dict[str, Any]:
    """The simulator's figures for the settings of `tape` at the speed of another run."""
    origin = tape.header.origin
    setup = Setup(speed.profile(), origin.settings, host_s=speed.host_s, learn=origin.learns, oracle=True)
    setup = replace(setup, kv_pool_tokens=origin.info.num_pages * origin.settings.page_size)
    return summary(simulate(workload, setup))["sessions"]


def main() -> None:
    """Serve and simulate, print a table, and exit with the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=12, help="sessions at a time [12]")
    parser.add_argument("--sessions", type=int, default=24, help="sessions of a run [24]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workload = sessions_of(args.concurrent, args.sessions, args.seed)
    practice = sessions_of(args.concurrent, args.concurrent, CALIBRATION_SEED + args.seed)
    pool = pool_tokens(workload, args.concurrent)
    print(f"{len(workload)} turns of {args.sessions} sessions, {args.concurrent} at a time; pool of {pool} tokens")
    with tempfile.TemporaryDirectory() as model:
        AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(model)
        calibrate = POLICIES["hits-first"]
        before, tape = served(model, calibrate, pool, practice)
        speed = history_of(tape)
        print("| policy | turns/h | forecast | off by | session s | forecast | hit share | forecast | load |")
        print("| --- " + "| ---: " * 8 + "|")
        real, told = {}, {}
        for name, policy in POLICIES.items():
            found, tape = served(model, policy, pool, workload)
            guess = forecast(speed, tape, workload)
            real[name], told[name] = found["turns_per_hour"], guess["turns_per_hour"]
            print(
                f"| {name} | {real[name]:,.0f} | {told[name]:,.0f} | {told[name] / real[name] - 1:+.0%} "
                f"| {found['mean_session_s']:.1f} | {guess['mean_session_s']:.1f} "
                f"| {found['hit_share']:.2f} | {guess['hit_share']:.2f} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
        after, _ = served(model, calibrate, pool, practice)
    drift = after["turns_per_hour"] / before["turns_per_hour"] - 1
    ratio = real["hits-first"] / real["fcfs"]
    ordered = all(
        (real[a] - real[b]) * (told[a] - told[b]) > 0 for a in real for b in real if abs(real[a] / real[b] - 1) > EQUAL
    )
    print(f"hits-first makes {ratio:.2f} times the turns of fcfs (forecast {told['hits-first'] / told['fcfs']:.2f})")
    print(
        f"the order of the policies is {'the same' if ordered else 'ANOTHER ONE'}; the machine changed by {drift:+.0%}"
    )
    precise = all(abs(told[name] / real[name] - 1) <= WORST_ERROR for name in real)
    sys.exit(0 if ordered and precise and ratio >= LEAST_RATIO else 1)


if __name__ == "__main__":
    main()
