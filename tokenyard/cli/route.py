"""`tokenyard route`: a router in front of engines."""

import argparse
import asyncio
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import setproctitle

from tokenyard.base import Int32Array, TokenyardError
from tokenyard.base.cross_site import is_loopback
from tokenyard.cli.event_loop import loop_factory
from tokenyard.cli.flags import ENV_PREFIX, add_setting_flags, resolve_values, settings_of
from tokenyard.engine.processes.logs import set_up_logging
from tokenyard.router.request_features import Tokenize
from tokenyard.router.router_settings import GROUPS, RouterSettings

log = logging.getLogger(__name__)

USAGE_ERROR = 2
ENV = ENV_PREFIX + "ROUTE_"
MAX_TOKENIZED_CHARS = 400_000
"""Longer texts are matched by their bytes, because tokenizing them would delay every stream."""


def add_route_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting."""
    add_setting_flags(parser, settings_of(RouterSettings, ENV), GROUPS)


def route_settings(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> RouterSettings:
    """Settings from flags, then the environment (TOKENYARD_ROUTE_...), then the file of --config, then defaults.

    Raises ConfigError.
    """
    values, _ = resolve_values(settings_of(RouterSettings, ENV), given, environ)
    return RouterSettings(**values)


def route(namespace: argparse.Namespace) -> int:
    """Route until told to stop. Returns 0 after a signal, 2 for wrong settings, in JSON where logs are."""
    from tokenyard.router.process import run, run_all

    settings = route_settings(vars(namespace))
    setproctitle.setproctitle("tokenyard: router")
    set_up_logging(settings.log_level, settings.log_format)

    def run_one(settings: RouterSettings, listener: socket.socket, announce: bool) -> None:
        if announce and not (settings.api_key or is_loopback(settings.host)):
            log.warning(
                "--host %s without --api-key: whoever reaches port %d may use the engines, and control them unless "
                "there is an --admin-api-key",
                *(settings.host, settings.port),
            )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            words = "Tokenyard routes at" if announce else ""
            runner.run(run(settings, listener, tokenize, announce=words))

    try:
        tokenize = make_tokenize(settings.tokenizer) if settings.tokenizer else None
        run_all(settings, run_one)
    except TokenyardError as error:
        if settings.log_format != "json":
            raise
        log.critical("%s", error.message)
        return USAGE_ERROR
    return 0


def make_tokenize(folder: str) -> Tokenize:
    """The tokens of a prompt as the model's own tokenizer and chat template make them. Raises ConfigError if `folder`
    holds no tokenizer.
    """
    from tokenyard.engine.text.chat_template import load_chat_template
    from tokenyard.engine.text.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(folder)
    template = load_chat_template(Path(folder)) if Path(folder).is_dir() else None

    def tokenize(fields: Mapping[str, Any]) -> Int32Array | None:
        text, special = fields.get("prompt", fields.get("text")), True
        try:
            if isinstance(fields.get("messages"), list) and template:
                text, special = template.render(fields["messages"], tools=fields.get("tools") or None), False
        except Exception:
            return None  # the worker reports what is wrong with these messages
        if not isinstance(text, str) or len(text) > MAX_TOKENIZED_CHARS:
            return None
        ids = tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=special).ids
        return np.array(ids, np.int32)

    return tokenize
