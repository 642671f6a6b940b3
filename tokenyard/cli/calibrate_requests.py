"""`tokenyard calibrate --server` and `--results`: step times of an engine from what its clients see."""

import argparse
import asyncio
import re
from dataclasses import fields, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from tokenyard.base import ConfigError
from tokenyard.bench.backends import CompletionsBackend, RequestOptions
from tokenyard.bench.load_generator import ServerClient
from tokenyard.bench.result_files import Run, read_result_file
from tokenyard.bench.server_facts import ServerFacts, read_server_facts
from tokenyard.bench.step_probe import probes, run_probes
from tokenyard.cli.simulation_arguments import progress_bar
from tokenyard.config import Settings
from tokenyard.cost import LinearTerms, Profile, save_profile
from tokenyard.cost.observed_requests import ObservedFit, fit_requests
from tokenyard.cost.profiles import LINKS_GPU, POOR_ERROR

FOREIGN_KV_BYTES = 131_072
"""KV per token of an engine that does not say: that of Llama 3 8B. Only transfers of KV depend on it."""


def calibrate_requests(args: argparse.Namespace, settings: Settings) -> int:
    """Measure or read, fit, write and print. Returns 0. Raises ConfigError for what cannot work."""
    if args.server and args.results:
        raise ConfigError("--server measures and --results reads; give one of them")
    if args.server:
        runs, facts = asyncio.run(_measure(args.server, args.server_api_key, settings, args.seconds))
        where = args.server
    else:
        runs, facts = [run for path in args.results for run in read_result_file(path)], ServerFacts()
        where = ", ".join(path.name for path in args.results)
    fit = fit_requests(runs)
    facts = replace(facts, device=args.device_name or facts.device)
    profile = _profile(fit, runs, facts, settings, where)
    save_profile(profile, args.output)
    _print(profile, fit, runs)
    if settings.max_total_tokens is None and facts.kv_pool_tokens is None:
        print(
            f"the KV pool is unknown: {profile.kv_pool_tokens} tokens were in use at once, so it has at least that "
            "many; --max-total-tokens sets it"
        )
    print(f"wrote {args.output}, for `simulate --profile {args.output}`")
    return 0


async def _measure(
    server: str, api_key: str | None, settings: Settings, seconds: float
) -> tuple[list[Run], ServerFacts]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with ServerClient(server, headers) as target:
        facts = await read_server_facts(target)
        backend = CompletionsBackend(RequestOptions(facts.model, ignore_eos=True, extra={}))
        wanted = probes(settings.context_length or facts.context_length)
        with progress_bar(quiet=False) as bar:
            task = bar.add_task("probes", total=len(wanted))
            return await run_probes(target, backend, wanted, seconds, on_done=lambda: bar.advance(task)), facts


def _profile(fit: ObservedFit, runs: list[Run], facts: ServerFacts, settings: Settings, where: str) -> Profile:
    pool = settings.max_total_tokens or facts.kv_pool_tokens or max(map(_most_in_use, runs))
    longest = max(one.prompt_tokens + one.output_tokens for run in runs for one in run)
    requests = sum(map(len, runs))
    return Profile(
        device=profile_word(facts.device) or "model",
        model=profile_word(facts.model) or "model",
        terms=fit.terms,
        kv_pool_tokens=pool,
        kv_bytes_per_token=FOREIGN_KV_BYTES,
        context_length=settings.context_length or facts.context_length or longest + 1,
        source=f"fitted to {requests} requests seen from outside ({where})",
        links=dict(LINKS_GPU),
        error=round(fit.error, 6),
        measured=_errors(fit),
        request_ms=round(fit.request_ms, 4),
    )


def _most_in_use(run: Run) -> int:
    """The most tokens of prompts and answers that were in flight at once."""
    starts = sorted((one.start_s, one.prompt_tokens + one.output_tokens) for one in run)
    ends = sorted((one.end_s, one.prompt_tokens + one.output_tokens) for one in run)
    most = used = done = 0
    for start, tokens in starts:
        while ends[done][0] <= start:
            used -= ends[done][1]
            done += 1
        used += tokens
        most = max(most, used)
    return most


def profile_word(name: str) -> str:
    """`name` as profiles spell names: lower-case letters, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def terms_table(profile: Profile) -> Table:
    """The terms of a profile that are not zero, in ms."""
    table = Table(title=profile.name)
    table.add_column("term")
    table.add_column("ms", justify="right")
    for term in fields(LinearTerms):
        if getattr(profile.terms, term.name):
            table.add_row(term.name, f"{getattr(profile.terms, term.name):.4g}")
    return table


def _errors(fit: ObservedFit) -> str:
    """The errors on held-out requests in words."""
    parts = [
        f"{name} {np.median(100 * abs(errors)):.1f} % (90th percentile {np.percentile(100 * abs(errors), 90):.1f} %)"
        for name, errors in (("TTFT alone", fit.ttft_errors), ("TPOT", fit.tpot_errors))
        if len(errors)
    ]
    return f"{', '.join(parts)} on requests held out of the fit"


def _print(profile: Profile, fit: ObservedFit, runs: list[Run]) -> None:
    table = terms_table(profile)
    table.add_row("per request, outside the scheduler", f"{profile.request_ms:.4g}")
    console = Console()
    console.print(table)
    console.print(f"{sum(map(len, runs))} requests in {len(runs)} runs, {fit.samples} samples of step times")
    console.print(f"median error: {profile.measured}")
    if not len(fit.ttft_errors):
        console.print("no request was alone until its first token: the prefill's time is inferred from slower decodes")
    if fit.error > POOR_ERROR:
        console.print("that is much: was the server busy with other requests, or does it run several engines?")
