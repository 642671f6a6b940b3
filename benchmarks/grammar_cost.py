"""What grammars cost: `python -m benchmarks.grammar_cost`.

First what a mask costs, for 1 to 256 rows: for answers that are the first of their grammar, and for later ones, whose
matchers know its masks. Then the time of a step with 256 rows that all have a grammar, compared with one with none,
where the mock device takes `--step-ms` (so that overlapped work is hidden behind it). The vocabulary is the demo
model's, padded to `--vocab`; pass `--tokenizer FOLDER` for another one.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from tokenyard.base import Int32Array, RowStart, SamplingParams, StepPlan
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.grammar import GrammarCache, GrammarRows
from tokenyard.executor.mock import load_executor

PROPERTIES = {"name": {"type": "string"}, "legs": {"type": "integer"}, "wild": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
GRAMMARS = {"json": "start: %json " + json.dumps(SCHEMA), "regex": r"start: /[a-z ]{1,400}/"}
ROUNDS = 20
ROWS = 256


def plan(rows: int, starts: list[RowStart], step: int = 0) -> StepPlan:
    """A step that decodes all rows."""
    ones, none = np.ones(rows, np.int32), np.zeros(0, np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    columns = {"page_rows": none, "page_columns": none, "page_ids": none}
    return StepPlan(
        step, numbers, ones, ones, ones, ones, ones, **columns, row_starts=starts, decode_rows=rows, delay_sampling=True
    )


def starts_of(rows: int, grammar: str) -> list[RowStart]:
    """All rows begin their answers."""
    known = np.zeros(1, np.int32)
    return [RowStart(row, SamplingParams(), known, 1, grammar=grammar) for row in range(rows)]


def kept_rows(grammar: str, tokenizer: str, vocab: int) -> GrammarRows:
    """Rows whose matchers are all new."""
    store = GrammarCache(vocab, (6,))
    store.compile(grammar, lambda: tokenizer)
    return GrammarRows(store, vocab, torch.device("cpu"))


def measure(kept: GrammarRows, vocab: int, grammar: str, rows: int) -> tuple[float, float, float]:
    """Medians over steps: microseconds a row for masks, for taking in tokens, milliseconds to put masks on logits."""
    kept.take(plan(rows, starts_of(rows, grammar)))
    step, logits = plan(rows, []), torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    times = np.empty((3, ROUNDS))
    for round_number in range(ROUNDS):
        marks = [time.perf_counter()]
        masks = kept.masks(step)
        marks.append(time.perf_counter())
        assert masks is not None
        scores = logits.clone()
        begun = time.perf_counter()
        masks.apply(scores)
        applied_s = time.perf_counter() - begun
        tokens = scores.argmax(-1).numpy().astype(np.int32)
        begun = time.perf_counter()
        kept.consume(step, tokens)
        times[:, round_number] = marks[1] - marks[0], time.perf_counter() - begun, applied_s
    masking, consuming, applying = np.median(times, axis=1)
    return masking / rows * 1e6, consuming / rows * 1e6, applying * 1e3


def chosen(kept: GrammarRows, step: StepPlan, logits: torch.Tensor) -> Int32Array:
    """What a device would sample under the masks."""
    scores = logits.clone()
    masks = kept.masks(step)
    if masks is not None:
        masks.apply(scores)
    return scores.argmax(-1).numpy().astype(np.int32)


def step_ms(store: GrammarCache, vocab: int, grammar: str, device_ms: float, steps: int) -> float:
    """Median milliseconds of a step of 256 rows, two in flight, as the overlapping event loop takes them."""
    executor = load_executor(vocab_size=vocab, step_ms=device_ms, max_pool_rows=ROWS, max_total_tokens=ROWS * 1024)
    kept = GrammarRows(store, vocab, torch.device("cpu"))
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0))
    for _ in range(2 if grammar else 1):
        # The second time over, the matchers are warm.
        kept.take(plan(ROWS, starts_of(ROWS, grammar)))
        for _ in range(steps if grammar else 0):
            kept.consume(plan(ROWS, []), chosen(kept, plan(ROWS, []), logits))
    kept.take(plan(ROWS, starts_of(ROWS, grammar)))
    before, tokens, marks = executor.launch(plan(ROWS, starts_of(ROWS, ""))), np.zeros(ROWS, np.int32), []
    executor.sample(before)
    for number in range(1, steps):
        step = plan(ROWS, [], number)
        ticket = executor.launch(step)
        executor.collect(before)
        if number > 1:
            kept.consume(step, tokens)
        tokens = chosen(kept, step, logits)
        executor.sample(ticket)
        before = ticket
        marks.append(time.perf_counter())
    return float(np.median(np.diff(marks))) * 1e3


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = (options.tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    store = GrammarCache(options.vocab, (6,))
    store.compile('start: "x"', lambda: text)
    print("grammar  rows  answers  compile ms  mask us a row  taking in us a row  ms to apply")
    for name, grammar in GRAMMARS.items():
        began = time.perf_counter()
        store.compile(grammar, lambda: text)
        compiled_ms = (time.perf_counter() - began) * 1e3
        for rows in (1, 32, ROWS):
            kept = kept_rows(grammar, text, options.vocab)
            for answers in ("first", "second", "later"):
                mask, own, apply_ms = measure(kept, options.vocab, grammar, rows)
                if answers != "second":
                    figures = f"{compiled_ms:11.2f} {mask:14.1f} {own:19.1f} {apply_ms:12.2f}"
                    print(f"{name:7} {rows:5}  {answers:7} {figures}")
    print(f"\n{ROWS} rows, device {options.step_ms:g} ms a step  ms a step  over plain")
    plain = step_ms(store, options.vocab, "", options.step_ms, options.steps)
    for name, grammar in {"none": "", **GRAMMARS}.items():
        took = step_ms(store, options.vocab, grammar, options.step_ms, options.steps)
        print(f"{name:33} {took:11.2f} {(took / plain - 1) * 100:+10.1f} %")


if __name__ == "__main__":
    main()
