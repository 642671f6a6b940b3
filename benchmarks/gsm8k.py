"""All GSM8K questions with one shared 5-shot prefix through HTTP, 64 at a time: is the prefix computed once?

Serves a small random Llama with the demo model's tokenizer (answers are noise; the path is real), sends every question
and checks: all are answered, `cached_tokens` covers the shared prefix for all but the first wave, no page is lost at
idle, memory stays flat. Exits with 1 if a check fails.

Run: python benchmarks/gsm8k.py --data PATH/gsm8k_test.jsonl.gz
"""

import argparse
import asyncio
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

DEMO = Path(__file__).resolve().parents[1] / "tokenyard" / "demo_model"
SHOTS, CONCURRENCY, ANSWER_TOKENS = 5, 64, 32


def model_folder(folder):
    """A config like the demo model's with room for long prompts, and its tokenizer."""
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": 8192}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    Path(folder, "config.json").write_text(json.dumps(config))


def prompts(path, limit):
    with gzip.open(path, "rt") as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    shots = "".join(f"Question: {item['question']}\nAnswer: {item['answer']}\n\n" for item in items[:SHOTS])
    return shots, [f"{shots}Question: {item['question']}\nAnswer:" for item in items[:limit]]


async def ask(session, url, prompt):
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return found["usage"]


async def run(url, questions, process):
    gate, usages, sizes = asyncio.Semaphore(CONCURRENCY), [], []

    async def one(session, prompt):
        async with gate:
            usages.append(await ask(session, url, prompt))
            if len(usages) % 200 == 0:
                sizes.append(sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]))

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        shared = await tokens_of(session, url, questions[0][: questions[0].rindex("Question:")])
        begin = time.monotonic()
        await asyncio.gather(*(one(session, prompt) for prompt in questions))
        seconds = time.monotonic() - begin
        await asyncio.sleep(0.5)
        async with session.get(f"{url}/server_info") as answer:
            state = (await answer.json())["internal_states"][0]
    return shared, usages, sizes, seconds, state


async def tokens_of(session, url, text):
    async with session.post(f"{url}/tokenize", json={"prompt": text}) as answer:
        return (await answer.json())["count"]


def start(folder, flags):
    command = [sys.executable, "-m", "tokenyard", "serve", folder, "--load-format", "dummy", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--max-running-requests", str(CONCURRENCY), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    for line in process.stderr:
        if match := re.search(r"ready at (http://\S+)", line):
            return process, match[1]
    sys.exit("the server did not start")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    options = parser.parse_args()
    _, questions = prompts(options.data, options.limit)
    with tempfile.TemporaryDirectory() as folder:
        model_folder(folder)
        process, url = start(folder, ["--log-level", "warning", *options.flags])
        try:
            shared, usages, sizes, seconds, state = asyncio.run(run(url, questions, psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.communicate()
    report(shared, usages, sizes, seconds, state)


def report(shared, usages, sizes, seconds, state):
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    without = sum(tokens < shared - 8 for tokens in cached)
    print(f"{len(usages)} questions answered in {seconds:.1f} s; shared prefix {shared} tokens")
    print(f"{100 * sum(cached) / prompt_tokens:.1f} % of {prompt_tokens} prompt tokens came from the cache")
    print(f"{without} requests did not hit the whole prefix")
    print(f"memory in MB over the run: {[size >> 20 for size in sizes]}")
    print(f"at idle: {state['used_tokens']} tokens used, {state['waiting']} waiting, {state['running']} running")
    flat = not sizes or sizes[-1] < 1.15 * sizes[len(sizes) // 3]
    good = without <= CONCURRENCY and state["used_tokens"] == state["running"] == state["waiting"] == 0 and flat
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
