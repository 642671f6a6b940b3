"""Readers of recorded traffic, one per format. Each gives a `Workload` or raises ConfigError in one line.

mooncake      JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)
azure         CSV: TIMESTAMP, ContextTokens, GeneratedTokens
vidur         CSV: num_prefill_tokens, num_decode_tokens; without arrived_at arrivals are drawn, one a second on average
tokenyard     JSON lines, our own form (see `read_tokenyard`)
openai-jsonl  JSON lines: request bodies of chat completions with a time stamp (see `read_openai`)
servegen      folder or tar of client models; requests are drawn from them
vllm-measured JSON lines: input_toks, output_toks, arrival_time_ns, input_tok_ids
lmcache-agent folder or tar of sessions, whole texts; needs a tokenizer
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Int32Array
from tokenyard.sim.files import number, read_json_lines, read_lines, read_members, whole
from tokenyard.sim.servegen import read_servegen
from tokenyard.sim.workload import Workload, WorkloadBuilder

Tokenize = Callable[[str], Int32Array]

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a reader may need: `seed` for what is drawn, `tokenize` for traces of text, `limit` on how many requests are
    read or drawn.
    """

    seed: int = 0
    tokenize: Tokenize | None = None
    limit: int | None = None

    def tokenizer(self, path: Path) -> Tokenize:
        """The tokenizer. Raises ConfigError if none was given."""
        if self.tokenize is None:
            raise ConfigError(
                f"{path} holds text; give --tokenizer with a folder or tokenizer.json to count its tokens"
            )
        return self.tokenize


def read_mooncake(path: Path, options: ReadOptions) -> Workload:
    """Mooncake's traces (Qin et al. 2024). Where time stamps tick, as by 3 s in the published conversations, they are
    spread over the tick with the seed.
    """
    records = list(read_json_lines(path))
    stamps = [number(record, "timestamp", where) for where, record in records]
    builder = WorkloadBuilder(path.name, options.seed, spread_s=_tick_s(stamps))
    for (where, record), stamp_ms in zip(records, stamps, strict=True):
        tokens = whole(record, "input_length", where)
        builder.add(
            where,
            stamp_ms / 1000.0,
            tokens,
            whole(record, "output_length", where),
            segments=_chain(record, where, tokens, HASH_BLOCK_TOKENS),
        )
    return builder.build()


def _tick_s(stamps_ms: list[float]) -> float:
    """The step of the trace's clock in whole seconds; 0 if it runs finely, so that few requests share a stamp."""
    distinct = np.unique(np.array(stamps_ms))
    if not 1 < len(distinct) <= len(stamps_ms) / 2:
        return 0.0
    return float(np.round(np.diff(distinct).min() / 1000.0))


def _chain(record: dict[str, Any], where: str, tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    blocks = record.get("hash_ids")
    needed = -(-tokens // block_tokens)
    if not isinstance(blocks, list) or len(blocks) < needed:
        raise ConfigError(f"{where}: hash_ids must hold {needed} ids, one per {block_tokens} tokens of the prompt")
    if not all(isinstance(block, int) and 0 <= block < 1 << 40 for block in blocks):
        raise ConfigError(f"{where}: hash_ids must be whole numbers from 0 to 2**40")
    return [(block, block_tokens) for block in blocks[:needed]]


def read_azure(path: Path, options: ReadOptions) -> Workload:
    """Azure's LLM inference traces (Patel et al., Splitwise, 2024)."""
    builder = WorkloadBuilder(path.name)
    for where, record in islice(_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")), options.limit):
        builder.add(
            where,
            _seconds(record["TIMESTAMP"], where),
            _digits(record, "ContextTokens", where),
            _digits(record, "GeneratedTokens", where),
        )
    return builder.build()


def _csv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    header: list[str] = []
    for where, line in read_lines(path):
        values = next(csv.reader([line]))
        if not header:
            header = values
            missing = [column for column in columns if column not in header]
            if missing:
                lacks = f"{path.name} lacks the columns {', '.join(missing)}"
                raise ConfigError(f"{lacks}; is this the right --trace-format?")
        elif len(values) != len(header):
            raise ConfigError(f"{where}: {len(values)} columns instead of {len(header)}; is the file cut off?")
        else:
            yield where, dict(zip(header, values, strict=True))


def _digits(record: dict[str, str], key: str, where: str) -> int:
    value = _float(record, key, where)
    if not isfinite(value):
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number of tokens")
    return int(value)


def _float(record: dict[str, str], key: str, where: str) -> float:
    try:
        return float(record[key])
    except ValueError:
        raise ConfigError(f"{where}: {key} is {record[key]!r}, not a number") from None


def _seconds(stamp: str, where: str) -> float:
    """Seconds of a stamp like `2023-11-16 18:15:46.6805900`; more digits than microseconds are kept."""
    whole_part, _, fraction = stamp.partition(".")
    zone = fraction.lstrip("0123456789")
    try:
        moment = datetime.fromisoformat(whole_part + zone)
        digits = fraction[: len(fraction) - len(zone)]
        part = float(f"0.{digits}") if digits else 0.0
    except ValueError:
        raise ConfigError(f"{where}: {stamp!r} is no time stamp") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + part


def read_vidur(path: Path, options: ReadOptions) -> Workload:
    """Vidur's processed traces. Without the column `arrived_at` (s) arrivals are a Poisson process of one request a
    second, drawn by the seed.
    """
    builder, rng, drawn_s = WorkloadBuilder(path.name), np.random.default_rng(options.seed), 0.0
    for where, record in islice(_csv(path, ("num_prefill_tokens", "num_decode_tokens")), options.limit):
        drawn_s += float(rng.exponential(1.0))
        arrival_s = _float(record, "arrived_at", where) if "arrived_at" in record else drawn_s
        prompt, output = _digits(record, "num_prefill_tokens", where), _digits(record, "num_decode_tokens", where)
        builder.add(where, arrival_s, prompt, output)
    return builder.build()


_OWN_TARGETS = ("deadline_s", "slo_ttft_s", "slo_tpot_s")


def read_tokenyard(path: Path, options: ReadOptions) -> Workload:
    """Our own form, a JSON object a line.

    Needed: `arrival_s`; `output_tokens`; and the prompt as `prompt_tokens` (a count), `token_ids` (a list), or
    `prompt_tokens` with `hash_ids` (one id per `block_tokens` tokens, 512 unless said; equal ids from the left mean an
    equal prefix). Optional: `tenant`, `class`, `priority` (whole number), `deadline_s` (from arrival to the end),
    `slo_ttft_s` and `slo_tpot_s` (targets of its own).
    """
    builder = WorkloadBuilder(path.name)
    for where, record in islice(read_json_lines(path), options.limit):
        ids = _token_ids(record, "token_ids", where) if "token_ids" in record else None
        tokens = len(ids) if ids is not None else whole(record, "prompt_tokens", where)
        block = whole(record, "block_tokens", where) if "block_tokens" in record else HASH_BLOCK_TOKENS
        builder.add(
            where,
            number(record, "arrival_s", where),
            tokens,
            whole(record, "output_tokens", where),
            ids=ids,
            segments=_chain(record, where, tokens, block) if "hash_ids" in record else None,
            tenant=str(record.get("tenant", "")),
            service_class=str(record.get("class", "")),
            priority=whole(record, "priority", where) if record.get("priority") is not None else None,
            **{name: number(record, name, where) for name in _OWN_TARGETS if record.get(name) is not None},
        )
    return builder.build()


def _token_ids(record: dict[str, Any], key: str, where: str) -> Int32Array:
    try:
        ids = np.array(record[key], np.int64)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where}: {key} must be a list of token ids") from None
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= 2**31:
        raise ConfigError(f"{where}: {key} must be a list of token ids that are not negative")
    return ids.astype(np.int32)


def read_openai(path: Path, options: ReadOptions) -> Workload:
    """Logged request bodies: a JSON object a line with `timestamp` (Unix seconds or ISO 8601) and the body.

    The body is the line itself or its field `body`: `messages` (role and text content) or `prompt`. The answer's length
    is `usage.completion_tokens` of the line or its `response`, or `output_tokens`; without any of them the line is
    refused, for a guess would decide the result. `user` is the tenant, `priority` the priority.
    """
    tokenize = options.tokenizer(path)
    builder = WorkloadBuilder(path.name)
    for where, record in islice(read_json_lines(path), options.limit):
        body = record["body"] if isinstance(record.get("body"), dict) else record
        ids = tokenize(_prompt_text(body, where))
        builder.add(
            where,
            _stamp(record, where),
            len(ids),
            _completion_tokens(record, where),
            ids=ids,
            tenant=str(body.get("user") or ""),
            priority=whole(body, "priority", where) if body.get("priority") is not None else None,
        )
    return builder.build()


def _stamp(record: dict[str, Any], where: str) -> float:
    stamp = record.get("timestamp")
    return (
        _seconds(stamp.replace("Z", "+00:00"), where) if isinstance(stamp, str) else number(record, "timestamp", where)
    )


def _prompt_text(body: dict[str, Any], where: str) -> str:
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: the request body has neither messages nor a prompt of text")
    return "".join(f"<|{message.get('role')}|>\n{_message_text(message)}\n" for message in messages)


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _completion_tokens(record: dict[str, Any], where: str) -> int:
    if "output_tokens" in record:
        return whole(record, "output_tokens", where)
    response = record.get("response")
    for holder in (record, response if isinstance(response, dict) else {}):
        usage = holder.get("usage")
        if isinstance(usage, dict):
            return whole(usage, "completion_tokens", where)
    raise ConfigError(f"{where}: the answer's length is missing; give output_tokens or usage.completion_tokens")


def read_vllm_measured(path: Path, options: ReadOptions) -> Workload:
    """Workloads of LLMServingSim's measured vLLM runs."""
    builder = WorkloadBuilder(path.name)
    for where, record in islice(read_json_lines(path), options.limit):
        ids = _token_ids(record, "input_tok_ids", where)
        arrival_s = number(record, "arrival_time_ns", where) / 1e9
        builder.add(where, arrival_s, len(ids), whole(record, "output_toks", where), ids=ids)
    return builder.build()


def read_lmcache_agent(path: Path, options: ReadOptions) -> Workload:
    """LMCache's agent sessions: a file per session, a line per call. The file's name is the tenant."""
    tokenize = options.tokenizer(path)
    builder = WorkloadBuilder(path.name, sort=True)
    for name, raw in read_members(path, ".jsonl"):
        for line_number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
            where = f"{name}, line {line_number}"
            try:
                record = json.loads(line)
                prompt, answer = str(record["input"]), str(record["output"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{where}: cut off, or lacks input and output") from None
            ids = tokenize(prompt)
            arrival_s = number(record, "timestamp", where) / 1e6
            builder.add(where, arrival_s, len(ids), len(tokenize(answer)), ids=ids, tenant=name.removesuffix(".jsonl"))
    return builder.build()


def _servegen(path: Path, options: ReadOptions) -> Workload:
    return read_servegen(path, options.seed, options.limit)


TRACE_FORMATS: dict[str, Callable[[Path, ReadOptions], Workload]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "vidur": read_vidur,
    "tokenyard": read_tokenyard,
    "openai-jsonl": read_openai,
    "servegen": _servegen,
    "vllm-measured": read_vllm_measured,
    "lmcache-agent": read_lmcache_agent,
}


def read_trace(path: Path, trace_format: str, options: ReadOptions | None = None) -> Workload:
    """The workload in `path`. Raises ConfigError, in one line, for an unknown format or a file that does not fit it."""
    if trace_format not in TRACE_FORMATS:
        raise ConfigError(f"there is no --trace-format {trace_format!r}; choose one of {', '.join(TRACE_FORMATS)}")
    options = options or ReadOptions()
    return TRACE_FORMATS[trace_format](path, options).limited(options.limit)
