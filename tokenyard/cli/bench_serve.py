"""`tokenyard bench serve`: load a running server and print the results."""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from tokenyard.base import ConfigError
from tokenyard.bench import datasets
from tokenyard.bench.backends import BACKENDS, RequestBackend, RequestOptions
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.load_generator import BenchResult, ServerClient, run_load
from tokenyard.bench.report import write_bench_page
from tokenyard.bench.results import Targets, summarize
from tokenyard.bench.session_load import measured_sessions, run_sessions, session_lines, session_row
from tokenyard.bench.table import append_line, remarks, serving_table
from tokenyard.cli.bench_arguments import SESSIONS
from tokenyard.cli.bench_prompts import make_prompts
from tokenyard.cli.simulation_arguments import check_output, session_options
from tokenyard.cli.simulation_arguments import load_tokenizer as load_tokenizer_function
from tokenyard.cli.terminal import command_line
from tokenyard.engine.text.tokenizer_files import load_tokenizer
from tokenyard.sim.traces.formats import detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions


def bench(namespace: argparse.Namespace) -> int:
    """Run the benchmark. Returns 0, or 1 if no request succeeded."""
    if namespace.bench == "offline":
        from tokenyard.cli.bench_offline import bench_offline

        return bench_offline(namespace)
    return asyncio.run(bench_serve(namespace))


async def bench_serve(args: argparse.Namespace) -> int:
    """Load a server and print the table. Raises ConfigError for wrong arguments, or if the server does not answer."""
    targets = Targets.parse(args.goodput)
    _check_counts(args)
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    async with ServerClient(base_url, _headers(args.header)) as target:
        backend = await read_backend(target, args)
        tokenizer = await _tokenizer(target, args.tokenizer)
        rng = np.random.default_rng(args.seed)
        sessions: dict[str, Any] = {}
        rate: float | str
        if args.dataset_name == SESSIONS:
            run, rate, sessions = await _run_sessions(target, backend, args, tokenizer, rng)
        else:
            run, rate = await _run_requests(target, backend, args, tokenizer, rng)
        served = await _served(target)
    numbers = {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": rate,
        "max_concurrency": args.max_concurrency,
        **summarize(run, targets, tokenizer),
        **sessions,
    }
    load = rate if sessions else f"at {rate} requests/s"
    print(f"{args.dataset_name} {load} against {served['model']} on {served['device']}; targets: {targets}")
    print(serving_table(numbers, cache_report=args.cache_report))
    notes = remarks(run.answers, numbers)
    for line in (*(session_lines(numbers["sessions"]) if sessions else ()), *notes):
        print(line)
    if args.report:
        facts = {
            **served,
            "rate": f"{rate}" if sessions else f"{rate} requests/s",
            "targets": f"{targets} (ms)",
            "seed": str(args.seed),
        }
        write_bench_page(args.report, run, targets, numbers, facts, notes)
    if args.output_file:
        details = {"requests": [asdict(answer) for answer in run.answers]} if args.output_details else {}
        append_line(args.output_file, {**numbers, **details})
    return 0 if numbers["completed"] else 1


async def _run_requests(
    target: ServerClient,
    backend: RequestBackend,
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    rng: np.random.Generator,
) -> tuple[BenchResult, float | str]:
    """The run of a data set of single requests, and its rate."""
    prompts = make_prompts(args, tokenizer, rng, args.seed)
    if args.use_trace_timestamps:
        arrivals_s, rate = datasets.recorded_arrivals(prompts), "trace"
    else:
        arrivals_s, rate = datasets.poisson_arrivals(len(prompts), args.request_rate, rng), args.request_rate
    for prompt in prompts:
        backend.body(prompt)  # content that the backend does not accept is refused before anything is sent
    await _warm_up(target, backend, prompts[: args.warmup_requests], flush=args.flush_cache)
    return await _measure(target, backend, prompts, arrivals_s, args.max_concurrency), rate


async def _run_sessions(
    target: ServerClient,
    backend: RequestBackend,
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    rng: np.random.Generator,
) -> tuple[BenchResult, str, dict[str, Any]]:
    """The run of a trace of sessions, its load in words, and its figures. Raises ConfigError for another trace."""
    if args.dataset_path is None or tokenizer is None:
        missing = "--dataset-path with a trace" if args.dataset_path is None else "a tokenizer; give --tokenizer"
        raise ConfigError(f"--dataset-name {SESSIONS} needs {missing}")
    options = ReadOptions(
        seed=args.seed,
        tokenize=load_tokenizer_function(Path(args.tokenizer)) if args.tokenizer else None,
        sessions=session_options(args, args.context_length),
        share_system_prompt=args.share_system_prompt,
    )
    workload = read_trace(args.dataset_path, args.trace_format or detect_format(args.dataset_path), options)
    if workload.sessions is None:
        raise ConfigError(f"{args.dataset_path} has no sessions; choose another --dataset-name")
    for note in workload.notes:
        print(f"note: {note}")
    vocabulary = datasets.Vocabulary(tokenizer)
    backend.body(session_row(workload, vocabulary, 0))
    warm_up = [DatasetRow(vocabulary.ids(8, rng), 8, 1) for _ in range(args.warmup_requests)]
    await _warm_up(target, backend, warm_up, flush=args.flush_cache)
    with _progress() as progress:
        task = progress.add_task("turns", total=len(workload))
        run = await run_sessions(target, backend, workload, vocabulary, on_done=lambda: progress.advance(task))
    starts = f"{args.concurrent_sessions} at a time" if args.concurrent_sessions else "by time"
    if args.sessions_per_hour:
        starts = f"{args.sessions_per_hour:g} an hour"
    return run, f"({workload.sessions.count}, {starts})", {"sessions": measured_sessions(workload, run)}


async def _served(target: ServerClient) -> dict[str, str]:
    """Facts about the server for the report, from its own answers; marked as unknown if it gives none."""
    try:
        info = await target.get("/server_info")
    except ConfigError:  # for example, another kind of server answers that path with a page
        info = None
    info = info if isinstance(info, dict) else {}
    model, device = info.get("served_model_name"), _device(info)
    return {
        "command": command_line(secret=("--header",)),
        "server": target.base_url,
        "model": str(model or "unknown"),
        "device": device or "an unknown device",
        "server version": str(info.get("version") or "unknown"),
    }


def _device(info: dict[str, Any]) -> str:
    """The device that the server reports, "" if it reports none."""
    if info.get("executor") == "mock":
        return "the mock executor"
    return str(info.get("device") or "")


def _check_counts(args: argparse.Namespace) -> None:
    """Raise ConfigError for counts that cannot work."""
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    if args.warmup_requests < 0:
        raise ConfigError("--warmup-requests must not be negative")
    check_output(args.report, "--report")
    if args.output_details and not args.output_file:
        raise ConfigError("--output-details needs --output-file")


def _headers(words: list[str]) -> dict[str, str]:
    """HTTP headers from `NAME: VALUE` words. Raises ConfigError."""
    pairs = [word.partition(":") for word in words]
    for name, colon, _ in pairs:
        if not colon or not name.strip():
            raise ConfigError(f"--header {name!r} is not of the form 'NAME: VALUE'")
    return {name.strip(): value.strip() for name, _, value in pairs}


async def read_backend(target: ServerClient, args: argparse.Namespace) -> RequestBackend:
    """The chosen API, with the model name that requests carry."""
    try:
        extra = json.loads(args.extra_request_body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-request-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-request-body must be a JSON object")
    model = args.bench_model
    if model is None:
        listed = await target.get("/v1/models")
        if not listed or not listed.get("data"):
            raise ConfigError(f"{target.base_url} lists no model; give --model")
        model = listed["data"][0]["id"]
    return BACKENDS[args.backend](RequestOptions(model, not args.disable_ignore_eos, extra))


async def _tokenizer(target: ServerClient, path: str | None) -> Tokenizer | None:
    """The tokenizer at `path`, else the server's own if its folder is on this machine."""
    if path:
        return load_tokenizer(path)
    info = await target.get("/model_info") or {}
    for found in (info.get("tokenizer_path"), info.get("model_path")):
        if found and (Path(found) / "tokenizer.json").is_file():
            return load_tokenizer(found)
    return None


async def _warm_up(target: ServerClient, backend: RequestBackend, prompts: list[DatasetRow], *, flush: bool) -> None:
    """Send the warm-up requests and wait for their answers. Raises ConfigError if one fails."""
    for answer in await asyncio.gather(*(target.stream(backend, prompt) for prompt in prompts)):
        if answer.error:
            raise ConfigError(f"the warm-up request failed: {answer.error}; --warmup-requests 0 skips it")
    if flush:
        await target.flush_cache()


async def _measure(
    target: ServerClient, backend: RequestBackend, prompts: list[DatasetRow], arrivals_s: list[float], limit: int | None
) -> BenchResult:
    """Run the load, with a progress bar on a terminal."""
    with _progress() as progress:
        task = progress.add_task("requests", total=len(prompts))
        return await run_load(
            target, backend, prompts, arrivals_s, max_concurrency=limit, on_done=lambda: progress.advance(task)
        )


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
