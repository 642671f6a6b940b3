"""Shared by `simulate`, `compare`, `goodput` and `plan`: arguments, and the workload and setup made from them."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tokenyard.base import ConfigError, Int32Array, SchedulerSettings
from tokenyard.base.percent import percent
from tokenyard.base.ranges import NumberRange
from tokenyard.cli.flags import Flag, all_flags
from tokenyard.cli.hardware_arguments import add_hardware_arguments, hardware_of
from tokenyard.cli.kv_arguments import add_disagg_arguments, add_kv_store_arguments, disagg_settings, kv_store_settings
from tokenyard.cli.session_arguments import add_session_arguments
from tokenyard.config import POOL_TOKENS, Settings
from tokenyard.cost import Profile, load_profile
from tokenyard.routing.registry import POLICY_NAMES, make_policy
from tokenyard.sim.engine.presets import preset, preset_names
from tokenyard.sim.engine.speculation import Speculation
from tokenyard.sim.fleet.fleet_settings import Fleet, read_fleet
from tokenyard.sim.hardware.device_profile import find_device_profile
from tokenyard.sim.planner.trial import reseeded
from tokenyard.sim.report.comparison import slo_text, trust
from tokenyard.sim.report.request_table import check_table_path
from tokenyard.sim.simulate import DefaultSlo, Setup
from tokenyard.sim.traces.formats import TRACE_FORMATS, detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions, Tokenize
from tokenyard.sim.traces.sessions import SessionOptions
from tokenyard.sim.traces.synthetic import SYNTHETIC, synthetic
from tokenyard.sim.traces.workload import Workload

ORACLE = ", oracle"
"""Suffix of the name of a setting whose run knows the true output lengths."""

OUTPUT_FLAGS = ("json", "report", "perfetto", "tape", "requests_out")
CONTEXT_RANGE = NumberRange(2, 1 << 22)
MAX_HOST_US = 1e9
MAX_SCHEDULERS = 4096
ANY_WIDTH = 100_000
MAX_SEEDS = 1000


def add_setting_names(parser: argparse.ArgumentParser) -> None:
    """The names of the settings to compare."""
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help=f"presets ({', '.join(preset_names())}) or policies of --schedule-policy",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the workload, the device, speculation and the scheduler."""
    add_workload_arguments(parser)
    add_device_arguments(parser)
    add_draft_arguments(parser)
    add_scheduler_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload: a trace or synthetic traffic."""
    group = parser.add_argument_group("workload")
    group.add_argument("--trace", type=Path, metavar="FILE", help="trace file")
    group.add_argument(
        "--trace-format", choices=list(TRACE_FORMATS), help="format of the trace [detected from its first lines]"
    )
    group.add_argument(
        "--bad-lines",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with a trace line that cannot be read: stop with an error, or skip and count it [fail]",
    )
    group.add_argument(
        "--unknown-lengths",
        choices=("draw", "skip"),
        default="draw",
        help="requests that were refused or aborted: draw the output length from the other requests, or skip them "
        "[draw]",
    )
    group.add_argument("--synthetic", choices=list(SYNTHETIC), help="synthetic traffic instead of a trace")
    group.add_argument(
        "--request-rate", type=float, default=5.0, metavar="R", help="synthetic traffic: requests per second [5]"
    )
    group.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="read only the first N requests; synthetic traffic: total number of requests [1000]",
    )
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="multiply the arrival rate by X [1]")
    group.add_argument("--seed", type=int, default=0, help="random seed [0]")
    group.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="folder or tokenizer.json; required for traces that contain text"
    )
    add_session_arguments(parser)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the device's cost model and of the fleet."""
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device", default="h100", help="device of a built-in cost profile, or of a data sheet such as h200_sxm [h100]"
    )
    group.add_argument(
        "--model",
        dest="profile_model",
        default="llama-3-8b",
        metavar="MODEL",
        help="model of that profile, a known model such as Qwen/Qwen3-32B, or a config.json [llama-3-8b]",
    )
    add_hardware_arguments(group)
    group.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="cost profile written by `tokenyard calibrate`, instead of a built-in one",
    )
    group.add_argument(
        "--from-server",
        metavar="URL",
        help="take KV pool and context length from a running server: vLLM, SGLang or Tokenyard",
    )
    add_fleet_arguments(parser)
    add_disagg_arguments(parser)
    add_kv_store_arguments(parser)
    group.add_argument(
        "--host-us", type=float, default=0.0, metavar="US", help="CPU time per step, in microseconds [0]"
    )
    group.add_argument(
        "--overlap", action="store_true", help="plan a step while the previous one runs (overlap scheduling)"
    )
    group.add_argument(
        "--cost-error",
        type=float,
        default=0.0,
        metavar="E",
        help="relative error of the scheduler's prior cost model (0.2: 20 %%) [0]",
    )
    group.add_argument(
        "--learn-cost", action="store_true", help="let the scheduler correct its cost model from measured steps"
    )


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the fleet: engines and routers."""
    group = parser.add_argument_group("fleet")
    group.add_argument("--replicas", type=int, default=1, metavar="R", help="number of engines behind the router [1]")
    group.add_argument(
        "--dp-size",
        type=int,
        default=1,
        metavar="D",
        help="data-parallel ranks per engine; each has its own device, and they share the engine's limits [1]",
    )
    group.add_argument(
        "--router",
        default="round_robin",
        metavar="POLICY",
        help=f"routing policy: {', '.join(POLICY_NAMES)}, or module:Class [round_robin]",
    )
    group.add_argument(
        "--fleet",
        type=Path,
        metavar="FILE",
        help="YAML or JSON file with routers, queue, KV events, devices and a schedule of faults, drains and "
        "joins (docs/simulator.md)",
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of speculative decoding: the number of draft tokens and their acceptance rate."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative-num-draft-tokens",
        dest="draft_tokens",
        type=int,
        default=0,
        metavar="K",
        help="maximum draft tokens per request and step; 0 disables speculative decoding [0]",
    )
    group.add_argument(
        "--draft-acceptance",
        default="0.7",
        metavar="A[-B]",
        help="acceptance rate of a draft token if those before it are accepted; with a range, each request draws "
        "its own rate [0.7]",
    )
    group.add_argument(
        "--draft-coverage",
        type=float,
        default=1.0,
        metavar="S",
        help="share of output tokens that have a draft; low for prompt lookup on new text [1]",
    )
    group.add_argument(
        "--draft-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="device time for drafting per step, in milliseconds [0]",
    )


def add_oracle_argument(group: argparse._ArgumentGroup) -> None:
    """The `--oracle` flag."""
    group.add_argument(
        "--oracle",
        action="store_true",
        help="also run with known output lengths, the upper bound on what prediction can gain",
    )


def add_table_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags of several seeds and of the table of requests."""
    group.add_argument(
        "--requests-out",
        type=Path,
        metavar="OUT",
        help="write a table with a row per request: .csv, or .arrow, .feather or .parquet (needs tokenyard[analysis])",
    )
    add_seeds_argument(group)


def add_seeds_argument(group: argparse._ArgumentGroup) -> None:
    """The number of seeds."""
    group.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="repeat every run with N seeds, from --seed on, and give means with 95 %% intervals [1]",
    )


def scheduler_flags() -> list[Flag]:
    """The server's flags that apply to a simulated scheduler."""
    names = {field.name for field in fields(SchedulerSettings)} - {"dp_size"} | {"max_total_tokens"}
    return [flag for flag in all_flags() if flag.name in names]


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the scheduler: a preset, and the server's scheduler flags, which override the preset."""
    group = parser.add_argument_group("scheduler")
    group.add_argument("--preset", choices=preset_names(), help="settings of another engine [the server's own]")
    for flag in scheduler_flags():
        flag.add_to(group)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments out of range and for output files that cannot be written, before the run."""
    checks = (
        (args.seed >= 0, f"--seed is {args.seed}; it must be at least 0"),
        (0.0 < args.request_rate < float("inf"), f"--request-rate is {args.request_rate}; it must be above 0"),
        (0.0 <= args.host_us <= MAX_HOST_US, f"--host-us is {args.host_us}; it must be from 0 to {MAX_HOST_US:g}"),
        (args.replicas >= 1, f"--replicas is {args.replicas}; it must be at least 1"),
        (args.dp_size >= 1, f"--dp-size is {args.dp_size}; it must be at least 1"),
        (args.replicas * args.dp_size <= MAX_SCHEDULERS, f"a fleet has at most {MAX_SCHEDULERS} schedulers"),
        (args.cost_error > -1.0, f"--cost-error is {args.cost_error}; it must be above -1"),
    )
    for holds, message in checks:
        if not holds:
            raise ConfigError(message)
    make_policy(args.router)
    seeds = getattr(args, "seeds", 1)
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds is {seeds}; it must be from 1 to {MAX_SEEDS}")
    given = {name: getattr(args, name, None) for name in OUTPUT_FLAGS}
    written = {f"--{name.replace('_', '-')}": path for name, path in given.items() if path is not None}
    if (table := given["requests_out"]) is not None:
        check_table_path(table)
    files = [path.resolve() for path in (*written.values(), args.trace, args.profile) if path is not None]
    for flag, path in written.items():
        check_output(path, flag)
        if files.count(path.resolve()) > 1:
            raise ConfigError(f"{flag} {path} is also another file of this run; name a separate file")


def check_output(path: Path | None, flag: str) -> None:
    """Raise ConfigError if no file can be written at `path`."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"{flag} {path} {what}; name a file")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; name another file")


def load_workload(args: argparse.Namespace, model_context: int | None = None) -> Workload:
    """The workload from the arguments. `model_context` is the context length of the model.

    Raises ConfigError unless exactly one of --trace and --synthetic is given.
    """
    if (args.trace is None) == (args.synthetic is None):
        raise ConfigError("give either --trace FILE or --synthetic KIND")
    if args.synthetic is not None:
        made = synthetic(args.synthetic, 1000 if args.limit is None else args.limit, args.request_rate, args.seed)
        _check_sessions(args, made, f"--synthetic {args.synthetic}")
        return made.scaled(args.rate_scale)
    tokenize = load_tokenizer(args.tokenizer) if args.tokenizer is not None else None
    options = ReadOptions(
        seed=args.seed,
        tokenize=tokenize,
        limit=args.limit,
        skip_bad=args.bad_lines == "skip",
        skip_unknown=args.unknown_lengths == "skip",
        sessions=session_options(args, _given_flags(args).get("context_length", model_context)),
        share_system_prompt=args.share_system_prompt,
    )
    found = args.trace_format or detect_format(args.trace)
    workload = read_trace(args.trace, found, options).scaled(args.rate_scale)
    _check_sessions(args, workload, f"{args.trace.name}, read as {found},")
    guess = () if args.trace_format else (f"{args.trace.name} is read as {found}, by its first lines",)
    return replace(workload, remarks=guess + workload.remarks)


def of_seed(args: argparse.Namespace, workload: Workload, seed: int) -> tuple[argparse.Namespace, Workload]:
    """The arguments and the workload of seed `--seed` + `seed`; `workload` is that of 0.

    Synthetic traffic and sessions are drawn again. The arrivals of a trace are shuffled as `reseeded` does.
    """
    given = argparse.Namespace(**{**vars(args), "seed": args.seed + seed})
    if seed == 0:
        return args, workload
    if args.synthetic is not None or workload.sessions is not None:
        return given, load_workload(given, profile_of(args).context_length)
    return given, reseeded(workload, given.seed)


def _check_sessions(args: argparse.Namespace, workload: Workload, name: str) -> None:
    """Raise ConfigError if flags ask for sessions and the workload has none."""
    if workload.sessions is None and (args.concurrent_sessions or args.sessions_per_hour or args.sessions):
        raise ConfigError(
            f"{name} has no sessions; leave out --concurrent-sessions, --sessions-per-hour and --sessions"
        )


def session_options(args: argparse.Namespace, context_length: int | None) -> SessionOptions:
    """The choice of sessions from the arguments. A session must fit `context_length`, None for no limit."""
    return SessionOptions(
        concurrent=args.concurrent_sessions,
        per_hour=args.sessions_per_hour,
        sessions=args.sessions,
        think_cap_s=args.think_cap_s,
        context_length=context_length,
        cut_long=args.long_sessions == "cut",
        close=args.close_sessions,
        shrink=args.shrink,
        seed=args.seed,
    )


def load_tokenizer(path: Path) -> Tokenize:
    """A function from text to token ids. Raises ConfigError if `path` holds no tokenizer."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--tokenizer {file} cannot be read: {error}") from None

    def tokenize(text: str) -> Int32Array:
        whole_characters = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no UTF-8 encoding
        return np.array(tokenizer.encode(whole_characters, add_special_tokens=False).ids, np.int32)

    return tokenize


def make_setup(args: argparse.Namespace, workload: Workload, preset_name: str | None) -> Setup:
    """The setup from the arguments; `preset_name` None takes the server's own settings."""
    profile = profile_of(args)
    given = _given_flags(args)
    pool_tokens = given.pop("max_total_tokens", None)
    longest = max(workload.max_output_tokens, int(workload.max_new_tokens.max()))
    context = given.pop("context_length", min(workload.max_prompt_tokens + longest + 1, profile.context_length))
    CONTEXT_RANGE.check("--context-length", context)
    POOL_TOKENS.check("--max-total-tokens", pool_tokens)
    settings = replace(_base_settings(preset_name, context, profile), **given, max_in_flight=2 if args.overlap else 1)
    settings.validate()
    return Setup(
        profile=profile,
        settings=settings,
        replicas=args.replicas,
        dp_size=args.dp_size,
        router=args.router,
        seed=args.seed,
        host_s=args.host_us / 1e6,
        kv_pool_tokens=pool_tokens,
        prior_scale=1.0 + args.cost_error,
        learn=args.learn_cost,
        fleet=read_fleet(args.fleet, args.profile_model) if args.fleet is not None else Fleet(),
        disagg=disagg_settings(args),
        speculation=_speculation(args),
        kv_store=kv_store_settings(
            args, enabled=settings.enable_hierarchical_cache and not settings.disable_radix_cache
        ),
    )


def _speculation(args: argparse.Namespace) -> Speculation | None:
    """Speculative decoding from the arguments, None if disabled."""
    if args.draft_tokens == 0:
        return None
    low, _, high = args.draft_acceptance.partition("-")
    try:
        acceptance = (float(low), float(high or low))
    except ValueError:
        message = f"--draft-acceptance is {args.draft_acceptance!r}; give a share such as 0.7, or a range 0.3-0.9"
        raise ConfigError(message) from None
    return Speculation(args.draft_tokens, acceptance, args.draft_coverage, draft_s=args.draft_ms / 1e3)


def profile_of(args: argparse.Namespace) -> Profile:
    """`--profile`, a file or one that was read already, or else the profile of the device and the model; with
    `--from-server` it has that server's KV pool and context length.
    """
    if isinstance(args.profile, Profile):
        return args.profile
    if args.profile is not None:
        profile = load_profile(args.profile)
    else:
        profile = find_device_profile(args.device, args.profile_model, hardware_of(args))
    return profile if args.from_server is None else _as_served(profile, args.from_server)


def _as_served(profile: Profile, url: str) -> Profile:
    """The profile with the KV pool and the context length of the server at `url`.

    Raises ConfigError if there is no server, or none that says how large its pool is.
    """
    from tokenyard.bench.server_facts import facts_of  # with an HTTP client, which other runs do not need

    facts = facts_of(url)
    if facts.kv_pool_tokens is None:
        raise ConfigError(
            f"--from-server {url} does not say how large its KV pool is, under /get_server_info or /metrics; give "
            "--max-total-tokens and --context-length instead"
        )
    context = facts.context_length or profile.context_length
    return replace(profile, kv_pool_tokens=facts.kv_pool_tokens, context_length=context)


def check_named(args: argparse.Namespace) -> None:
    """`check_arguments`; also raises ConfigError if a flag, and not a name, gives the preset or the policy."""
    check_arguments(args)
    if args.preset is not None or args.schedule_policy is not None:
        raise ConfigError("presets and policies are given as names here, not as --preset or --schedule-policy")
    if getattr(args, "jobs", 1) < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")


def named_setup(args: argparse.Namespace, workload: Workload, name: str) -> Setup:
    """The setup called `name`: a preset, or the server's own settings with that policy."""
    if name in preset_names():
        return make_setup(args, workload, name)
    return make_setup(argparse.Namespace(**{**vars(args), "schedule_policy": name}), workload, None)


def _given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The scheduler flags on the command line, by field name."""
    words = [(flag, getattr(args, flag.name, None)) for flag in scheduler_flags()]
    return {flag.name: flag.read(word, flag.positive[0]) for flag, word in words if word is not None}


def _base_settings(preset_name: str | None, context_length: int, profile: Profile) -> SchedulerSettings:
    if preset_name is not None:
        return preset(preset_name, context_length)
    return Settings(page_size=profile.page_size).scheduler_settings(context_length=context_length)


def write_numbers(path: Path | None, numbers: object) -> None:
    """Write `numbers` as JSON, unless `path` is None."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def progress_bar(quiet: bool) -> Progress:
    """A progress bar on stderr; silent if `quiet` or not on a terminal."""
    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("requests", lambda s: f"{s['requests']}"),
    ("  length unknown, drawn", lambda s: f"{s['unknown_lengths']}" if s["unknown_lengths"] else "-"),
    ("rejected", lambda s: f"{s['rejected']}"),
    ("unfinished", lambda s: f"{s['unfinished']}"),
    ("answers cut short", lambda s: f"{s['cut_short']}" if s["cut_short"] else "-"),
    ("SLO attainment", lambda s: _share(s["slo_attainment"])),
    ("  longest quarter", lambda s: _share(s["slo_attainment_by_length"]["longest_quarter"])),
    ("  longest 5 %", lambda s: _share(s["slo_attainment_by_length"]["longest_5_percent"])),
    ("  bound", lambda s: _share(s.get("bound_slo_attainment"))),
    ("TTFT p50 / p99 (s)", lambda s: _pair(s["ttft_s"], "p50", "p99")),
    ("TPOT p50 / p99 (s)", lambda s: _pair(s["tpot_s"], "p50", "p99")),
    ("wait p99.9 / max (s)", lambda s: _pair(s["wait_s"], "p999", "max")),
    ("late p99.9 / max (s)", lambda s: _pair(s["late_s"], "p999", "max")),
    ("output tokens/s", lambda s: f"{s['throughput_tokens_per_s']:.0f}"),
    ("prefix hit rate", lambda s: _share(s["prefix_hit_rate"])),
    ("  from the KV store", lambda s: _share(s["kv_store"]["hit_rate"]) if "kv_store" in s else "-"),
    ("preemptions", lambda s: f"{s['preemptions']}"),
    (
        "drafts right / verified",
        lambda s: f"{s['accepted_draft_tokens']} / {s['draft_tokens']}" if "draft_tokens" in s else "-",
    ),
    ("tokens per verify", lambda s: f"{s['tokens_per_verify']:.2f}" if s.get("tokens_per_verify") else "-"),
    ("turns / sessions per hour", lambda s: _of_sessions(s, "{turns_per_hour:.0f} / {sessions_per_hour:.1f}")),
    ("  mean session (s), slowdown", lambda s: _of_sessions(s, "{mean_session_s:.0f}, {mean_slowdown:.2f}")),
    ("  turn's TTFT p50 / p95 (s)", lambda s: _of_sessions(s, "{ttft_s[p50]:.3g} / {ttft_s[p95]:.3g}")),
    ("  longest wait of a turn (s)", lambda s: _of_sessions(s, "{longest_wait_s:.3g}")),
    ("  hit share", lambda s: _share(s["sessions"]["hit_share"]) if "sessions" in s else "-"),
    ("  recomputed tokens", lambda s: _of_sessions(s, "{recomputed_tokens}")),
    ("device busy", lambda s: _share(s["utilisation"])),
    ("simulated / wall", lambda s: f"{s['sim_seconds']:.0f} s / {s['wall_seconds']:.1f} s"),
    ("decision hash", lambda s: s["decision_hash"][:12]),
)


def print_outcomes(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the main numbers of each setting side by side, in several tables where the terminal is too narrow."""
    console = Console()
    names = list(results)
    console.print(Text(table_caption(next(iter(results.values())))), soft_wrap=True)
    for most in range(len(names), 0, -1):
        groups = [names[begin : begin + most] for begin in range(0, len(names), most)]
        tables = [outcome_table({name: results[name] for name in group}) for group in groups]
        unbounded = console.options.update(width=ANY_WIDTH)
        if all(Measurement.get(console, unbounded, table).maximum <= console.width for table in tables):
            break
    for table in tables:
        console.print(table)
    for warning in dict.fromkeys(numbers["warning"] for numbers in results.values() if numbers["warning"]):
        print_warning(console, warning)
    print_notes(note for numbers in results.values() for note in numbers["trace_notes"])
    for name, numbers in results.items():
        if numbers["policy_note"]:
            print(f"note: {name}: {numbers['policy_note']}")


def table_caption(numbers: Mapping[str, Any]) -> str:
    """The line above a table: trace, load, device, error of its cost model, and SLO."""
    slo, load = DefaultSlo(**numbers["slo"]), f"at {numbers['rate_per_s']:.4g} requests/s"
    if "sessions" in numbers:
        load = f"in {numbers['sessions']['sessions']} sessions"
    return (
        f"{numbers['trace']} {load} on {numbers['replicas']} x {numbers['profile']} "
        f"(cost model error: {trust(numbers['profile_error'], numbers['profile_measured'])}); SLO: {slo_text(slo)}"
    )


def print_warning(console: Console, warning: str) -> None:
    """Print a warning in bold on a separate line."""
    console.print(Text(f"WARNING: {warning}", style="bold red"), soft_wrap=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print each different note once."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}")


def outcome_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """The main numbers of each setting, side by side."""
    table = Table()
    table.add_column("")
    for name in results:
        table.add_column(escape(name), justify="right")
    for label, cell in _ROWS:
        cells = [cell(numbers) for numbers in results.values()]
        if any(text != "-" for text in cells):
            table.add_row(label, *cells)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{percent(value)} %"


def _of_sessions(numbers: Mapping[str, Any], form: str) -> str:
    """Figures of the sessions, "-" where there are none or one is not known."""
    figures = numbers.get("sessions")
    try:
        return "-" if figures is None else form.format(**figures)
    except TypeError:  # no session ended
        return "-"


def _pair(values: Mapping[str, float | None], low: str, high: str) -> str:
    return " / ".join("-" if values[key] is None else f"{values[key]:.3g}" for key in (low, high))
