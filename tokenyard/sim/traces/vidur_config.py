"""Configurations of Vidur (github microsoft/vidur, vidur/config/config.py, vidur/request_generator), from which
requests are drawn.

A JSON or YAML file: the `config.json` of a run, or the request generator's flags of its command line, one field each.
Detected by `request_generator_config` or `length_generator_config_type`. Read are the generators `synthetic` (lengths
`fixed`, `uniform`, `zipf` and `trace`; gaps `poisson`, `gamma`, `static` and `trace`) and `trace_replay`, with Vidur's
defaults and rules: gaps of a Poisson process are at most three times their mean, lengths of a trace come in random
order and are cut to `max_tokens`. The draws are those of `--seed`, not Vidur's own; `scramble` of `zipf` permutes with
another hash, as Python's differs from run to run. Not read: `seed` and everything about replicas, schedulers and
predictors.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Float64Array, Int64Array
from tokenyard.sim.traces.csv_table import CsvHeader, csv_number, csv_tokens
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.spec_fields import known_fields, read_document
from tokenyard.sim.traces.time_stamps import seconds_of
from tokenyard.sim.traces.trace_files import name_of, number, read_lines, whole
from tokenyard.sim.traces.trace_format import TraceFormat
from tokenyard.sim.traces.workload import MAX_TOKENS, Workload, WorkloadBuilder

GENERATOR, LENGTHS, GAPS = "request_generator_config", "length_generator_config", "interval_generator_config"
_MARKS = (f'"{GENERATOR}"', f"{GENERATOR}:", f"{LENGTHS}_type", f"{GENERATOR}_type")
_LINES_CHECKED = 500
MAX_REQUESTS = 5_000_000
MAX_GAP_MEANS = 3.0
_EPS = 1e-8

Rng = np.random.Generator
Lengths = tuple[Int64Array, Int64Array]

_LENGTH_DEFAULTS: dict[str, dict[str, Any]] = {
    "fixed": {"prefill_tokens": 2048, "decode_tokens": 512},
    "uniform": {"min_tokens": 1024, "prefill_to_decode_ratio": 20.0},
    "zipf": {"theta": 0.6, "scramble": False, "min_tokens": 1024, "prefill_to_decode_ratio": 20.0},
    "trace": {
        "trace_file": "data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
        "prefill_scale_factor": 1.0,
        "decode_scale_factor": 1.0,
    },
}
_GAP_DEFAULTS: dict[str, dict[str, Any]] = {
    "poisson": {"qps": 0.5},
    "gamma": {"qps": 0.2, "cv": 0.5},
    "static": {},
    "trace": {
        "trace_file": "data/processed_traces/AzureFunctionsInvocationTraceForTwoWeeksJan2021Processed.csv",
        "start_time": "1970-01-04 12:00:00",
        "end_time": "1970-01-04 15:00:00",
        "time_scale_factor": 1.0,
    },
}
_SYNTHETIC_DEFAULTS: dict[str, Any] = {"num_requests": 128, "duration": None, LENGTHS: {}, GAPS: {}}
_REPLAY_DEFAULTS: dict[str, Any] = {
    "trace_file": "data/processed_traces/splitwise_conv.csv",
    "prefill_scale_factor": 1.0,
    "decode_scale_factor": 1.0,
    "time_scale_factor": 1.0,
}
_EVERYWHERE: dict[str, Any] = {"seed": 42, "max_tokens": 4096, "name": ""}


def is_vidur_config(path: Path) -> bool:
    """Whether a JSON or YAML file is such a configuration."""
    return any(mark in line for _, line in islice(read_lines(path), _LINES_CHECKED) for mark in _MARKS)


def read_vidur_config(path: Path, options: ReadOptions) -> Workload:
    """The requests. Raises ConfigError, in one line, for a file that does not fit."""
    found = read_document(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} has no fields; give Vidur's config.json")
    spec = found[GENERATOR] if isinstance(found.get(GENERATOR), dict) else _unflattened(found)
    kind = name_of(spec, "name", path.name) or "synthetic"
    rng = np.random.default_rng(options.seed)
    if kind == "trace_replay":
        return _replayed(path, _fields(spec, f"{path.name}, {GENERATOR}", _REPLAY_DEFAULTS), options)
    if kind != "synthetic":
        raise ConfigError(f"{path.name}: {GENERATOR} is {kind!r}; it must be synthetic or trace_replay")
    fields = _fields(spec, f"{path.name}, {GENERATOR}", _SYNTHETIC_DEFAULTS)
    duration_s = inf if fields["duration"] is None else number(fields, "duration", path.name)
    most = MAX_REQUESTS
    if fields["duration"] is None and fields["num_requests"] is not None:
        most = whole(fields, "num_requests", path.name)
    most = min(most, options.limit or most)
    times = _arrivals(path, fields[GAPS], duration_s, most, rng)
    if len(times) == MAX_REQUESTS:
        raise ConfigError(f"{path.name} describes over {MAX_REQUESTS} requests; give --limit")
    prompts, outputs = _lengths(path, fields[LENGTHS], len(times), rng)
    builder = WorkloadBuilder(path.name)
    for at_s, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=False):
        builder.add(path.name, at_s, prompt, output)
    return builder.build()


def _unflattened(flags: dict[str, Any]) -> dict[str, Any]:
    """The generator's fields from flags whose names begin with the names of their classes."""

    def part(kind: str, middle: str) -> dict[str, Any]:
        prefix = f"{kind}_{middle}_"
        return {"name": kind, **{key.removeprefix(prefix): flags[key] for key in flags if key.startswith(prefix)}}

    kind = str(flags.get(f"{GENERATOR}_type", "synthetic")).lower()
    if kind == "trace_replay":
        return {**part("trace", GENERATOR), "name": kind}
    lengths, gaps = str(flags.get(f"{LENGTHS}_type", "fixed")), str(flags.get(f"{GAPS}_type", "poisson"))
    return {
        **part(kind, GENERATOR),
        LENGTHS: part(lengths.lower(), "request_length_generator_config"),
        GAPS: part(gaps.lower(), "request_interval_generator_config"),
    }


def _fields(value: Any, where: str, defaults: dict[str, Any]) -> dict[str, Any]:
    known = {**_EVERYWHERE, **defaults}
    return {**known, **known_fields(value, where, known.keys())}


def _part(value: Any, where: str, default: str, kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a generator of lengths or gaps, with its kind as `name`."""
    kind = str(value.get("name", default)).lower() if isinstance(value, dict) else ""
    if kind not in kinds:
        raise ConfigError(f"{where} is {kind!r}; it must be one of {', '.join(kinds)}")
    return {**_fields(value, where, kinds[kind]), "name": kind}


def _arrivals(path: Path, value: Any, duration_s: float, most: int, rng: Rng) -> Float64Array:
    """float64[n], in seconds: the first `most`, and those before `duration_s`."""
    where = f"{path.name}, {GAPS}"
    fields = _part(value, where, "poisson", _GAP_DEFAULTS)
    kind = fields["name"]
    if kind == "trace":
        times = _recorded_times(path, fields, where)[:most]
        return times[times < duration_s]
    if kind == "static":
        if most == MAX_REQUESTS:
            raise ConfigError(f"{where}: without gaps a duration means no number of requests; give --limit")
        return np.zeros(most)
    qps, cv = number(fields, "qps", where), number(fields, "cv", where) if kind == "gamma" else 1.0
    if not (qps > 0.0 and cv > 0.0):
        raise ConfigError(f"{where}: qps and cv must be above 0")
    parts, elapsed, count = [np.zeros(0)], 0.0, 0
    while count < most and elapsed < duration_s:
        drawn = min(most - count, 4096)
        if kind == "poisson":
            gaps = np.minimum(rng.exponential(1.0 / qps, drawn), MAX_GAP_MEANS / qps)
        else:
            gaps = rng.gamma(cv**-2, cv**2 / qps, drawn)
        parts.append(elapsed + np.cumsum(gaps))
        elapsed, count = float(parts[-1][-1]), count + drawn
    found = np.concatenate(parts)
    within: Float64Array = found[found < duration_s]
    return within


def _recorded_times(path: Path, fields: dict[str, Any], where: str) -> Float64Array:
    """Arrivals of a trace between two times of it, in whole seconds and scaled, without the first one."""
    begin, end = (seconds_of(str(fields[key]), f"{where}, {key}") for key in ("start_time", "end_time"))
    times = np.array([seconds_of(record["arrival_time"], at) for at, record in _table(path, fields, ("arrival_time",))])
    times = times[(times > begin) & (times < end)]
    if len(times) < 2:
        raise ConfigError(f"{where}: the trace has no two requests between start_time and end_time")
    scaled: Float64Array = np.floor(times - times.min()) * number(fields, "time_scale_factor", where)
    return np.sort(scaled[1:] - scaled[0])


def _lengths(path: Path, value: Any, count: int, rng: Rng) -> Lengths:
    """Prompts and answers: int64[count] each, fewer where a trace of lengths ends before."""
    where = f"{path.name}, {LENGTHS}"
    fields = _part(value, where, "fixed", _LENGTH_DEFAULTS)
    if fields["name"] == "fixed":
        prompt, answer = (whole(fields, key, where) for key in ("prefill_tokens", "decode_tokens"))
        return np.full(count, prompt), np.full(count, answer)
    most = whole(fields, "max_tokens", where)
    if fields["name"] == "trace":
        prompts, outputs, _ = _table_lengths(path, fields, where, most, both=True)
        order = rng.permutation(len(prompts))[:count]
        return prompts[order], outputs[order]
    least, ratio = whole(fields, "min_tokens", where), number(fields, "prefill_to_decode_ratio", where)
    if not (0 < least <= most < MAX_TOKENS and ratio >= 0.0):
        raise ConfigError(f"{where}: min_tokens must be from 1 to max_tokens, prefill_to_decode_ratio at least 0")
    if fields["name"] == "uniform":
        total = rng.uniform(least, most, count)
        answers = np.ceil(total / (1.0 + ratio))
    else:
        drawn = zipf(least, most, number(fields, "theta", where), rng.random(count))
        total = _scrambled(drawn, least, most).astype(np.float64) if fields["scramble"] else drawn.astype(np.float64)
        answers = total / (1.0 + ratio)
    return np.maximum((total - answers).astype(np.int64), 1), np.maximum(answers.astype(np.int64), 1)


def zipf(least: int, most: int, theta: float, uniform: Float64Array) -> Int64Array:
    """Lengths from `least` to `most`, short ones more often, from numbers in [0, 1): vidur/utils/zipf_generator.py.

    The method of Gray et al., Quickly Generating Billion-Record Synthetic Databases, SIGMOD 1994, with Vidur's harmonic
    sums, which leave out their last term. Raises ConfigError for a `theta` that the method does not have.
    """
    if theta < 0.0 or theta == 1.0:
        raise ConfigError(f"theta is {theta}; it must be at least 0, and not 1")
    items = most - least + 1
    if items == 1:
        return np.full(len(uniform), least, np.int64)
    zeta = float(np.sum(np.arange(1, items) ** -theta))
    eta = (1.0 - (2.0 / items) ** (1.0 - theta)) / (1.0 - 1.0 / (zeta + _EPS))
    rank = (items * np.maximum(eta * uniform - eta + 1.0, 0.0) ** (1.0 / (1.0 - theta))).astype(np.int64)
    scaled = uniform * zeta
    rank = np.where(scaled < 1.0, 0, np.where(scaled < 1.0 + 0.5**theta, 1, rank))
    return least + np.minimum(rank, items - 1)


def _scrambled(drawn: Int64Array, least: int, most: int) -> Int64Array:
    """Each length replaced by one that a hash of it gives, so that the frequent ones are anywhere in the range."""
    values, place = np.unique(drawn, return_inverse=True)
    hashed = [int.from_bytes(blake2b(str(value).encode(), digest_size=8).digest()) for value in values.tolist()]
    return np.array([least + one % (most - least + 1) for one in hashed], np.int64)[place]


def _replayed(path: Path, fields: dict[str, Any], options: ReadOptions) -> Workload:
    where = f"{path.name}, {GENERATOR}"
    prompts, outputs, times = _table_lengths(path, fields, where, whole(fields, "max_tokens", where), both=False)
    builder = WorkloadBuilder(path.name, sort=True)
    scale = number(fields, "time_scale_factor", where)
    for place in range(min(len(prompts), options.limit or len(prompts))):
        builder.add(where, float(times[place]) * scale, int(prompts[place]), int(outputs[place]))
    return builder.build()


def _table_lengths(
    path: Path, fields: dict[str, Any], where: str, most: int, *, both: bool
) -> tuple[Int64Array, Int64Array, Float64Array]:
    """Prompts, answers and arrivals of a processed trace, scaled and cut to `most` tokens of both together.

    both: prompt and answer are cut in proportion, as for lengths that are drawn; else the prompt alone.
    """
    columns = ("num_prefill_tokens", "num_decode_tokens", *(() if both else ("arrived_at",)))
    rows = [
        (
            csv_tokens(record, columns[0], at),
            csv_tokens(record, columns[1], at),
            0.0 if both else csv_number(record, columns[2], at),
        )
        for at, record in _table(path, fields, columns)
    ]
    if not rows:
        raise ConfigError(f"{where}: the trace has no request")
    scales = [number(fields, f"{part}_scale_factor", where) for part in ("prefill", "decode")]
    prompts, outputs = (
        np.maximum((np.array([row[place] for row in rows]) * scales[place]).astype(np.int64), 0 if both else 1)
        for place in (0, 1)
    )
    total = np.maximum(prompts + outputs, 1)
    beyond = np.maximum(total - most, 0)
    if both:
        prompts, outputs = (
            np.maximum(part - np.ceil(beyond * (part / total)).astype(np.int64), 1) for part in (prompts, outputs)
        )
    else:
        prompts = prompts - beyond
    return prompts, outputs, np.array([row[2] for row in rows])


def _table(path: Path, fields: dict[str, Any], columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of the CSV that a generator names, each with its place for error messages."""
    file = _found(path, str(fields["trace_file"]))
    lines, header = read_lines(file), CsvHeader(file, columns)
    header.read(lines)
    for where, line in lines:
        yield where, header.record(where, line)


def _found(path: Path, name: str) -> Path:
    """The file, whose name is relative to where Vidur ran: this folder, or one above the configuration."""
    given = Path(name)
    places = (given, *(parent / given for parent in path.absolute().parents))
    for place in places:
        for candidate in (place, place.with_name(f"{place.name}.gz")):
            if candidate.is_file():
                return candidate
    raise ConfigError(f"{path.name} needs {name}, which is neither here nor in a folder above {path.name}")


VIDUR_CONFIG = TraceFormat("vidur-config", read_vidur_config)
