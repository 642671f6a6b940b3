"""The prompts of a benchmark, with the number of tokens that each answer should have."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import ConfigError, Int32Array
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.trace_files import read_json_lines
from tokenyard.sim.traces.workload import Workload

PromptContent = str | list[int] | list[dict[str, Any]]

REFIT_ROUNDS = 4
"""How often random text is cut or extended: text of random tokens seldom tokenizes back to as many tokens."""


@dataclass(slots=True)
class DatasetRow:
    """One request of a benchmark.

    content: text, token ids or messages.
    prompt_tokens: 0 if only the server can count them.
    arrival_s: time in the recording, None if it has none.
    extra: further fields of the request's body, sent unchanged.
    session: the conversation that it is a turn of, sent as the header X-Session-Id; "" for none.
    """

    content: PromptContent
    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    service_class: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    session: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, drawn evenly from `ratio` times the most to the most, and at least 1."""

    input_tokens: int
    output_tokens: int
    ratio: float

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("--random-input-len and --random-output-len must be at least 1")
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(f"--random-range-ratio is {self.ratio}; it must be between 0 and 1")

    def draw(self, count: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Input and output lengths of `count` requests."""
        return self._draw(self.input_tokens, count, rng), self._draw(self.output_tokens, count, rng)

    def _draw(self, max_length: int, count: int, rng: np.random.Generator) -> list[int]:
        drawn: list[int] = rng.integers(max(int(max_length * self.ratio), 1), max_length + 1, count).tolist()
        return drawn


class Vocabulary:
    """Random prompts of a tokenizer's ordinary tokens, without special ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = set(tokenizer.get_added_tokens_decoder())
        self.tokenizer = tokenizer
        self.ordinary: Int32Array = np.array(
            [token for token in range(tokenizer.get_vocab_size()) if token not in special], np.int32
        )

    def ids(self, tokens: int, rng: np.random.Generator) -> list[int]:
        """`tokens` random ids."""
        drawn: list[int] = rng.choice(self.ordinary, tokens).tolist()
        return drawn

    def text(self, tokens: int, rng: np.random.Generator) -> tuple[str, int]:
        """Random text of about `tokens` tokens, and its exact number of tokens."""
        ids, text = self.ids(tokens, rng), ""
        for _ in range(REFIT_ROUNDS):
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == tokens:
                break
            ids = ids[:tokens] + self.ids(max(tokens - len(ids), 0), rng)
        return text, len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def random_text(vocabulary: Vocabulary, count: int, lengths: Lengths, rng: np.random.Generator) -> list[DatasetRow]:
    """`count` independent prompts of random text."""
    inputs, outputs = lengths.draw(count, rng)
    made = [vocabulary.text(tokens, rng) for tokens in inputs]
    return [DatasetRow(text, tokens, output) for (text, tokens), output in zip(made, outputs, strict=True)]


def random_ids(vocabulary: Vocabulary, count: int, lengths: Lengths, rng: np.random.Generator) -> list[DatasetRow]:
    """`count` independent prompts of random token ids, of exactly the drawn lengths."""
    inputs, outputs = lengths.draw(count, rng)
    return [
        DatasetRow(vocabulary.ids(tokens, rng), tokens, output) for tokens, output in zip(inputs, outputs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts with a common beginning; lengths in tokens."""

    groups: int
    prompts_per_group: int
    system_prompt_tokens: int
    question_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        names = ("num-groups", "prompts-per-group", "system-prompt-len", "question-len", "output-len")
        for name, field_name in zip(names, self.__slots__, strict=True):
            if getattr(self, field_name) < 1:
                raise ConfigError(f"--gsp-{name} must be at least 1")


def shared_prefix(vocabulary: Vocabulary, shape: SharedPrefix, rng: np.random.Generator) -> list[DatasetRow]:
    """Each group's system prompt, followed by different questions; all prompts in random order."""
    prompts = []
    for _ in range(shape.groups):
        system, _ = vocabulary.text(shape.system_prompt_tokens, rng)
        for _ in range(shape.prompts_per_group):
            question, _ = vocabulary.text(shape.question_tokens, rng)
            text = f"{system}\n\n{question}"
            tokens = len(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)
            prompts.append(DatasetRow(text, tokens, shape.output_tokens))
    return [prompts[place] for place in rng.permutation(len(prompts)).tolist()]


def mooncake(vocabulary: Vocabulary, path: Path, count: int, seed: int) -> list[DatasetRow]:
    """The first `count` requests of a Mooncake trace; prompts that share blocks there share tokens here.

    Raises ConfigError for a file that is not such a trace.
    """
    workload: Workload = read_trace(path, "mooncake").limited(count)
    ordinary = vocabulary.ordinary
    prompts = []
    for index, tokens in enumerate(workload.prompt_tokens.tolist()):
        ids = ordinary[workload.content.prompt_ids(index, tokens) % len(ordinary)].tolist()
        arrival_s = float(workload.arrival_s[index])
        prompts.append(DatasetRow(ids, tokens, int(workload.output_tokens[index]), arrival_s))
    return prompts


def json_lines(path: Path, count: int, default_output_tokens: int) -> list[DatasetRow]:
    """The first `count` lines of a file of JSON objects.

    Each has `prompt` (text), `token_ids` or `messages`; it may have `output_tokens` (or `max_tokens`), `arrival_s`,
    `class` (a name to report by) and `body` (further fields of the request). Raises ConfigError naming the line.
    """
    prompts: list[DatasetRow] = []
    for where, record in read_json_lines(path):
        if len(prompts) == count:
            break
        prompts.append(_prompt_of(record, where, default_output_tokens))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def _prompt_of(record: dict[str, Any], where: str, default_output_tokens: int) -> DatasetRow:
    """One line as a prompt."""
    found = [record[name] for name in ("prompt", "token_ids", "messages") if record.get(name)]
    if len(found) != 1:
        raise ConfigError(f"{where}: give exactly one of prompt, token_ids and messages")
    output = record.get("output_tokens", record.get("max_tokens", default_output_tokens))
    if not isinstance(output, int) or output < 1:
        raise ConfigError(f"{where}: output_tokens is {json.dumps(output)}; it must be a whole number above 0")
    arrival_s, extra = record.get("arrival_s"), record.get("body") or {}
    if arrival_s is not None and not isinstance(arrival_s, int | float):
        raise ConfigError(f"{where}: arrival_s must be a number of seconds")
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: body must be an object of request fields")
    tokens = len(found[0]) if isinstance(found[0], list) and "token_ids" in record else 0
    return DatasetRow(found[0], tokens, output, arrival_s, str(record.get("class", "")), extra)


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> list[float]:
    """When each of `count` requests is sent, in seconds from the first: a Poisson process, or all at once for inf.

    Raises ConfigError for a rate that is not above 0.
    """
    if not rate > 0.0:
        raise ConfigError(f"--request-rate is {rate}; it must be above 0, or inf")
    times = np.cumsum(rng.exponential(1.0 / rate, count))
    arrivals: list[float] = (times - times[0]).tolist()
    return arrivals


def recorded_arrivals(prompts: list[DatasetRow]) -> list[float]:
    """When each request was sent in the recording, from the first. Raises ConfigError if one has no time."""
    times = [prompt.arrival_s for prompt in prompts if prompt.arrival_s is not None]
    if len(times) != len(prompts):
        raise ConfigError("--use-trace-timestamps needs a data set with times: mooncake, or jsonl with arrival_s")
    return [time - times[0] for time in times]
