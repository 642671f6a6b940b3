"""Tokenyard's own format, and the log of `tokenyard serve`, whose lines have the same fields among others.

The format is detected by `arrival_s` and `output_tokens`, the log by `logger` and `message`.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenyard.base import INCOMPLETE, ConfigError
from tokenyard.sim.traces.prompt_fields import HASH_BLOCK_TOKENS, block_segments, token_ids
from tokenyard.sim.traces.read_options import REJECTED_REASONS, ReadOptions, build_workload
from tokenyard.sim.traces.trace_files import json_object, name_of, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, WorkloadBuilder

REQUEST_LOGGER = "tokenyard.requests"

_TARGETS = ("deadline_s", "slo_ttft_s", "slo_tpot_s")
_FIELDS = (
    *("arrival_s", "output_tokens", "prompt_tokens", "token_ids", "hash_ids", "block_tokens", "max_new_tokens"),
    *("tenant", "class", "priority", "complete", "lora", *_TARGETS),
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
        new = [field for field in record if field not in _FIELDS and field not in unknown]
        unknown.update(dict.fromkeys(new))
        builder.remarks += [_unknown_field(field, where) for field in new]
        _add(builder, where, record)

    return build_workload(builder, options, read_lines(path), take)


def _unknown_field(field: str, where: str) -> str:
    """A sentence on a field that is not read, with the field that may be meant."""
    near = difflib.get_close_matches(field, _FIELDS, n=1)
    return f"the field {field!r} is not read ({where})" + (f"; did you mean {near[0]}?" if near else "")


def _add(builder: WorkloadBuilder, where: str, record: dict[str, Any]) -> None:
    given = {key for key, value in record.items() if value is not None}
    if {"token_ids", "hash_ids"} <= given:
        raise ConfigError(f"{where}: give token_ids or hash_ids, not both")
    ids = token_ids(record, "token_ids", "prompt_tokens", where) if "token_ids" in given else None
    tokens = len(ids) if ids is not None else whole(record, "prompt_tokens", where)
    builder.add(
        where,
        number(record, "arrival_s", where),
        tokens,
        whole(record, "output_tokens", where),
        max_new_tokens=whole(record, "max_new_tokens", where) if "max_new_tokens" in given else None,
        ids=ids,
        segments=block_segments(record, where, tokens, _block_tokens(record, where)) if "hash_ids" in given else None,
        tenant=name_of(record, "tenant", where),
        service_class=name_of(record, "class", where),
        priority=whole(record, "priority", where) if "priority" in given else None,
        complete=_complete(record, where),
        adapter=name_of(record, "lora", where),
        **{name: number(record, name, where) for name in _TARGETS if name in given},
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
            _add(builder, where, record)

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


TOKENYARD = TraceFormat("tokenyard", read_tokenyard, fields=(frozenset({"arrival_s", "output_tokens"}),))
TOKENYARD_LOG = TraceFormat("tokenyard-log", read_log, fields=(frozenset({"logger", "message"}),))
