"""Arguments of `tokenyard bench serve` and `tokenyard bench offline`, named as SGLang's."""

import argparse
from pathlib import Path

from tokenyard.cli.flags import add_setting_flags
from tokenyard.cli.session_arguments import add_session_arguments

DATASETS = ("random", "random-ids", "generated-shared-prefix", "mooncake", "jsonl")
SESSIONS = "sessions"
BACKENDS = ("tokenyard", "sglang", "openai", "vllm", "sglang-oai", "openai-chat", "vllm-chat", "sglang-oai-chat")
GOODPUT = "ttft:1000,tpot:50"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The two benchmarks, each with its own arguments."""
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="load a running server", description="Load a running server.")
    _add_target_arguments(serve)
    _add_load_arguments(serve)
    _add_dataset_arguments(serve, SESSIONS)
    add_session_arguments(serve)
    group = serve.add_argument_group("trace of sessions")
    group.add_argument("--trace-format", metavar="NAME", help="as of simulate [detected from its first lines]")
    group.add_argument(
        "--context-length", type=int, metavar="N", help="longest prompt and answer that the server takes [no limit]"
    )
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random draws [0]")
    _add_result_arguments(serve)
    offline = kinds.add_parser(
        "offline",
        help="answer all prompts at once in this process",
        description="Answer all prompts at once in this process.",
        epilog="--seed (of the model's settings) also seeds the prompts.",
    )
    _add_dataset_arguments(offline)
    offline.add_argument(
        "--output-file", type=Path, metavar="FILE", help="append the numbers to this file as a JSON line"
    )
    add_setting_flags(offline)


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=BACKENDS, default="tokenyard", help="API of the server [tokenyard]")
    group.add_argument("--base-url", metavar="URL", help="address of the server; wins over --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="host of the server [127.0.0.1]")
    group.add_argument("--port", type=int, default=30000, help="port of the server [30000]")
    group.add_argument(
        "--model",
        dest="bench_model",
        metavar="NAME",
        help="model to ask for; the first one that the server lists if absent",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="folder or tokenizer.json to make prompts with; the server's own if it is on this machine",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header of every request; may be repeated",
    )
    group.add_argument(
        "--extra-request-body", default="{}", metavar="JSON", help="further fields of every request's body"
    )
    group.add_argument("--disable-ignore-eos", action="store_true", help="let the model end its answers early")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=8.0,
        metavar="R",
        help="requests per second, as a Poisson process; inf sends all at once [8]",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight; no limit if absent")
    group.add_argument("--use-trace-timestamps", action="store_true", help="send at the times of the trace instead")
    group.add_argument(
        "--warmup-requests", type=int, default=1, metavar="N", help="requests to answer before the measurement [1]"
    )
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")


def _add_dataset_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name", choices=(*DATASETS, *more), default="random", help="source of the prompts [random]"
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="file for mooncake, jsonl and sessions")
    group.add_argument(
        "--num-prompts", type=int, default=100, metavar="N", help="number of requests, or lines of the file [100]"
    )
    group.add_argument("--random-input-len", type=int, default=256, metavar="N", help="most prompt tokens [256]")
    group.add_argument("--random-output-len", type=int, default=64, metavar="N", help="most answer tokens [64]")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="shortest lengths, as a share of the longest [0]",
    )
    group.add_argument("--gsp-num-groups", type=int, default=8, metavar="N", help="number of system prompts [8]")
    group.add_argument(
        "--gsp-prompts-per-group", type=int, default=16, metavar="N", help="prompts for each of them [16]"
    )
    group.add_argument("--gsp-system-prompt-len", type=int, default=512, metavar="N", help="their tokens [512]")
    group.add_argument("--gsp-question-len", type=int, default=64, metavar="N", help="tokens of a question [64]")
    group.add_argument("--gsp-output-len", type=int, default=64, metavar="N", help="tokens of an answer [64]")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--report", type=Path, metavar="OUT", help="write the run as an HTML page")
    group.add_argument(
        "--goodput", default=GOODPUT, metavar="T", help=f"targets in ms for ttft, tpot and e2el [{GOODPUT}]"
    )
    group.add_argument("--cache-report", action="store_true", help="report how much of the prompts was cached")
    group.add_argument(
        "--output-file", type=Path, metavar="FILE", help="append the numbers to this file as a JSON line"
    )
    group.add_argument(
        "--output-details", action="store_true", help="add the numbers of every single request to that file"
    )
