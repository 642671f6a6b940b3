"""Prompt-lookup speculation on real texts: tokens a second with it and without, alternating, through the offline `LLM`.

Run from the repository root: `python -m benchmarks.speculation [--pairs 8] [--batches 1 8 64]`. The model has random
weights of the shape of SmolLM2-135M in bfloat16 and computes every step in full; only what it samples is replaced by
the reference text. Three kinds of work:

rewrite: the prompt is a file of this repository as it was before a commit, the answer the file after it (from git).
prose: the prompt is one such file, the answer another one of another kind, where lookups find little.
random: prompt and answer are random tokens, where lookups find nothing.

A batch of 8 means that 8 requests run at any time: `--turns` times as many are sent, and one starts when another ends.
Of 8 requests alone those without drafts would be left behind in ever smaller batches, which is not how a server runs.

Each figure is the best of the rounds, as other work on the machine only ever adds time. With `--engines none none` both
are plain, which shows how much two equal engines differ on the machine.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.smollm2 import SHAPE
from tokenyard import LLM, SamplingParams
from tokenyard.config import DEMO_MODEL, Settings
from tokenyard.executor.sampling.sampler import Sampler

Ids = list[int]
MAX_PROMPT, MAX_ANSWER = 1500, 400


@dataclass(slots=True)
class Work:
    """Prompts and the answers that are forced on them."""

    prompts: list[Ids]
    answers: list[Ids]


class ForcedSampler:
    """Stands in for the sampler of an executor: computes its choice, and then answers with the reference's token."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._texts: dict[int, np.ndarray] = {}
        self.references: dict[tuple[int, ...], Ids] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def take(self, starts: Sequence[Any]) -> None:
        """Take over rows that start, each with the reference of its prompt."""
        self._sampler.take(starts)
        for start in starts:
            prompt = start.known_ids[: start.prompt_tokens].tolist()
            # The steps that are measured at the start have no reference.
            self._texts[start.pool_row] = np.array(prompt + self.references.get(tuple(prompt), [0]), np.int64)

    def sample(
        self, logits: torch.Tensor, pool_rows: np.ndarray, positions: np.ndarray, masks: Any = None
    ) -> torch.Tensor:
        """The reference's tokens at the positions, after sampling in full."""
        self._sampler.sample(logits, pool_rows, positions, masks)
        return self._forced(pool_rows, positions)

    def sample_runs(
        self, logits: torch.Tensor, pool_rows: np.ndarray, positions: np.ndarray, drafts: np.ndarray, masks: Any = None
    ) -> torch.Tensor:
        """The same where rows verify drafts."""
        self._sampler.sample_runs(logits, pool_rows, positions, drafts, masks)
        return self._forced(pool_rows, positions)

    def _forced(self, pool_rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        pairs = zip(pool_rows.tolist(), positions.tolist(), strict=True)
        # Past the end, a draft is sampled that no answer keeps.
        tokens = [self._texts[row][min(position, len(self._texts[row]) - 1)] for row, position in pairs]
        return torch.tensor(np.array(tokens, np.int64))


def git(*words: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, encoding="utf-8").stdout


def rewrites(count: int, tokenizer: Tokenizer) -> Work:
    """Files of this repository before and after a commit that changed them, the latest first."""
    found = Work([], [])
    for commit in git("log", "--format=%H", "--no-merges", "-n", "400").split():
        for line in git("show", "--format=", "--name-status", "--diff-filter=M", commit).splitlines()[:1]:
            path = line.split("\t")[1]
            if not path.endswith((".py", ".md")):
                continue
            before, after = (tokenizer.encode(git("show", f"{at}:{path}")).ids for at in (f"{commit}^", commit))
            if 100 <= len(before) <= MAX_PROMPT and len(after) >= 100:
                found.prompts.append(before)
                found.answers.append(after[:MAX_ANSWER])
        if len(found.prompts) >= count:
            return found
    raise SystemExit(f"only {len(found.prompts)} rewrites of a fitting length in git; ask for fewer --pairs")


def workloads(count: int, vocabulary: int) -> dict[str, Work]:
    """The three kinds of work, `count` requests each."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    rewrite = rewrites(count, tokenizer)
    rng = np.random.default_rng(1)
    noise = rng.integers(3, vocabulary, (2, count, MAX_ANSWER)).tolist()
    return {
        "rewrite": rewrite,
        "prose": Work(rewrite.prompts, rewrite.answers[1:] + rewrite.answers[:1]),
        "random": Work(noise[0], noise[1]),
    }


def seconds(llm: LLM, sampler: ForcedSampler, work: Work) -> float:
    """How long the requests take together."""
    sampler.references = {tuple(prompt): answer for prompt, answer in zip(work.prompts, work.answers, strict=True)}
    length = min(map(len, work.answers))
    sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
    begin_s = time.perf_counter()
    found = llm.generate(work.prompts, sampling)
    taken = time.perf_counter() - begin_s
    for each, answer in zip(found, work.answers, strict=True):
        assert each.completions[0].token_ids == answer[:length], "speculation changed an answer"
    return taken


def load(folder: str, options: argparse.Namespace, algorithm: str, batch: int) -> tuple[LLM, ForcedSampler]:
    """An engine for `batch` requests at once whose sampler is forced."""
    made: list[ForcedSampler] = []

    def forced(*arguments: Any) -> ForcedSampler:
        made.append(ForcedSampler(Sampler(*arguments)))
        return made[-1]

    with mock.patch("tokenyard.executor.runner.Sampler", forced):
        llm = LLM(
            folder,
            device="cpu",
            dtype="bfloat16",
            threads=options.threads,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_total_tokens=batch * (MAX_PROMPT + MAX_ANSWER),
            max_running_requests=batch,
            disable_radix_cache=True,
            speculative_algorithm=algorithm,
            speculative_num_draft_tokens=options.drafts,
        )
    return llm, made[0]


def measure(
    engines: list[tuple[LLM, ForcedSampler]], kind: str, work: Work, batch: int, options: argparse.Namespace
) -> None:
    """Run one kind of work at one batch size with both engines by turns, and print a line."""
    count = max(options.turns * batch, len(work.prompts))
    places = np.arange(count) % len(work.prompts)
    repeated = Work([work.prompts[i] for i in places], [work.answers[i] for i in places])
    best = [np.inf, np.inf]
    for _ in range(options.rounds):
        for place, (llm, sampler) in enumerate(engines):
            best[place] = min(best[place], seconds(llm, sampler, repeated))
    tokens = count * min(map(len, repeated.answers))
    plain, drafting = (tokens / one for one in best)
    first, second = options.engines
    print(
        f"{kind} batch {batch}: {plain:.1f} tok/s {first}, {drafting:.1f} {second}, ratio {drafting / plain:.2f}",
        flush=True,
    )


def main() -> None:
    """Print tokens a second of both engines and their ratio, for each kind of work and batch."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kinds", nargs="+", default=["rewrite", "prose", "random"])
    parser.add_argument("--engines", nargs=2, default=["none", "NGRAM"], help="--speculative-algorithm of both")
    parser.add_argument("--pairs", type=int, default=8, help="different requests of each kind, repeated to fill turns")
    parser.add_argument("--turns", type=int, default=3, help="requests of a measurement by the batch")
    parser.add_argument("--drafts", type=int, default=Settings().speculative_num_draft_tokens)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        works = workloads(max(options.pairs, 2), SHAPE["vocab_size"])
        for batch in options.batches:
            engines = [load(folder, options, algorithm, batch) for algorithm in options.engines]
            for kind in options.kinds:
                measure(engines, kind, works[kind], batch, options)
            for llm, _ in engines:
                llm.close()


if __name__ == "__main__":
    main()
