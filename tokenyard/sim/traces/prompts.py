"""Prompts of text without times: ShareGPT, the data sets of benchmarks, and files of one's own.

One JSON object per line, or one array of them, as ShareGPT is. The prompt is `prompt`, `text`, `question`, `messages`
or the first message of `conversations`; the answer's length is `output_tokens`, or that of the text in `completion`,
`output`, `response`, `answer` or the second message of `conversations`, or else `max_tokens`. Detected by these fields
where there is no `timestamp`. Of a conversation the first prompt and answer are taken, as `vllm bench serve` and
`sglang.bench_serving` do, and one without an answer is left out. Arrivals are a Poisson process of one request per
second, drawn by the seed. Not read: any other field, as images.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError
from tokenyard.sim.traces.openai_jsonl import prompt_text
from tokenyard.sim.traces.read_options import ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import json_object, read_bytes, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

PROMPTS = ("prompt", "text", "question")
ANSWERS = ("completion", "output", "response", "answer")
HEAD_CHARACTERS = 1 << 12


def read_prompts(path: Path, options: ReadOptions) -> Workload:
    """The requests, whose texts `options.tokenize` counts.

    Raises ConfigError, in one line, for a file that does not fit, and for prompts without the length of an answer,
    because a guess would decide the result.
    """
    tokenize, rng, at_s = options.tokenizer(path), np.random.default_rng(options.seed), 0.0
    builder, unanswered = WorkloadBuilder(path.name), 0

    def take(where: str, record: dict[str, Any]) -> None:
        nonlocal at_s, unanswered
        prompt, answer = _texts(record, where)
        if "conversations" in record and not (prompt and answer):
            unanswered += 1
            return
        ids = tokenize(prompt)
        if "output_tokens" in record:
            output = whole(record, "output_tokens", where)
        elif answer is not None:
            output = len(tokenize(answer))
        elif "max_tokens" in record:
            output = whole(record, "max_tokens", where)
        else:
            raise ConfigError(
                f"{where}: nothing says how long the answer is; give output_tokens, or the answer's text in completion"
            )
        at_s += float(rng.exponential(1.0))
        builder.add(where, at_s, len(ids), output, ids=ids)

    found = build_workload(builder, options, _records(path), take)
    left = [f"{unanswered} conversations have no answer and are left out"] if unanswered else []
    drawn = "the file has no times: arrivals are drawn, one request a second on average (--rate-scale makes it more)"
    return replace(found, remarks=(*found.remarks, *left, drawn))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    first = next(read_lines(path), ("", ""))[1].lstrip()
    if not first.startswith("["):
        yield from ((where, json_object(line, where)) for where, line in read_lines(path))
        return
    try:
        records = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is cut off or no JSON") from None
    for place, record in enumerate(records, 1):
        where = f"{path.name}, item {place}"
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: a JSON object is needed, not {str(record)[:40]!r}")
        yield where, record


def _texts(record: dict[str, Any], where: str) -> tuple[str, str | None]:
    """Prompt and answer, None for an answer of unknown text."""
    talk = record.get("conversations")
    if isinstance(talk, list):
        said = [_said(message, where) for message in talk[:2]]
        return said[0] if said else "", said[1] if len(said) > 1 else None
    answer = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    prompt = next((record[key] for key in PROMPTS if isinstance(record.get(key), str)), None)
    return prompt_text(record, where) if prompt is None else prompt, answer


def _said(message: Any, where: str) -> str:
    if isinstance(message, dict):
        for key in ("value", "content"):
            if isinstance(message.get(key), str):
                return str(message[key])
    raise ConfigError(f"{where}: a message of conversations has neither a value nor a content of text")


def is_array_of_prompts(lines: Iterable[str]) -> bool:
    """Whether the first lines of a JSON array are those of such a file."""
    head = "".join(line[:HEAD_CHARACTERS] for line in lines)
    return any(f'"{key}"' in head for key in ("conversations", "messages", *PROMPTS))


PROMPT_TEXTS = TraceFormat(
    "prompts",
    read_prompts,
    fields=tuple(frozenset({key}) for key in ("conversations", "messages", *PROMPTS)),
)
