"""What grammars cost: `python -m benchmarks.grammar_cost`. Compiling, masks and their use for 1 to 256 rows.

The vocabulary is the demo model's, padded to `--vocab`; pass `--tokenizer FOLDER` for another one.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from tokenyard.base import RowStart, SamplingParams, StepPlan
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.grammar import GrammarRows, GrammarStore

PROPERTIES = {"name": {"type": "string"}, "legs": {"type": "integer"}, "wild": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
GRAMMARS = {"json": "start: %json " + json.dumps(SCHEMA), "regex": r"start: /[a-z ]{1,200}/"}
STEPS = 20


def plan(rows: int, starts: list[RowStart]) -> StepPlan:
    """A step that decodes all rows."""
    ones, none = np.ones(rows, np.int32), np.zeros(0, np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    columns = {"page_rows": none, "page_columns": none, "page_ids": none}
    return StepPlan(0, numbers, ones, ones, ones, ones, ones, **columns, row_starts=starts, delay_sampling=True)


def measure(store: GrammarStore, vocab: int, grammar: str, rows: int) -> tuple[float, float]:
    """(microseconds a row and step with masks and tokens taken in, milliseconds to put the masks on logits)."""
    known = np.zeros(1, np.int32)
    starts = [RowStart(row, SamplingParams(), known, 1, grammar=grammar) for row in range(rows)]
    kept = GrammarRows(store, vocab, torch.device("cpu"))
    kept.take(plan(rows, starts))
    step, logits = plan(rows, []), torch.randn(rows, vocab)
    masking = applying = 0.0
    for _ in range(STEPS):
        began = time.perf_counter()
        masks = kept.masks(step)
        masking += time.perf_counter() - began
        assert masks is not None
        began = time.perf_counter()
        masks.apply(scores := logits.clone())
        applying += time.perf_counter() - began
        began = time.perf_counter()
        kept.consume(step, scores.argmax(-1).numpy().astype(np.int32))
        masking += time.perf_counter() - began
    return masking / STEPS / rows * 1e6, applying / STEPS * 1e3


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL)
    parser.add_argument("--vocab", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = (options.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    store = GrammarStore(options.vocab, (6,))
    store.compile('start: "x"', lambda: text)
    print("grammar  rows  compile ms  us a row and step  ms to apply")
    for name, grammar in GRAMMARS.items():
        began = time.perf_counter()
        store.compile(grammar, lambda: text)
        compiled_ms = (time.perf_counter() - began) * 1e3
        for rows in (1, 32, 256):
            own, apply_ms = measure(store, options.vocab, grammar, rows)
            print(f"{name:7} {rows:5} {compiled_ms:11.2f} {own:18.1f} {apply_ms:12.2f}")


if __name__ == "__main__":
    main()
