"""Builds an engine's scheduler, with a tape recorder if `--record` is set."""

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from tokenyard.base import ConfigError, Executor, ExecutorInfo, StepWork
from tokenyard.base.version import __version__
from tokenyard.cost import LinearCost, find_profile
from tokenyard.cost.calibration import quick_calibration
from tokenyard.cost.linear import MS_PER_S
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.policy.registry import create_policy
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.tape.codec import Origin
from tokenyard.tape.recorder import Core, RecordingScheduler

logger = logging.getLogger(__name__)

KEY_BYTES = 32
BUFFER_BYTES = 1 << 16
PROMPT_TOKENS = 512
OLD_SUFFIX = ".old"


class TapeFile:
    """A file for a tape that only this user may read. A write error ends the recording; serving continues."""

    def __init__(self, path: Path) -> None:
        """Open a new file; an existing one is renamed to `.old`. Raises ConfigError if it cannot."""
        self._path = path
        try:
            if path.is_fifo():
                # Opening it would wait for a reader, and writing to a full one would block.
                raise ConfigError(f"--record {path}: this is a pipe; give a file")
            if path.is_file():
                path.replace(path.with_name(path.name + OLD_SUFFIX))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}; give a file that can be written") from error
        self.file = os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES)
        self._usable = True

    def write(self, data: bytes) -> None:
        """Add to the tape."""
        if self._usable:
            try:
                self.file.write(data)
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """Hand everything over to the operating system."""
        if self._usable:
            try:
                self.file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Keep what there is; what is written from now on is lost. May be called twice."""
        self.flush()
        if self._usable:
            self._usable = False
            self.file.close()

    def _give_up(self, error: OSError) -> None:
        self._usable = False
        with contextlib.suppress(OSError):  # it tries once more to write what is left
            self.file.close()
        logger.error("the tape %s ends here: %s; serving continues without it", self._path, error.strerror)


def open_tape(config: EngineConfig, rank: int = 0) -> TapeFile | None:
    """The file that the settings ask for, if they do; ranks above 0 have `.rank1` and so on behind its name.

    Raises ConfigError if it cannot be written.
    """
    return TapeFile(Path(f"{config.record}.rank{rank}" if rank else config.record)) if config.record else None


def build_scheduler(
    config: EngineConfig, info: ExecutorInfo, tape: TapeFile | None, prior: LinearCost | None = None
) -> Core:
    """The scheduler for a loaded model, recorded if there is a `tape`. prior: cost model of the first steps.

    Raises ConfigError for an unknown policy.
    """
    origin = Origin(config.scheduler_settings(info), info, prior)
    if tape is None:
        scheduler = origin.scheduler()
        scheduler.state.counts_sessions = True
        return scheduler
    key = None if config.record_plain else secrets.token_bytes(KEY_BYTES)
    recorder = RecordingScheduler(origin, tape, key, __version__)
    recorder.scheduler.state.counts_sessions = True
    return recorder


def measure_prior(config: EngineConfig, executor: Executor) -> LinearCost | None:
    """Measure the step times of a loaded model if a feature needs them; else None.

    Policies that use costs, PD disaggregation and speculation (how many drafts to verify) need them.
    """
    settings = config.scheduler_settings(executor.info)
    drafts = bool(config.executor_options.get("draft_tokens") or config.executor_options.get("drafts"))
    needs_prior = create_policy(settings.schedule_policy, settings).uses_cost or config.disagg.role != "null" or drafts
    if not needs_prior:
        return None
    if config.executor == "mock":
        return prior_cost_model(executor.info) if drafts else None
    begin_s = time.monotonic()
    prior_cost = quick_calibration(executor, prior_cost_model(executor.info), time.monotonic)
    decode_s, prompt = prior_cost.step(StepWork(tokens=1, rows=1, decode_rows=1)), StepWork()
    prompt.add_chunk(0, PROMPT_TOKENS)
    logger.info(
        "measured steps for %.1f s: a token takes about %.1f ms, a prompt of %d tokens %.0f ms",
        *(time.monotonic() - begin_s, MS_PER_S * decode_s, PROMPT_TOKENS, MS_PER_S * prior_cost.step(prompt)),
    )
    return prior_cost


def load_prior(profile: str) -> LinearCost | None:
    """The prior cost model of a profile; None for no profile. Raises ConfigError for an unknown one."""
    if not profile:
        return None
    return find_profile(profile).cost()
