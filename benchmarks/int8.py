"""What int8 weights cost and gain: `python -m benchmarks.int8 [--text FILE] [--shape smol qwen]`.

Price: the perplexity of the demo model on `--text` (plain text or gzip; windows of 256 tokens), of `--quantization q8`
and `q4` too, and how far the logits of random weights of each shape move, as a share of their spread. Gain: the fastest
step of each kind, with unquantized and with int8 weights, alternating in one run. Prints one line of JSON for each
result.
"""

import argparse
import gzip
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.native_step import SHAPES, batch_of
from tokenyard.executor.backend_choice import QUANTIZATIONS
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.runner import ModelExecutor

KINDS = ("none", "int8")
DEMO = Path(__file__).resolve().parents[1] / "tokenyard" / "demo_model"
TEXT = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "tinystories" / "tinystories_val.txt.gz"
WINDOW = 256
STEPS = (("decode 1", 1, 575, 1), ("decode 8", 8, 575, 1), ("decode 32", 32, 575, 1), ("prefill 512", 1, 0, 512))
"""Name, rows, tokens that each has computed, tokens that each computes."""


def load(folder: str, quantization: str, *, tokens: int, rows: int, dummy: bool, dtype: str) -> ModelExecutor:
    """An executor on the native kernels; its KV pool holds `tokens` tokens."""
    return load_executor(
        folder,
        device="cpu",
        dtype=dtype,
        load_format="dummy" if dummy else "auto",
        max_total_tokens=tokens,
        max_pool_rows=rows,
        model_impl="native",
        quantization=quantization,
    )


def chunk_logits(executor: ModelExecutor, ids: list[int]) -> torch.Tensor:
    """Logits of all tokens of one prompt: float32[tokens, vocabulary]."""
    batch = batch_of(executor, 1, 0, len(ids), np.random.default_rng(0))
    batch.token_ids[:] = torch.tensor(ids)
    with torch.inference_mode():
        executor.model.step(batch)
        return executor.model.logits(0, len(ids)).clone()


def perplexity(executor: ModelExecutor, windows: list[list[int]]) -> float:
    """Of the model on texts, every token but the first of a window."""
    loss = count = 0.0
    for ids in windows:
        found = chunk_logits(executor, ids)[:-1]
        loss += float(torch.nn.functional.cross_entropy(found, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return math.exp(loss / count)


def price(text: Path, count: int) -> None:
    """Print the demo model's perplexity with float32 and bfloat16 weights, and with each that is rounded at load."""
    given = gzip.decompress(text.read_bytes()) if text.suffix == ".gz" else text.read_bytes()
    words = given.decode()[: 12 * WINDOW * count]
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(words).ids
    windows = [ids[i : i + WINDOW] for i in range(0, min(len(ids), count * WINDOW) - WINDOW + 1, WINDOW)]
    found = {}
    kinds = [("float32", "float32", "none"), ("bfloat16", "bfloat16", "none")]
    kinds += [(name, "bfloat16", name) for name in QUANTIZATIONS if name != "none"]
    for name, dtype, quantization in kinds:
        executor = load(str(DEMO), quantization, tokens=2 * WINDOW, rows=1, dummy=False, dtype=dtype)
        found[name] = round(perplexity(executor, windows), 4)
    print(json.dumps({"perplexity of the demo model": found, "windows": len(windows), "text": text.name}), flush=True)


def moved(folder: str, name: str) -> None:
    """Print how far logits of random weights move from float32's."""
    ids = np.random.default_rng(1).integers(0, SHAPES[name]["vocab_size"], 64).tolist()
    given = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]
    exact, plain, rounded = (
        chunk_logits(load(folder, kind, tokens=256, rows=1, dummy=True, dtype=dtype), ids) for dtype, kind in given
    )
    off = {kind: float((one - exact).std() / exact.std()) for kind, one in (("bfloat16", plain), ("int8", rounded))}
    print(json.dumps({"logits moved, share of their spread": off, "shape": name}), flush=True)


def gain(folder: str, name: str, seconds: float) -> None:
    """Print the fastest steps by turns."""
    both = {kind: load(folder, kind, tokens=32 * 600, rows=32, dummy=True, dtype="bfloat16") for kind in KINDS}
    for title, rows, start, count in STEPS:
        batches = {kind: batch_of(one, rows, start, count, np.random.default_rng(0)) for kind, one in both.items()}
        best, end_s = dict.fromkeys(KINDS, math.inf), time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            for kind, executor in both.items():
                begin_s = time.perf_counter()
                with torch.inference_mode():
                    executor.model.step(batches[kind])
                best[kind] = min(best[kind], time.perf_counter() - begin_s)
        rates = {kind: round(rows * count / best[kind], 1) for kind in KINDS}
        line = {"shape": name, "step": title, "tok/s": rates, "ratio": round(best["none"] / best["int8"], 2)}
        print(json.dumps(line), flush=True)


def main() -> None:
    """Print the price, then what each shape gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--shape", nargs="*", default=["smol"], choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of step")
    options = parser.parse_args()
    if options.text.exists():
        price(options.text, options.windows)
    else:
        print(json.dumps({"perplexity of the demo model": None, "why": f"there is no {options.text}; give --text"}))
    for name in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
            moved(folder, name)
            gain(folder, name, options.seconds)


if __name__ == "__main__":
    main()
