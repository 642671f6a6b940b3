"""What applications notice: `python -m benchmarks.applications [fork | schemas | first | hostile]`.

fork: how many tokens of prompts a fork of 8 computes in the frontend language, compared with eight programs
without one.
schemas: the time from a schema that is new to the first mask, for the tools of BFCL; with `--peer PYTHON` also by
xgrammar, in its own environment.
first: the time to the first token over HTTP, with no schema, a new one and a known one.
hostile: the pace of 16 plain streams alone, and together with costly grammars.
"""

import argparse
import asyncio
import gzip
import http.client
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.mock_server import AnyServer
from tokenyard import LLM, lang
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.grammar import GrammarCache
from tokenyard.local import LocalApi
from tokenyard.server.openai.structured_outputs import Grammar, schema_rule

BFCL = Path(__file__).resolve().parents[1] / "../shared/prompts/BFCL_v4_multiple.jsonl.gz"
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
STREAMS = 16
PEER = """
import json, sys, time
import xgrammar
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_str(open(sys.argv[1]).read())
words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
info = xgrammar.TokenizerInfo([word for word, _ in words], xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[6])
mask, times = xgrammar.allocate_token_bitmask(1, info.vocab_size), []
for schema in json.load(sys.stdin):
    begun = time.perf_counter()
    made = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_json_schema(json.dumps(schema))
    xgrammar.GrammarMatcher(made).fill_next_token_bitmask(mask)
    times.append(time.perf_counter() - begun)
print(json.dumps(times))
"""


@lang.function
def forked(s: lang.ProgramState, parent: str) -> None:
    """A parent and eight that go on from it."""
    s += parent
    forks = s.fork(8)
    for place, fork in enumerate(forks):
        fork += f" {place}." + lang.gen("part", max_tokens=8)
    forks.join()


@lang.function
def alone(s: lang.ProgramState, parent: str, place: int) -> None:
    """One of the eight, by itself."""
    s += parent + f" {place}." + lang.gen("part", max_tokens=8)


def fork(words: int) -> None:
    """Print tokens and seconds of a fork, and of eight programs that come at once."""
    parent = " ".join(f"word{number % 97}" for number in range(words))
    for name in ("fork of 8", "8 programs"):
        with LLM(executor="mock", mock_step_ms=5.0) as llm:
            backend = LocalApi(llm).backend()
            begun = time.perf_counter()
            if name == "fork of 8":
                forked.run(parent=parent, backend=backend)
            else:
                alone.run_batch([{"parent": parent, "place": place} for place in range(8)], backend=backend)
            took = time.perf_counter() - begun
            counters = llm.run(llm.manager.snapshot()).result()["counters"]
            length = len(llm.tokenizer.encode(parent).ids) if llm.tokenizer else 0
        computed = counters["prompt_tokens"] - counters["hit_tokens"]
        print(f"{name:11} parent of {length} tokens: {computed} prompt tokens computed, {took:.2f} s")


def tools(most: int) -> list[Any]:
    """Parameters of real tools as JSON Schema."""

    def schema_of(value: Any) -> Any:
        if isinstance(value, list):
            return [schema_of(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {key: schema_of(item) for key, item in value.items() if key not in ("optional", "default", "format")}
        if isinstance(found.get("type"), str):
            found["type"] = TYPES.get(found["type"], found["type"])
        return found

    lines = gzip.decompress(BFCL.read_bytes()).decode().splitlines()
    found = [schema_of(function["parameters"]) for line in lines for function in json.loads(line)["function"]]
    return [schema for schema in found if "any" not in json.dumps(schema)][:most]


def schemas(most: int, peer: str, folder: Path) -> None:
    """Print milliseconds from a new schema to its first mask."""
    found, path = tools(most), folder / "tokenizer.json"
    text, times = path.read_text(encoding="utf-8"), {"llguidance": []}
    store = GrammarCache(Tokenizer.from_str(text).get_vocab_size(), (6,))
    store.compile('start: "x"', lambda: text)
    for schema in found:
        begun = time.perf_counter()
        store.compile(Grammar("answer", {"answer": schema_rule(schema, lenient=False, param="x")}).text(), lambda: text)
        times["llguidance"].append(time.perf_counter() - begun)
    if peer:
        command = [peer, "-c", PEER, str(path)]
        ran = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True)
        times["xgrammar"] = json.loads(ran.stdout)
    show(times, "to the first mask")


def first_token_s(address: tuple[str, int], schema: Any) -> float:
    """Seconds from sending a request to the first bytes of its stream's body, on a separate connection."""
    body = {"prompt": "Once", "max_tokens": 2, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.connect()
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body | ({"json_schema": schema} if schema else {})))
    answer = connection.getresponse()
    answer.read(1)
    took = time.perf_counter() - begun
    assert answer.status == 200, answer.read()
    connection.close()
    return took


def first(most: int) -> None:
    """Print milliseconds to the first token, for requests that come one at a time."""
    found = tools(most)
    times: dict[str, list[float]] = {"no schema": [], "new schema": [], "known schema": []}
    with AnyServer("--device", "cpu") as address:
        first_token_s(address, {"type": "object", "title": "warm"})
        for schema in found:
            for name, wish in (("no schema", None), ("new schema", schema), ("known schema", schema)):
                times[name].append(first_token_s(address, wish))
    show(times, "to the first token over HTTP")


def show(times: dict[str, list[float]], what: str) -> None:
    """Print a line for each list of seconds."""
    for name, each in times.items():
        p50, p90, worst = np.array([np.median(each), np.percentile(each, 90), max(each)]) * 1e3
        print(f"{name:12} {len(each)} schemas: p50 {p50:.2f}, p90 {p90:.2f}, max {worst:.2f} ms {what}")


async def pace(api: LocalApi, tokens: int, costly: list[dict[str, Any]]) -> list[float]:
    """Seconds between the tokens of 16 streams, while costly requests come one after the other."""
    gaps: list[float] = []

    async def stream(seed: int) -> None:
        body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": True}
        async with api.ask("POST", "/v1/completions", body) as answer:
            before = 0.0
            async for _ in answer.pieces:
                now = time.perf_counter()
                gaps.extend([now - before] if before else [])
                before = now

    async def harm() -> None:
        while costly:
            for body in costly:
                await api.whole("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 16, **body})

    harming = asyncio.create_task(harm())
    await asyncio.gather(*(stream(seed) for seed in range(STREAMS)))
    harming.cancel()
    return gaps


def hostile(tokens: int) -> None:
    """Print the pace of plain streams, alone and with costly grammars that are new each time."""
    optional = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(900)}}
    costly = {
        "alone": [],
        "900 optional properties": [{"structured_outputs": {"json": optional | {"title": str(n)}}} for n in range(50)],
        "(.*a.{20}){5}": [{"regex": f"(.*a.{{20}}){{5}}|x{number}"} for number in range(50)],
        "refused schemas": [
            {"structured_outputs": {"json": {"uniqueItems": True, "title": str(n)}}} for n in range(50)
        ],
    }
    with LLM(DEMO_MODEL, device="cpu") as llm:
        api = LocalApi(llm)
        for name, bodies in costly.items():
            p50, p99 = np.percentile(asyncio.run(pace(api, tokens, bodies)), [50, 99]) * 1e3
            print(f"{name:24} {p50:6.1f} ms between tokens, p99 {p99:.1f} ms")


def main() -> None:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="fork, schemas, first, hostile; all if none is named")
    parser.add_argument("--words", type=int, default=200, help="length of the fork's parent")
    parser.add_argument("--schemas", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=200, help="of each plain stream")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL, help="a folder with tokenizer.json, for schemas")
    parser.add_argument("--peer", default="", metavar="PYTHON", help="a Python with xgrammar and tokenizers")
    options = parser.parse_args()
    chosen = options.what or ["fork", "schemas", "first", "hostile"]
    if "fork" in chosen:
        fork(options.words)
    if "schemas" in chosen:
        schemas(options.schemas, options.peer, options.tokenizer)
    if "first" in chosen:
        first(options.schemas)
    if "hostile" in chosen:
        hostile(options.tokens)


if __name__ == "__main__":
    main()
