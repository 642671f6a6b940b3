"""A scheduler with its executor and attachments. A scheduler process runs it, or an `LLM` in a thread."""

import importlib
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar, cast

from tokenyard.base import ConfigError, DistributedExecutor, Executor, InvalidRequestError
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.messages import NO_REPLY, RpcRequest, ToScheduler
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.engine.scheduler_process.attachments.cost_report import CostReport
from tokenyard.engine.scheduler_process.attachments.disagg import open_disagg_connector
from tokenyard.engine.scheduler_process.attachments.grammar import GrammarCompiler
from tokenyard.engine.scheduler_process.attachments.kv_events import KvEvents, open_kv_events
from tokenyard.engine.scheduler_process.attachments.kv_store import open_kv_store_connector
from tokenyard.engine.scheduler_process.attachments.lookahead import LookaheadClient
from tokenyard.engine.scheduler_process.attachments.lora import open_lora
from tokenyard.engine.scheduler_process.attachments.priority import create_priority_updates
from tokenyard.engine.scheduler_process.attachments.tenant_usage import TenantUsageExchange
from tokenyard.engine.scheduler_process.attachments.weights import WeightUpdater
from tokenyard.engine.scheduler_process.build_scheduler import build_scheduler, load_prior, measure_prior, open_tape
from tokenyard.engine.scheduler_process.driver import Driver, Port
from tokenyard.engine.scheduler_process.event_loop import event_loop_normal, event_loop_overlap
from tokenyard.engine.scheduler_process.health.liveness import LoopState
from tokenyard.engine.scheduler_process.health.step_log import StepLog
from tokenyard.engine.text.tokenizer_files import load_tokenizer
from tokenyard.kv_layout.model_digest import model_digest

logger = logging.getLogger(__name__)

EXECUTORS = {"torch": "tokenyard.executor.model_loader", "mock": "tokenyard.executor.mock"}
"""Module of each executor; it has a function `load_executor(model_path, **options)`."""

DP_ATTENTION = "tokenyard.executor.distributed.dp_attention"
"""The same for data-parallel ranks that share MLPs; the function takes `meeting`, the rendezvous socket."""

DISTRIBUTED = "tokenyard.executor.distributed.distributed_loader"
"""The same for a model over several ranks; the function takes `tp_size` and `pp_size` as well."""


def load_executor(config: EngineConfig) -> Executor:
    """Load the model. Raises ConfigError for an unknown executor or option, and what its loader raises."""
    module = EXECUTORS.get(config.executor)
    if module is None:
        raise ConfigError(f"no executor {config.executor!r}; there are: {', '.join(EXECUTORS)}")
    options = config.executor_options
    if config.enable_dp_attention:
        module = DP_ATTENTION
    elif max(config.tp_size, config.pp_size) > 1:
        module, options = DISTRIBUTED, options | {"tp_size": config.tp_size, "pp_size": config.pp_size}
        options["share_kv"] = config.kv_store.enabled or config.disagg.role != "null"
        if config.nodes.count > 1:
            options["nodes"] = asdict(config.nodes) | {"weights": model_digest(config.model_path)}
    try:
        loader = importlib.import_module(module).load_executor
    except ModuleNotFoundError as error:
        raise ConfigError(f"the executor {config.executor!r} needs the package {error.name}; install it") from error
    logger.info("loading %s", config.model_path)
    begin_s = time.monotonic()
    executor = cast(Executor, loader(config.model_path, **options))
    info = executor.info
    logger.info(
        "loaded in %.1f s: %s, %s, room for %d KV tokens",
        *(time.monotonic() - begin_s, info.device, info.dtype, info.num_pages * info.page_size),
    )
    return executor


def tokenizer_text(config: EngineConfig) -> str:
    """The tokenizer of the model as JSON text. Raises InvalidRequestError where there is none."""
    if config.skip_tokenizer_init:
        raise InvalidRequestError("this server has no tokenizer, which grammars need", code="unsupported")
    return str(load_tokenizer(config.tokenizer_path or config.model_path).to_str())


class Closable(Protocol):
    """A resource with `close`."""

    def close(self) -> None:
        """Release the resource."""


def _origin_of(profile: str, measured: object) -> str:
    """How the first cost model is known, "" if it is a guess."""
    if not profile:
        return "measured at the start" if measured is not None else ""
    return f"profile {Path(profile).name if Path(profile).is_file() else profile}"


Opened = TypeVar("Opened", bound=Closable | None)


def _closing(resources: ExitStack, opened: Opened) -> Opened:
    """Register an opened resource, if any, to be closed in reverse order; returns it."""
    if opened is not None:
        resources.callback(opened.close)
    return opened


class SchedulerLoop:
    """Everything between a port and a device, loaded and ready to run.

    Create it in the thread that runs it: OpenMP keeps a thread pool per calling thread, and a second pool would leave
    more threads than cores.
    """

    def __init__(
        self,
        config: EngineConfig,
        port: Port,
        deliver: Callable[[ToScheduler], None],
        *,
        rank: int = 0,
        policy_note: str = "",
    ) -> None:
        """Load the model. `deliver` brings messages to the port's inbox from any thread.

        Raises ConfigError for invalid settings or files, and what loading the model raises.
        """
        self.state = LoopState()
        with ExitStack() as resources:
            tape = _closing(resources, open_tape(config, rank))
            publish_snapshot = RpcRequest(NO_REPLY, "publish_kv_snapshot")
            publisher = _closing(resources, open_kv_events(config, rank, lambda: deliver(publish_snapshot)))
            self.flush_tape: Callable[[], None] = tape.flush if tape is not None else lambda: None
            executor = _closing(resources, load_executor(config))
            self.info = executor.info
            self.divided = executor if isinstance(executor, DistributedExecutor) else None
            prior, measured = load_prior(config.cost_profile), None
            if prior is None:
                prior = measured = measure_prior(config, executor)
            self.core = core = build_scheduler(config, executor.info, tape, prior)
            attachments: list[Attachment] = []

            def attach(attachment: Attachment | None) -> None:
                if attachment is not None:
                    # Closed before the executor, whose pages some read and write.
                    attachments.append(_closing(resources, attachment))

            attach(WeightUpdater(executor, core, deliver, rank))  # before all that look for KV
            attach(open_lora(config, core, executor, deliver))  # first, as it may refuse a request
            attach(open_disagg_connector(config, core, executor, deliver, rank))
            attach(open_kv_store_connector(config, core, executor, deliver, rank))  # for what disagg does not fetch
            attach(GrammarCompiler(executor, deliver, lambda: tokenizer_text(config)))
            attach(create_priority_updates(config.priority_function, core))
            attach(LookaheadClient(core, config.scheduler_settings(executor.info)))
            attach(TenantUsageExchange(core, port.send) if config.ranks > 1 else None)
            attach(KvEvents(core, publisher) if publisher is not None else None)
            devices = 1 if config.enable_dp_attention else max(config.tp_size, config.pp_size)
            attach(CostReport(core, _origin_of(config.cost_profile, measured), devices))
            self._driver = Driver(
                self.core,
                executor,
                port,
                log=StepLog(config.decode_log_interval),
                state=self.state,
                attachments=attachments,
                policy_note=policy_note,
                rank=rank,
            )
            self._max_in_flight = config.plans_in_flight(executor.info)
            self._resources = resources.pop_all()

    def run(self) -> None:
        """Run the event loop until the port says stop. Raises DeviceBrokenError, and errors of the scheduler."""
        if self._max_in_flight == 1:
            event_loop_normal(self._driver)
        else:
            event_loop_overlap(self._driver, self._max_in_flight)

    def close(self) -> None:
        """Release the device and close all resources."""
        self._resources.close()
