"""Readers of recorded traffic, one per format. Each gives a `Workload` or raises ConfigError in one line.

mooncake      JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)
bailian       JSON lines: timestamp (s), input_length, output_length, hash_ids (one per 16 tokens)
azure         CSV: TIMESTAMP, ContextTokens, GeneratedTokens
burstgpt      CSV: Timestamp (s), Request tokens, Response tokens
vidur         CSV: num_prefill_tokens, num_decode_tokens; without arrived_at arrivals are drawn, one a second on average
tokenyard     JSON lines, our own form (see `read_tokenyard`)
tokenyard-log what `serve --log-requests --log-format json` writes
openai-jsonl  JSON lines: request bodies of chat completions with a time stamp (see `read_openai`)
servegen      folder or tar of client models; requests are drawn from them
vllm-measured JSON lines: input_toks, output_toks, arrival_time_ns, input_tok_ids
lmcache-agent folder or tar of sessions, or one session's file, whole texts; needs a tokenizer
kv-cache-tester folder or tar of sessions of coding agents, lengths and block hashes (see `kv_cache_tester`)
mooncake-sessions, llmservingsim, genai-spans: sessions, see the modules of these names
"""

import difflib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import INCOMPLETE, ConfigError, Int32Array
from tokenyard.sim.traces.csv_formats import in_seconds, read_azure, read_burstgpt, read_vidur, seconds_of
from tokenyard.sim.traces.genai_spans import read_genai_spans
from tokenyard.sim.traces.kv_cache_tester import read_kv_cache_tester
from tokenyard.sim.traces.llmservingsim import read_llmservingsim
from tokenyard.sim.traces.lmcache_agent import read_lmcache_agent
from tokenyard.sim.traces.mooncake_sessions import read_mooncake_sessions
from tokenyard.sim.traces.read_options import REJECTED_REASONS, ReadOptions, build_workload
from tokenyard.sim.traces.servegen import read_servegen
from tokenyard.sim.traces.trace_files import json_object, number, read_lines, whole
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, WorkloadBuilder

HASH_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_TIMES_NEEDED = 8
"""With more ids than so many times those that a prompt needs, they stand for smaller blocks."""

MS_PER_S = 1000.0
REQUEST_LOGGER = "tokenyard.requests"


def read_mooncake(path: Path, options: ReadOptions) -> Workload:
    """Mooncake's traces (Qin et al. 2024).

    Time stamps with a coarse tick, such as the 3 s of the published conversations, are spread over the tick with the
    seed.
    """
    builder = WorkloadBuilder(path.name, options.seed, spread=True)
    take = partial(_add_hashed, builder, MS_PER_S, HASH_BLOCK_TOKENS)
    return build_workload(builder, options, read_lines(path), take, whole_file=True)


def read_bailian(path: Path, options: ReadOptions) -> Workload:
    """Traces of Qwen on Aliyun Bailian (Wang et al., KVCache Cache in the Wild, 2025)."""
    builder = WorkloadBuilder(path.name)
    take = partial(_add_hashed, builder, 1.0, BAILIAN_BLOCK_TOKENS)
    return build_workload(builder, options, read_lines(path), take)


def _add_hashed(builder: WorkloadBuilder, ticks_per_s: float, block_tokens: int, where: str, line: str) -> None:
    record = json_object(line, where)
    tokens = whole(record, "input_length", where)
    builder.add(
        where,
        number(record, "timestamp", where) / ticks_per_s,
        tokens,
        whole(record, "output_length", where),
        segments=_chain(record, where, tokens, block_tokens),
    )


def _chain(record: dict[str, Any], where: str, tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    blocks = record.get("hash_ids")
    needed = -(-tokens // block_tokens)
    if not isinstance(blocks, list) or len(blocks) < needed:
        raise ConfigError(f"{where}: hash_ids must hold {needed} ids, one per {block_tokens} tokens of the prompt")
    if len(blocks) > MAX_TIMES_NEEDED * needed:
        raise ConfigError(
            f"{where}: hash_ids holds {len(blocks)} ids where {needed} are needed, one per {block_tokens} tokens; "
            "is this the right --trace-format, or size of block?"
        )
    if not all(isinstance(block, int) and 0 <= block < 1 << 40 for block in blocks):
        raise ConfigError(f"{where}: hash_ids must be whole numbers from 0 to 2**40 - 1")
    return [(block, block_tokens) for block in blocks[:needed]]


_OWN_TARGETS = ("deadline_s", "slo_ttft_s", "slo_tpot_s")
_OWN_FIELDS = (
    *("arrival_s", "output_tokens", "prompt_tokens", "token_ids", "hash_ids", "block_tokens", "max_new_tokens"),
    *("tenant", "class", "priority", "complete", "lora", *_OWN_TARGETS),
)


def read_tokenyard(path: Path, options: ReadOptions) -> Workload:
    """The `tokenyard` format, one JSON object per line.

    Required: `arrival_s`, `output_tokens`, and the prompt, as `prompt_tokens` (a count), as `token_ids` (a list), or as
        `prompt_tokens` with `hash_ids` (one id per `block_tokens` tokens, 512 by default; equal leading ids mean an
        equal prefix).

    Optional:

    - `max_new_tokens`: the client's limit; by default the trace's largest answer
    - `tenant`, `class`: names
    - `priority`: whole number
    - `deadline_s`: seconds from arrival to the end
    - `slo_ttft_s`, `slo_tpot_s`: the request's own targets
    - `complete`: false if the request was refused or cut off; `output_tokens` is then the part that was seen
    - `lora`: name of its LoRA adapter (see --enable-lora)
    """
    builder = WorkloadBuilder(path.name, options.seed, skip_unknown=options.skip_unknown)
    unknown: dict[str, None] = {}

    def take(where: str, line: str) -> None:
        record = json_object(line, where)
        new = [field for field in record if field not in _OWN_FIELDS and field not in unknown]
        unknown.update(dict.fromkeys(new))
        builder.remarks += [_unknown_field(field, where) for field in new]
        _add_own(builder, where, record)

    return build_workload(builder, options, read_lines(path), take)


def _unknown_field(field: str, where: str) -> str:
    """A sentence on a field that is not read, with the field that may be meant."""
    near = difflib.get_close_matches(field, _OWN_FIELDS, n=1)
    return f"the field {field!r} is not read ({where})" + (f"; did you mean {near[0]}?" if near else "")


def _add_own(builder: WorkloadBuilder, where: str, record: dict[str, Any]) -> None:
    given = {key for key, value in record.items() if value is not None}
    if {"token_ids", "hash_ids"} <= given:
        raise ConfigError(f"{where}: give token_ids or hash_ids, not both")
    ids = _token_ids(record, "token_ids", "prompt_tokens", where) if "token_ids" in given else None
    tokens = len(ids) if ids is not None else whole(record, "prompt_tokens", where)
    builder.add(
        where,
        number(record, "arrival_s", where),
        tokens,
        whole(record, "output_tokens", where),
        max_new_tokens=whole(record, "max_new_tokens", where) if "max_new_tokens" in given else None,
        ids=ids,
        segments=_chain(record, where, tokens, _block_tokens(record, where)) if "hash_ids" in given else None,
        tenant=_name(record, "tenant", where),
        service_class=_name(record, "class", where),
        priority=whole(record, "priority", where) if "priority" in given else None,
        complete=_complete(record, where),
        adapter=_name(record, "lora", where),
        **{name: number(record, name, where) for name in _OWN_TARGETS if name in given},
    )


def _complete(record: dict[str, Any], where: str) -> bool:
    """Whether the answer ended by itself: the field `complete`, or else the `reason` of a log line."""
    complete = record.get("complete", record.get("reason") not in INCOMPLETE)
    if not isinstance(complete, bool):
        raise ConfigError(f"{where}: complete is {str(complete)[:40]!r}; it must be true or false")
    return complete


def read_log(path: Path, options: ReadOptions) -> Workload:
    """The log of `serve --log-requests --log-format json`: one request per line of the logger `REQUEST_LOGGER`.

    Lines are written as answers end and are sorted by arrival. Lines of other loggers, or that are not JSON, are
    skipped. Requests that no server of this model could serve (cause invalid or too_long) are skipped and counted.
    """
    builder = WorkloadBuilder(path.name, options.seed, sort=True, skip_unknown=options.skip_unknown)
    found, wrong = 0, 0

    def take(where: str, line: str) -> None:
        nonlocal found, wrong
        record = json_object(line, where) if line.startswith("{") else {}
        if record.get("logger") != REQUEST_LOGGER:
            return
        found += 1
        if record.get("cause") in REJECTED_REASONS:
            wrong += 1
            builder.remarks = [f"{wrong} requests that could never be served (invalid, too_long) are left out"]
        else:
            _add_own(builder, where, record)

    def lines() -> Iterator[tuple[str, str]]:
        yield from read_lines(path)
        if not found:
            raise ConfigError(f"{path.name} holds no line of `tokenyard serve --log-requests --log-format json`")

    return build_workload(builder, options, lines(), take, whole_file=True)


def _block_tokens(record: dict[str, Any], where: str) -> int:
    if record.get("block_tokens") is None:
        return HASH_BLOCK_TOKENS
    tokens = whole(record, "block_tokens", where)
    if not 0 < tokens < MAX_TOKENS:
        raise ConfigError(f"{where}: block_tokens is {tokens}; it must be from 1 to {MAX_TOKENS - 1}")
    return tokens


def _name(record: dict[str, Any], key: str, where: str) -> str:
    """The name of a tenant or class; numbers are names as well, and null is none."""
    name = record.get(key)
    if name is not None and not isinstance(name, str | int):
        raise ConfigError(f"{where}: {key} is {str(name)[:40]!r}, not a name")
    return "" if name is None else str(name)


def _token_ids(record: dict[str, Any], key: str, count_key: str, where: str) -> Int32Array:
    """The list `record[key]`. If `record[count_key]` exists, it must be the length of the list."""
    try:
        ids = np.array(record.get(key))
    except ValueError:  # lists of several lengths
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31:
        raise ConfigError(f"{where}: {key} must be a list of token ids, whole numbers from 0 to 2**31 - 1")
    count = record.get(count_key)
    if count is not None and count != len(ids):
        raise ConfigError(f"{where}: {key} holds {len(ids)} ids, but {count_key} is {count}")
    return ids.astype(np.int32)


def read_openai(path: Path, options: ReadOptions) -> Workload:
    """Logged request bodies: one JSON object per line with `timestamp` (Unix seconds or ISO 8601) and the body.

    The body is the line itself or its field `body`: `messages` (role and text content) or `prompt`. The answer's length
    is `usage.completion_tokens` of the line, of its `response` or of the `body` of that, or `output_tokens`. A line
    without any of them is refused, because a guess would decide the result. `user` is the tenant, `priority` the
    priority; `max_completion_tokens` or `max_tokens` is the client's limit.
    """
    tokenize = options.tokenizer(path)
    builder = WorkloadBuilder(path.name)

    def take(where: str, line: str) -> None:
        record = json_object(line, where)
        body = record["body"] if isinstance(record.get("body"), dict) else record
        ids, output = tokenize(_prompt_text(body, where)), _completion_tokens(record, where)
        builder.add(
            where,
            _stamp(record, where),
            len(ids),
            output,
            max_new_tokens=_asked_tokens(body, output, where),
            ids=ids,
            tenant=_name(body, "user", where),
            priority=whole(body, "priority", where) if body.get("priority") is not None else None,
        )

    return build_workload(builder, options, read_lines(path), take)


def _stamp(record: dict[str, Any], where: str) -> float:
    stamp = record.get("timestamp")
    if isinstance(stamp, str):
        return seconds_of(stamp, where)
    return in_seconds(number(record, "timestamp", where), where)


def _prompt_text(body: dict[str, Any], where: str) -> str:
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: the request body has neither messages nor a prompt of text")
    return "".join(f"<|{message.get('role')}|>\n{_message_text(message, where)}\n" for message in messages)


def _message_text(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise ConfigError(f"{where}: a message holds something else than text, whose tokens cannot be counted")
    return "".join(texts)


def _completion_tokens(record: dict[str, Any], where: str) -> int:
    if "output_tokens" in record:
        return whole(record, "output_tokens", where)
    response = _object(record, "response")
    for holder in (record, response, _object(response, "body")):
        usage = _object(holder, "usage")
        if "completion_tokens" in usage:
            return whole(usage, "completion_tokens", where)
    raise ConfigError(f"{where}: the answer's length is missing; give output_tokens or usage.completion_tokens")


def _asked_tokens(body: dict[str, Any], output: int, where: str) -> int | None:
    """The output limit in a body whose answer has `output` tokens; None if there is none."""
    for key in ("max_completion_tokens", "max_tokens"):
        if body.get(key) is not None:
            return max(whole(body, key, where), output, 1)
    return None


def _object(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def read_vllm_measured(path: Path, options: ReadOptions) -> Workload:
    """Workloads of LLMServingSim's measured vLLM runs."""
    builder = WorkloadBuilder(path.name)

    def take(where: str, line: str) -> None:
        record = json_object(line, where)
        ids = _token_ids(record, "input_tok_ids", "input_toks", where)
        arrival_s = number(record, "arrival_time_ns", where) / 1e9
        builder.add(where, arrival_s, len(ids), whole(record, "output_toks", where), ids=ids)

    return build_workload(builder, options, read_lines(path), take)


def _servegen(path: Path, options: ReadOptions) -> Workload:
    return read_servegen(path, options.seed, options.limit, options.skip_bad)


TRACE_FORMATS: dict[str, Callable[[Path, ReadOptions], Workload]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "vidur": read_vidur,
    "tokenyard": read_tokenyard,
    "tokenyard-log": read_log,
    "openai-jsonl": read_openai,
    "servegen": _servegen,
    "vllm-measured": read_vllm_measured,
    "lmcache-agent": read_lmcache_agent,
    "kv-cache-tester": read_kv_cache_tester,
    "mooncake-sessions": read_mooncake_sessions,
    "llmservingsim": read_llmservingsim,
    "genai-spans": read_genai_spans,
}


def read_trace(path: Path, trace_format: str, options: ReadOptions | None = None) -> Workload:
    """The workload in `path`. Raises ConfigError, in one line, for an unknown format or a file that does not fit it."""
    if trace_format not in TRACE_FORMATS:
        raise ConfigError(f"there is no --trace-format {trace_format!r}; choose one of {', '.join(TRACE_FORMATS)}")
    options = options or ReadOptions()
    return TRACE_FORMATS[trace_format](path, options).limited(options.limit)
