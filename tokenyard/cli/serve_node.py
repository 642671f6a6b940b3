"""`tokenyard serve --node-rank R`: the ranks of a model on a machine other than node 0, without a server."""

import dataclasses
import logging
import signal
import sys
from typing import NoReturn

import setproctitle

from tokenyard.base import EngineDeadError
from tokenyard.config import Settings
from tokenyard.kv_layout.model_digest import model_digest
from tokenyard.wiring import adapter_folders, executor_options, make_nodes_config

log = logging.getLogger(__name__)

FAILED = 1


class _Stopped(BaseException):
    """A signal asked this process to end."""


def serve_node(settings: Settings) -> int:
    """Execute the plans of node 0 until it ends or a signal arrives. Returns 0, or 1 if node 0 is not reachable.

    Raises ConfigError if node 0 refuses this node.
    """
    from tokenyard.executor.distributed.partition import ParallelKind
    from tokenyard.executor.distributed.remote_nodes import MultiNodeConfig
    from tokenyard.executor.distributed.worker_node import WorkerNode

    setproctitle.setproctitle(f"tokenyard: node {settings.node_rank}")
    weights = model_digest(settings.model_path)
    terms = MultiNodeConfig(**dataclasses.asdict(make_nodes_config(settings)), weights=weights)
    options = executor_options(settings, adapter_folders(settings))
    form: ParallelKind = "tensor" if settings.tp_size > 1 else "pipeline"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        WorkerNode(terms, settings.model_path, options, form, max(settings.tp_size, settings.pp_size)).run()
    except _Stopped:
        log.info("node %d was told to stop", settings.node_rank)
    except EngineDeadError as error:
        if settings.log_format == "json":
            log.critical("%s", error.message)
        else:
            print(f"tokenyard: {error.message}", file=sys.stderr)
        return FAILED
    log.info("node %d has ended", settings.node_rank)
    return 0


def _stop(number: int, frame: object) -> NoReturn:
    raise _Stopped
