"""`tokenyard serve --node-rank R`: the ranks of a model on a machine other than node 0, without a server."""

import dataclasses
import logging
import signal
import sys
from typing import NoReturn

import setproctitle

from tokenyard.base import EngineDeadError
from tokenyard.config import Settings
from tokenyard.transfer.identity import model_digest
from tokenyard.wiring import adapter_folders, executor_options, nodes_config

log = logging.getLogger(__name__)

FAILED = 1


class _Stopped(BaseException):
    """A signal asked this process to end."""


def serve_node(settings: Settings) -> int:
    """Compute what node 0 says until it ends or this node is told to stop. Returns 0 then, 1 if node 0 is not there.

    Raises ConfigError if node 0 refuses this node.
    """
    from tokenyard.executor.parallel.node import Node
    from tokenyard.executor.parallel.nodes import NodeTerms
    from tokenyard.executor.parallel.part import Form

    setproctitle.setproctitle(f"tokenyard: node {settings.node_rank}")
    weights = model_digest(settings.model_path)
    terms = NodeTerms(**dataclasses.asdict(nodes_config(settings)), weights=weights)
    options = executor_options(settings, adapter_folders(settings))
    form: Form = "tensor" if settings.tp_size > 1 else "pipeline"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        Node(terms, settings.model_path, options, form, max(settings.tp_size, settings.pp_size)).run()
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
