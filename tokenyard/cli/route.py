"""`tokenyard route`: a router in front of engines."""

import argparse
import asyncio
import logging
import os
import socket
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Int32Array
from tokenyard.base.log_format import TextFormatter
from tokenyard.cli.flags import ENV_PREFIX, parse_bool, parse_count, parse_float
from tokenyard.router.features import Tokenize
from tokenyard.router.settings import RouterSettings, flag_of

ENV = ENV_PREFIX + "ROUTE_"
MOST_TOKENIZED_CHARS = 400_000
"""A longer text is known by its bytes, as tokenizing it would hold up every stream."""


def add_route_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting."""
    for item in fields(RouterSettings):
        kind = _kind(item.name)
        options: dict[str, Any] = {"dest": item.name, "default": None}
        default = "" if item.default in ("", ()) or item.default is False else f" [{_shown(item.default)}]"
        text = item.metadata["help"].replace("%", "%%") + default
        metavar = item.name.rsplit("_", 1)[-1].upper()
        if kind is bool:
            parser.add_argument(flag_of(item), action="store_const", const="true", help=text, **options)
            off = "--no-" + flag_of(item).removeprefix("--")
            off_help = f"do not {text}" if item.default else argparse.SUPPRESS
            parser.add_argument(off, action="store_const", const="false", help=off_help, **options)
        elif kind is tuple:
            parser.add_argument(flag_of(item), nargs="+", metavar=metavar, help=text, **options)
        else:
            parser.add_argument(flag_of(item), metavar=metavar, help=text, **options)


def _kind(name: str) -> Any:
    kind = typing.get_type_hints(RouterSettings)[name]
    return typing.get_origin(kind) or kind


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def route_settings(given: dict[str, Any], environ: dict[str, str] | None = None) -> RouterSettings:
    """Settings from flags, then the environment (TOKENYARD_ROUTE_...), then defaults. Raises ConfigError."""
    environ = dict(os.environ) if environ is None else environ
    values: dict[str, Any] = {}
    for item in fields(RouterSettings):
        name = ENV + item.name.upper()
        raw = given.get(item.name)
        raw, source = (environ.get(name), name) if raw is None else (raw, flag_of(item))
        if raw is not None:
            values[item.name] = _read(_kind(item.name), raw, source)
    return RouterSettings(**values)


def _read(kind: Any, raw: Any, source: str) -> Any:
    """A value from its text. Raises ConfigError, naming `source`."""
    readers: dict[Any, Callable[[str], Any]] = {bool: parse_bool, int: parse_count, float: parse_float, str: str}
    if kind is tuple:
        words = [raw] if isinstance(raw, str) else raw
        return tuple(part for word in words for part in word.replace(",", " ").split())
    try:
        return readers[kind](raw)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def route(namespace: argparse.Namespace) -> int:
    """Route until told to stop. Returns 0 after a signal, 2 for wrong settings."""
    from tokenyard.router.serve import run, run_all

    settings = route_settings(vars(namespace))
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    tokenize = make_tokenize(settings.tokenizer) if settings.tokenizer else None

    def run_one(settings: RouterSettings, listener: socket.socket, announce: bool) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(settings, listener, tokenize, announce=announce))

    run_all(settings, run_one)
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
            return None  # the worker will say what is wrong with these messages
        if not isinstance(text, str) or len(text) > MOST_TOKENIZED_CHARS:
            return None
        ids = tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=special).ids
        return np.array(ids, np.int32)

    return tokenize


def _loop_factory() -> Any:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
