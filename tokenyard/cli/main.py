"""The command `tokenyard`. The modules of a subcommand are imported only when it runs, so that help is fast."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.base import TokenyardError
from tokenyard.base.version import __version__
from tokenyard.cli.bench_arguments import add_bench_arguments
from tokenyard.cli.flags import Parser, add_deprecated_flag, add_setting_flags, hide_other_flags, split_help_word
from tokenyard.cli.terminal import drop_output, flush_output, is_write_error, prepare_terminal

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
SETTINGS_NOTE = (
    " Every flag is also an environment variable, such as TOKENYARD_MAX_RUNNING_REQUESTS, and a key of --config's file."
)


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    run: `module:function`, called with the parsed arguments; returns the exit status.
    add_arguments: adds the arguments to the parser, except the flags of settings.
    takes_settings: whether the command has the flags of settings.
    """

    name: str
    help_text: str
    run: str
    takes_settings: bool
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _load(path: str) -> Callable[..., Any]:
    """The function `module:function`."""
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _arguments_of(path: str) -> Callable[[argparse.ArgumentParser], None]:
    """An `add_arguments` that imports its module only when it is called."""
    return lambda parser: _load(path)(parser)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        default=[],
        help="folder of the model, or its file; several, or a folder of models, are loaded on demand; the demo model "
        "if absent",
    )


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="prompts, one per line; or .jsonl lines with prompt or messages, or of an OpenAI batch file",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the answers to this file as .jsonl instead of printing them"
    )
    parser.add_argument(
        "--max-tokens", "--max-new-tokens", type=int, default=128, metavar="N", help="maximum output tokens [128]"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy [the model's]"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling [the model's]")
    parser.add_argument("--sampling-seed", type=int, default=0, metavar="N", help="seed of the sampling [0]")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template to the prompt")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="MODEL", help="folder or repository of the model, or a GGUF file")
    parser.add_argument("--dtype", default="auto", help="as of `serve`: auto, bfloat16 or float32 [auto]")
    parser.add_argument(
        "--quantization", default="none", choices=("none", "int8", "q4", "q8"), help="as of `serve` [none]"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads that convert [all cores]")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a tape that `tokenyard serve --record` wrote")
    parser.add_argument("--to-trace", metavar="OUT", help="convert the tape to a trace for `tokenyard simulate`")
    parser.add_argument(
        "--profile",
        default="",
        metavar="P",
        help="simulate another device: device/model, or a file written by `tokenyard calibrate`",
    )
    parser.add_argument("--json", metavar="OUT", help="write the results of the simulation as JSON")
    parser.add_argument("--report", metavar="OUT", help="write an HTML page that compares the simulation with the tape")
    user_policies = parser.add_argument(
        "--user-policies", action="store_true", help="load the user policies that the tape names"
    )
    add_deprecated_flag(parser, "--own-policies", user_policies)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="id of the request or of its answer")
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="address of the server [http://127.0.0.1:30000]"
    )
    parser.add_argument("--key", help="its admin key or its API key; safer in TOKENYARD_ADMIN_API_KEY")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _cache_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="body of a request, as JSON")
    parser.add_argument("after", type=Path, help="body of the request after it")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = (
    Command("serve", "serve a model over HTTP", "tokenyard.cli.serve:serve", True, _serve_arguments),
    Command(
        "route",
        "run a cache-aware router in front of engines",
        "tokenyard.cli.route:route",
        False,
        _arguments_of("tokenyard.cli.route:add_route_arguments"),
    ),
    Command(
        "generate", "answer prompts without a server", "tokenyard.cli.generate:generate", True, _generate_arguments
    ),
    Command(
        "batch",
        "have a server or a router answer the lines of a file on spare capacity",
        "tokenyard.cli.submit_batch:batch",
        False,
        _arguments_of("tokenyard.cli.submit_batch:add_batch_arguments"),
    ),
    Command(
        "convert",
        "write weights as this machine multiplies them, so that later starts map them",
        "tokenyard.cli.convert:convert",
        False,
        _convert_arguments,
    ),
    Command(
        "doctor",
        "inspect this machine and report the settings that a server would choose",
        "tokenyard.cli.doctor:doctor",
        True,
        _doctor_arguments,
    ),
    Command(
        "explain",
        "show how a request on a running server spent its time",
        "tokenyard.cli.explain:explain",
        False,
        _explain_arguments,
    ),
    Command(
        "cache-check",
        "say where the prompt of a request leaves that of the request before it",
        "tokenyard.cli.cache_check:cache_check",
        False,
        _cache_check_arguments,
    ),
    Command(
        "top",
        "watch a running server: its queue, steps, KV and targets",
        "tokenyard.cli.top:top",
        False,
        _arguments_of("tokenyard.cli.top:add_top_arguments"),
    ),
    Command(
        "replay",
        "replay a recorded tape through the scheduler, optionally with other settings",
        "tokenyard.cli.replay:replay",
        True,
        _replay_arguments,
    ),
    Command(
        "bench",
        "measure a running server, or the engine without one",
        "tokenyard.cli.bench_serve:bench",
        False,
        add_bench_arguments,
    ),
    Command(
        "simulate",
        "run a trace through the scheduler in virtual time",
        "tokenyard.cli.simulate:run_simulate",
        False,
        _arguments_of("tokenyard.cli.simulate:add_simulate_arguments"),
    ),
    Command(
        "compare",
        "simulate several policies on one trace, side by side",
        "tokenyard.cli.compare:run_compare",
        False,
        _arguments_of("tokenyard.cli.compare:add_compare_arguments"),
    ),
    Command(
        "goodput",
        "find the maximum request rate at which each policy meets the SLO",
        "tokenyard.cli.goodput:run_goodput",
        False,
        _arguments_of("tokenyard.cli.goodput:add_goodput_arguments"),
    ),
    Command(
        "plan",
        "capacity planning: find the smallest and the cheapest fleet that serves a trace within its SLO",
        "tokenyard.cli.capacity_plan:run_capacity_plan",
        False,
        _arguments_of("tokenyard.cli.capacity_plan:add_capacity_plan_arguments"),
    ),
    Command(
        "calibrate",
        "measure how long steps take on this device",
        "tokenyard.cli.calibrate:calibrate",
        True,
        _arguments_of("tokenyard.cli.calibrate:add_calibrate_arguments"),
    ),
)


def build_parser(chosen: str = "", word: str = "") -> Parser:
    """The command line with all commands, and the arguments of the `chosen` one alone, whose modules may be heavy.

    With `word`, help shows only the flags it matches.
    """
    parser = Parser(prog="tokenyard", description="An LLM serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tokenyard {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name,
            help=command.help_text,
            description=command.help_text[:1].upper() + command.help_text[1:] + ".",
            epilog="--help WORD shows the flags about WORD." + (SETTINGS_NOTE if command.takes_settings else ""),
            allow_abbrev=False,
        )
        if command.name == chosen:
            _add_arguments(sub, command, word)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, command: Command, word: str) -> None:
    command.add_arguments(parser)
    if command.takes_settings:
        add_setting_flags(parser, word=word)
    elif word:
        hide_other_flags(parser, word)
    parser.set_defaults(run=command.run)
    parser.usage = f"tokenyard {command.name} [FLAGS] ..."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    The status is 2 for wrong arguments or a wrong model, 1 if the output cannot be written, 130 after an interrupt.
    """
    prepare_terminal()
    try:
        try:
            status = _run(sys.argv[1:] if argv is None else argv)
        except SystemExit as end:  # argparse, after --help and --version
            status = int(end.code or 0)
        flush_output()
        return status
    except TokenyardError as error:
        print(f"tokenyard: {error.message}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if not is_write_error(error):
            raise
        drop_output()
        if not isinstance(error, BrokenPipeError):
            print(f"tokenyard: the output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILED


def _run(argv: Sequence[str]) -> int:
    """Parse the arguments and run the command that they name. Raises what it raises."""
    words, word = split_help_word(argv)
    chosen = next((argument for argument in words if not argument.startswith("-")), "")
    parser = build_parser(chosen, word)
    namespace = parser.parse_strictly(words)
    if namespace.command is None:
        parser.print_help()
        return USAGE_ERROR
    model = getattr(namespace, "model", None)
    models = [model] if model else getattr(namespace, "models", [])
    if models and namespace.model_path:
        parser.error("the model is given twice: as an argument and by --model-path")
    if len(models) == 1:
        namespace.model_path = models[0]
    _find_modules_here()
    return int(_load(namespace.run)(namespace))


def _find_modules_here() -> None:
    """Append the current folder to the import path, for users' policies. Coming last, it shadows no other module."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
