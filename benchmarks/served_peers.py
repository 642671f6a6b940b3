"""Our server and vLLM's CPU server, as clients see them: `python -m benchmarks.served_peers --vllm PYTHON`.

Both serve a checkpoint of SmolLM2-135M's shape with random weights in bfloat16, with two threads, and get the same
requests from the same client: a slice of the Azure conversation trace, lengths and arrivals, longest lengths cut to
`--longest`. Prompts are random ids, drawn again for each run, so that nothing is cached. vLLM's capacity is what it
answers a second when all requests come at once, until three quarters have their answer (the last long ones run alone);
each server then gets the slice at shares of it, the arrivals stretched equally. Ours runs with `fcfs` and with `slo`,
so that speed and scheduling can be distinguished. Targets: `--ttft-ms` and `--tpot-ms`, for all. Prints one line of
JSON for each server and load. Without `--vllm` ours alone is measured, by its own capacity.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.mock_server import AnyServer
from benchmarks.router_cpu import free_ports
from benchmarks.smollm2 import SHAPE
from tokenyard.bench.backends import CompletionsBackend, RequestOptions
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.load_generator import ServerClient, run_load
from tokenyard.bench.results import Targets, summarize
from tokenyard.sim.traces.formats import read_trace

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/azure2023/AzureLLMInferenceTrace_conv.csv.gz"
LOADS = (0.5, 0.8, 1.0, 1.3)
START_S = 400
COMMON = ("--load-format", "dummy", "--dtype", "bfloat16")
RNG = np.random.default_rng(0)
TIMES = [f"{at}_{name}_ms" for name in ("ttft", "tpot") for at in ("median", "p95")]
SHOWN = ("completed", "failed", "request_goodput", "attainment", "output_throughput", *TIMES)


def make_checkpoint(folder):
    """A config, and a tokenizer that has a word for every id."""
    Path(folder, "config.json").write_text(json.dumps({**SHAPE, "torch_dtype": "bfloat16"}), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(Path(folder, "tokenizer.json")))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


def slice_of(options):
    """The slice: tokens of prompts and answers, and arrivals in seconds from the first."""
    trace = read_trace(TRACE, "azure")
    chosen = slice(options.first, options.first + options.requests)
    arrivals = np.asarray(trace.arrival_s[chosen], float)
    tokens = np.stack((trace.prompt_tokens[chosen], trace.output_tokens[chosen]), axis=1)
    lengths = np.minimum(tokens, options.longest).tolist()
    return lengths, arrivals - arrivals[0]


@contextmanager
def vllm_server(python, folder):
    """vLLM's own server; the block gets its address."""
    (port,) = free_ports(1)
    names = ["--model", folder, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment.pop("PYTHONPATH", None)
    with Path(folder, "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *names, *COMMON],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder,
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log.name)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def wait_until_healthy(url, process, log):
    """Until the server answers; ends the program if it ends."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"vLLM's server did not start:\n{Path(log).read_text(errors='replace')[-2000:]}")


@contextmanager
def our_server(policy, folder, options):
    """Ours with a policy; the block gets its address."""
    targets = ("--slo-ttft-ms", str(options.ttft_ms), "--slo-ttft-scale", "0", "--slo-tpot-ms", str(options.tpot_ms))
    tokens = ("--max-total-tokens", str(options.kv_tokens), "--enable-mixed-chunk")
    flags = ("--model-path", folder, "--schedule-policy", policy, *COMMON, *targets, *tokens, *options.ours)
    with AnyServer(*flags) as (host, port):
        yield f"http://{host}:{port}"


def drawn(lengths):
    """Prompts of random ids that no server has seen: each run has its own, so that nothing is cached."""
    prompts = []
    for asked, answered in lengths:
        ids = RNG.integers(10, SHAPE["vocab_size"], asked).tolist()
        prompts.append(DatasetRow(ids, asked, answered))
    return prompts


async def load(url, lengths, arrivals_s):
    """One run of the client."""
    async with ServerClient(url, {}) as target:
        model = (await target.get("/v1/models"))["data"][0]["id"]
        backend = CompletionsBackend(RequestOptions(model, ignore_eos=True, extra={}))
        await target.stream(backend, DatasetRow([11, 12, 13], 3, 4))
        return await run_load(target, backend, drawn(lengths), arrivals_s, max_concurrency=None)


def capacity(url, lengths):
    """Requests a second when all come at once, until three quarters have ended."""
    run = asyncio.run(load(url, lengths, [0.0] * len(lengths)))
    bad = [answer.error for answer in run.answers if answer.error]
    if bad:
        sys.exit(f"{url}: {len(bad)} requests failed: {bad[0]}")
    ends = sorted(answer.sent_s + answer.latency_s for answer in run.answers)
    most = max(3 * len(ends) // 4, 1)
    return most / ends[most - 1]


def measure(name, url, rate, options, lengths, arrivals):
    """All loads of one server."""
    targets = Targets({"ttft": options.ttft_ms, "tpot": options.tpot_ms})
    natural = (len(lengths) - 1) / arrivals[-1]
    for share in options.loads:
        run = asyncio.run(load(url, lengths, (arrivals * natural / (share * rate)).tolist()))
        found = summarize(run, targets, None)
        line = {"server": name, "load": share, "rate": round(share * rate, 3)}
        print(json.dumps(line | {key: round(found[key], 3) for key in SHOWN}), flush=True)


def main():
    """Measure vLLM's capacity, then all servers at shares of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--first", type=int, default=1000, help="place of the slice in the trace")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a prompt and of an answer at most")
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--kv-tokens", type=int, default=65536, help="room of our pool; vLLM has 2 GiB")
    parser.add_argument("--ours", nargs="*", default=[], help="further flags of our server")
    options = parser.parse_args()
    lengths, arrivals = slice_of(options)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        rate = None
        if options.vllm:
            with vllm_server(options.vllm, folder) as url:
                rate = capacity(url, lengths)
                print(json.dumps({"capacity of vLLM": round(rate, 3)}), flush=True)
                measure("vllm", url, rate, options, lengths, arrivals)
        for policy in ("fcfs", "slo"):
            with our_server(policy, folder, options) as url:
                own = capacity(url, lengths)
                print(json.dumps({f"capacity of ours, {policy}": round(own, 3)}), flush=True)
                measure(f"tokenyard {policy}", url, rate or own, options, lengths, arrivals)


if __name__ == "__main__":
    main()
