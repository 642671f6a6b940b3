"""A conversation that continues after its server was restarted: cached tokens and time to the first token, with KV on
disk and without.

The model has the shape of SmolLM2-135M and random weights. A first server answers a prompt and is stopped; a second
one gets prompt, answer and another question. The same is done without a store. The page cache is warm.

Run: python -m benchmarks.disk_restart [--tokens 512 2048]
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from benchmarks.smollm2 import SHAPE

ANSWER_TOKENS = 32
QUESTION_TOKENS = 32


class Server:
    """`tokenyard serve` of the random model, ready when made."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "tokenyard", "serve", "--port", "0", "--model-path", model]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--page-size", "16", *flags]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"ready at (\S+)", line):
                self._url = found[1]
                return
        raise RuntimeError("the server did not start")

    def ask(self, ids: list[int], tokens: int) -> tuple[list[int], int, float]:
        """The answer, how many tokens of the prompt were there, and the seconds that it took."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps({"input_ids": ids, "sampling_params": sampling}).encode()
        request = urllib.request.Request(self._url + "/generate", data, {"content-type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            answered = json.load(answer)
        return answered["output_ids"], answered["meta_info"]["cached_tokens"], time.perf_counter() - begin

    def stop(self) -> None:
        """Stop it as an operator would."""
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)


def measure(model: str, tokens: int, flags: list[str]) -> tuple[list[int], int, float]:
    """The first token after a restart, cached tokens and seconds to it."""
    rng = np.random.default_rng(tokens)
    prompt = rng.integers(3, SHAPE["vocab_size"], tokens).tolist()
    question = rng.integers(3, SHAPE["vocab_size"], QUESTION_TOKENS).tolist()
    first = Server(model, *flags)
    answer, _, _ = first.ask(prompt, ANSWER_TOKENS)
    first.stop()
    second = Server(model, *flags)
    # The cost of a first request beyond its tokens is not counted.
    second.ask(question, 1)
    found = second.ask(prompt + answer + question, 1)
    second.stop()
    return found


def main() -> None:
    """Measure with and without a store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": 0, "bos_token_id": 0}))
        for tokens in chosen.tokens:
            store = ["--enable-hierarchical-cache", "--hicache-storage-backend", "disk"]
            store += ["--hicache-storage-dir", f"{folder}/kv-{tokens}"]
            (token, cached, with_s), (other, _, without_s) = measure(folder, tokens, store), measure(folder, tokens, [])
            same = "same token" if token == other else "ANOTHER TOKEN"
            print(
                f"{tokens:5} tokens before: {cached} cached, first token after {1000 * with_s:.0f} ms; "
                f"without a store {1000 * without_s:.0f} ms ({without_s / with_s:.0f} times as long; {same})",
                flush=True,
            )


if __name__ == "__main__":
    main()
