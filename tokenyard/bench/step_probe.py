"""A small grid of requests that makes any OpenAI-compatible server show the times of its steps."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tokenyard.base import ConfigError
from tokenyard.bench.backends import RequestBackend, RequestFuncOutput
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.load_generator import ServerClient, run_load
from tokenyard.cost.observed_requests import ObservedRequest

ALONE_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ALONE_REPEATS = 2
TOGETHER = (
    (1, 128),
    (4, 128),
    (16, 128),
    (64, 128),
    (1, 1024),
    (4, 1024),
    (16, 1024),
    (64, 1024),
    (2, 4096),
    (8, 4096),
)
"""Requests at once, and tokens of each prompt."""

ANSWER_TOKENS = 33
STAGGERED_TOKENS = 96
WORDS = ("time", "day", "hand", "part", "child", "eye", "place", "work", "week", "case", "point", "number", "group")


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests that are sent together: `rows` of about `prompt_tokens` with answers of `output_tokens`."""

    rows: int
    prompt_tokens: int
    output_tokens: int


def probes(context_length: int | None) -> list[Probe]:
    """The grid, small probes first, as far as prompt and answer fit into the context."""
    alone = [Probe(1, tokens, 2) for tokens in ALONE_TOKENS for _ in range(ALONE_REPEATS)]
    together = [Probe(rows, tokens, ANSWER_TOKENS) for rows, tokens in TOGETHER]
    together += [replace(probe, output_tokens=STAGGERED_TOKENS) for probe in together if 1 < probe.rows <= 16]
    fitting = [
        probe
        for probe in (*alone, *together)
        if context_length is None or 1.2 * probe.prompt_tokens + probe.output_tokens < context_length
    ]
    return sorted(fitting, key=lambda probe: probe.rows * (probe.prompt_tokens + 16 * probe.output_tokens))


async def run_probes(
    target: ServerClient,
    backend: RequestBackend,
    wanted: list[Probe],
    seconds: float,
    seed: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> list[list[ObservedRequest]]:
    """The requests of each probe as the client saw them, none started after `seconds`.

    Prompts are random words, so that no two share a prefix. Raises ConfigError if the server refuses the first one.
    """
    rng = random.Random(seed)
    warm = await _send(target, backend, Probe(1, 32, ANSWER_TOKENS), rng, 1.0)
    if warm[0].error:
        raise ConfigError(f"{target.base_url} refused a request: {warm[0].error}")
    if warm[0].output_tokens < 2 or not warm[0].prompt_tokens:
        raise ConfigError(
            f"{target.base_url} did not stream an answer with its token counts; it must support stream_options "
            "include_usage and ignore_eos"
        )
    tokens_per_word = warm[0].prompt_tokens / 32
    begin = time.monotonic()
    runs: list[list[ObservedRequest]] = []
    for probe in wanted:
        if time.monotonic() - begin >= seconds:
            break
        runs.append(list(_observed(await _send(target, backend, probe, rng, tokens_per_word))))
        on_done()
    return [run for run in runs if run]


async def _send(
    target: ServerClient, backend: RequestBackend, probe: Probe, rng: random.Random, tokens_per_word: float
) -> list[RequestFuncOutput]:
    """Send the requests of a probe at once; those of a long one a few steps apart, so that prompts meet decodes."""
    words = max(round(probe.prompt_tokens / tokens_per_word), 1)
    prompts = [
        DatasetRow(" ".join(f"{rng.choice(WORDS)}{rng.randrange(10)}" for _ in range(words)), 0, probe.output_tokens)
        for _ in range(probe.rows)
    ]
    apart = 0.0
    if probe.output_tokens == STAGGERED_TOKENS:
        alone = await target.stream(backend, prompts.pop())
        apart = alone.latency_s / (2 * probe.rows)
    run = await run_load(target, backend, prompts, [apart * n for n in range(len(prompts))], max_concurrency=None)
    return run.answers


def _observed(answers: list[RequestFuncOutput]) -> Iterator[ObservedRequest]:
    for one in answers:
        if not one.error and one.output_tokens > 0 and one.ttft_s > 0.0:
            start, cached = one.sent_s, min(one.cached_tokens, one.prompt_tokens)
            yield ObservedRequest(
                start, start + one.ttft_s, start + one.latency_s, one.prompt_tokens, one.output_tokens, cached
            )
