"""Samples the demo model at its default settings and checks that it does not loop and comes to an end.

    python tools/check_demo_model.py --model tokenyard/demo_model

Prints one line for each prompt and a summary; the exit status is 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenyard import LLM

CHAT_PROMPTS = (
    "Tell me a story about a fox",
    "Tell me a story about a dog and a ball.",
    "Write a story about a little girl",
    "Tell me a story about a dragon",
    "Can you tell a story about a frog?",
    "Write a short story about the sea.",
    "Tell me a story about Anna",
    "Tell me a bedtime story.",
    "Tell me a fable about a lion",
    "Write a story that begins: One day, a cat found a red hat.",
    "Once upon a time",
    "Tell me a story about a robot and a bird",
    "Write a story about a boy named Max",
    "Tell me a story",
)
COMPLETION_PROMPTS = (
    "Once upon a time",
    "One day, a little bear",
    "There was a king who",
    "Lily and Tom went to the park.",
    "The old woman said,",
    "Tim had a big red truck.",
)
NEW_TOKENS = 200
LONG_NGRAM, LONG_NGRAM_LIMIT = 8, 3
SHORT_NGRAM, DISTINCT_BOUND = 4, 0.75


@dataclass(frozen=True)
class Repetition:
    """How far one text repeats itself.

    `top_long`: how often its commonest 8-gram occurs; `distinct`: distinct 4-grams over all 4-grams, 0 to 1.
    """

    top_long: int
    distinct: float

    @property
    def loops(self) -> bool:
        """Whether a bound is broken: an 8-gram three times or more, or too few distinct 4-grams."""
        return self.top_long >= LONG_NGRAM_LIMIT or self.distinct < DISTINCT_BOUND


def repetition_of(ids: Sequence[int]) -> Repetition:
    """Measure how far the token ids repeat themselves; a text too short for an n-gram repeats nothing."""
    long = Counter(tuple(ids[start : start + LONG_NGRAM]) for start in range(len(ids) - LONG_NGRAM + 1))
    short = Counter(tuple(ids[start : start + SHORT_NGRAM]) for start in range(len(ids) - SHORT_NGRAM + 1))
    distinct = len(short) / short.total() if short else 1.0
    return Repetition(max(long.values(), default=0), distinct)


def sample_answers(folder: Path, seed: int, new_tokens: int) -> list[tuple[str, str, list[int], bool]]:
    """Return (prompt, text, new token ids without the end token, whether it ended) for every prompt."""
    prompts = CHAT_PROMPTS + COMPLETION_PROMPTS
    asked = [[{"role": "user", "content": prompt}] for prompt in CHAT_PROMPTS] + [*COMPLETION_PROMPTS]
    with LLM(folder, device="cpu", dtype="float32", log_level="warning") as llm:
        params = [
            llm.default_sampling_params(seed=seed * len(prompts) + place, max_new_tokens=new_tokens)
            for place in range(len(prompts))
        ]
        found = [generation.completions[0] for generation in llm.generate(asked, params)]
    answers = []
    for prompt, answer in zip(prompts, found, strict=True):
        ended = answer.finish_reason == "stop"
        answers.append((prompt, answer.text, answer.token_ids[:-1] if ended else answer.token_ids, ended))
    return answers


def main() -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check that the demo model does not loop.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--show", action="store_true", help="print the texts too")
    args = parser.parse_args()
    loops, ends, lowest = 0, 0, 1.0
    answers = sample_answers(args.model, args.seed, args.new_tokens)
    for prompt, text, ids, ended in answers:
        found = repetition_of(ids)
        loops, ends, lowest = loops + found.loops, ends + ended, min(lowest, found.distinct)
        mark = "LOOPS" if found.loops else "ok"
        figures = f"tokens {len(ids):3} ended {ended!s:5} 8-gram x{found.top_long} distinct {found.distinct:.2f}"
        print(f"{mark:5} {figures} {prompt}")
        if args.show:
            print(text, end="\n\n")
    print(f"{len(answers)} prompts: {loops} loop, {ends} ended, lowest distinct 4-gram ratio {lowest:.2f}")
    return int(loops > 0)


if __name__ == "__main__":
    sys.exit(main())
