"""CPU time that the API process spends on each streamed chunk.

Starts `tokenyard serve` with the mock executor, opens many streams at once and reads the server's own CPU clock before
and after. The client counts events on plain sockets, so that it costs little. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys

import psutil


async def read_stream(host: str, port: int, tokens: int) -> int:
    """Open one stream and return how many events it brought."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    ).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=25.0)
    options = parser.parse_args()
    flags = ["--port", "0", "--executor", "mock", "--mock-step-ms", str(options.step_ms), "--log-level", "warning"]
    command = [sys.executable, "-m", "tokenyard", "serve", *flags, "--max-running-requests", str(options.streams)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        assert process.stderr is not None
        for line in process.stderr:
            match = re.search(r"ready at http://([\d.]+):(\d+)", line)
            if match:
                break
        else:
            sys.exit("the server did not start")
        host, port = match[1], int(match[2])
        server = psutil.Process(process.pid)
        asyncio.run(load(host, port, 4, 10))
        before = server.cpu_times()
        chunks = asyncio.run(load(host, port, options.streams, options.tokens))
        after = server.cpu_times()
        process.terminate()
    user_us = (after.user - before.user) * 1e6 / chunks
    system_us = (after.system - before.system) * 1e6 / chunks
    print(
        json.dumps(
            {
                "streams": options.streams,
                "chunks": chunks,
                "cpu_us_per_chunk": round(user_us + system_us, 1),
                "user_us_per_chunk": round(user_us, 1),
                "system_us_per_chunk": round(system_us, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
