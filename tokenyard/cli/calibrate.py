"""`tokenyard calibrate`: measure how long steps take, here or at a server, and write it as a cost profile."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from tokenyard.base import ConfigError, ExecutorInfo
from tokenyard.cli.calibrate_requests import calibrate_requests, profile_word, terms_table
from tokenyard.cli.flags import resolve
from tokenyard.cli.simulation_arguments import check_output, progress_bar
from tokenyard.config import Settings
from tokenyard.cost import LinearTerms, Profile, fit_terms, relative_errors, save_profile
from tokenyard.cost.calibration import CalibrationRunner, Measured, measure_all, points
from tokenyard.cost.fit import MIN_SAMPLES
from tokenyard.cost.profiles import LINKS_CPU, LINKS_GPU, POOR_ERROR
from tokenyard.engine.processes.logs import set_up_logging
from tokenyard.engine.scheduler_process.scheduler_loop import load_executor
from tokenyard.wiring import engine_config, with_model_folder

HELD_OUT_EVERY = 4


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenyard calibrate` that are not settings."""
    parser.add_argument("model", nargs="?", default=None, help="folder of the model; the demo model if absent")
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="file for the profile [profile.json]"
    )
    parser.add_argument(
        "--device-name", default="", metavar="NAME", help="name of the device in the profile; its own if absent"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=75.0,
        metavar="S",
        help="start no further step or probe after this many seconds [75]",
    )
    parser.add_argument(
        "--server", metavar="URL", help="measure a running OpenAI-compatible server by a small grid of requests instead"
    )
    parser.add_argument("--server-api-key", metavar="KEY", help="key that --server wants as a bearer token")
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="read what vllm bench serve, sglang.bench_serving, guidellm, genai-perf, aiperf or tokenyard bench serve "
        "recorded of single requests instead",
    )


def calibrate(namespace: argparse.Namespace) -> int:
    """Measure, fit, write and print. Returns the exit status."""
    check_output(namespace.output, "--output")
    if not namespace.seconds > 0.0:
        raise ConfigError(f"--seconds is {namespace.seconds}; it must be above 0")
    settings = resolve(vars(namespace)).settings
    if namespace.server or namespace.results:
        if namespace.model:
            raise ConfigError(f"--server and --results measure no model here; leave out {namespace.model}")
        return calibrate_requests(namespace, settings)
    settings = with_model_folder(settings)
    set_up_logging("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    # Profiles, and the simulator that reads them, support a single kind of KV pool.
    executor = load_executor(engine_config(replace(settings, swa_full_tokens_ratio=0.0)))
    try:
        measured, wanted = _measure(CalibrationRunner(executor), executor.info, namespace.seconds)
    finally:
        executor.close()
    terms, errors = fit_and_judge(measured)
    made = make_profile(executor.info, settings, terms, namespace.device_name, _source(measured, errors))
    profile = replace(made, error=round(float(errors.mean()), 6))
    save_profile(profile, namespace.output)
    _print(profile, measured, wanted, errors)
    print(f"wrote {namespace.output}, for `simulate --profile {namespace.output}` or `serve --cost-profile`")
    return 0


def _measure(rig: CalibrationRunner, info: ExecutorInfo, seconds: float) -> tuple[list[Measured], int]:
    """The points measured within `seconds`, and how many were planned. Raises ConfigError if there are too few."""
    wanted = points(info)
    measured: list[Measured] = []
    with progress_bar(quiet=False) as bar:
        task = bar.add_task("steps", total=len(wanted))
        for one in measure_all(rig, wanted, time.monotonic, seconds):
            measured.append(one)
            bar.update(task, completed=len(measured))
    if len(measured) < MIN_SAMPLES + HELD_OUT_EVERY:
        raise ConfigError(
            f"only {len(measured)} of {len(wanted)} steps could be measured, too few to fit costs to; raise --seconds, "
            "--max-total-tokens or --context-length"
        )
    return measured, len(wanted)


def fit_and_judge(measured: list[Measured]) -> tuple[LinearTerms, np.ndarray]:
    """Terms fitted to all steps, and the relative errors on every fourth step of a fit to the others."""
    held_out = measured[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    rest = [one for place, one in enumerate(measured) if place % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    return fit_terms(measured), np.abs(relative_errors(fit_terms(rest), held_out))


def make_profile(info: ExecutorInfo, settings: Settings, terms: LinearTerms, device_name: str, source: str) -> Profile:
    """The profile of the measured model on this device. Link speeds are typical values, not measured."""
    on_cuda = info.device.startswith("cuda")
    return Profile(
        device=profile_word(device_name) or _device_name(info.device),
        model=profile_word(settings.model_name),
        terms=terms,
        kv_pool_tokens=info.num_pages * info.page_size,
        kv_bytes_per_token=max(info.kv_bytes_per_token, 1),
        context_length=info.context_length,
        source=f"{source}, {info.dtype}",
        page_size=info.page_size,
        links=dict(LINKS_GPU if on_cuda else LINKS_CPU),
    )


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return profile_word(device)
    import torch

    return profile_word(torch.cuda.get_device_name(device))


def _source(measured: list[Measured], errors: np.ndarray) -> str:
    return f"measured by tokenyard calibrate: {len(measured)} steps, {100 * errors.mean():.1f} % off on steps held out"


def _print(profile: Profile, measured: list[Measured], wanted: int, errors: np.ndarray) -> None:
    console = Console()
    console.print(terms_table(profile))
    left = "" if len(measured) == wanted else f" of {wanted} (the rest would have taken longer than --seconds)"
    console.print(
        f"{len(measured)} steps measured{left}; on the {len(errors)} held out from a trial fit it is off by "
        f"{100 * errors.mean():.1f} % on average, {100 * errors.max():.1f} % at most"
    )
    if errors.mean() > POOR_ERROR:
        console.print("that is much: was the device busy with something else? measure again when it is not")
