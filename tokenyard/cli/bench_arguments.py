"""Arguments of `tokenyard bench serve` and `tokenyard bench offline`, named as SGLang's."""

import argparse
from pathlib import Path

from tokenyard.cli.flags import add_setting_flags

DATASETS = ("random", "random-ids", "generated-shared-prefix", "mooncake", "jsonl")
BACKENDS = ("tokenyard", "sglang", "openai", "vllm", "sglang-oai", "openai-chat", "vllm-chat", "sglang-oai-chat")
GOODPUT = "ttft:1000,tpot:50"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The two benchmarks, each with its own arguments."""
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="load a running server", description="Load a running server.")
    _add_target_arguments(serve)
    _add_load_arguments(serve)
    _add_dataset_arguments(serve)
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn [0]")
    _add_result_arguments(serve)
    offline = kinds.add_parser(
        "offline",
        help="answer all prompts at once in this process",
        description="Answer all prompts at once in this process.",
        epilog="--seed (of the model's settings) also seeds the prompts.",
    )
    _add_dataset_arguments(offline)
    offline.add_argument("--output-file", type=Path, metavar="FILE", help="append the numbers there as a JSON line")
    add_setting_flags(offline)


def _add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=BACKENDS, default="tokenyard", help="which API to speak [tokenyard]")
    group.add_argument("--base-url", metavar="URL", help="where the server is; wins over --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="[127.0.0.1]")
    group.add_argument("--port", type=int, default=30000, help="[30000]")
    group.add_argument("--model", dest="bench_model", metavar="NAME", help="model to ask for; the server's first one")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="folder or tokenizer.json that prompts are made with; the server's if local"
    )
    group.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    group.add_argument(
        "--extra-request-body", default="{}", metavar="JSON", help="further fields of every request's body"
    )
    group.add_argument("--disable-ignore-eos", action="store_true", help="let the model end its answers")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=8.0,
        metavar="R",
        help="requests a second, as a Poisson process; inf sends all at once [8]",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most requests on their way; no limit if absent"
    )
    group.add_argument("--use-trace-timestamps", action="store_true", help="send at the recorded times instead")
    group.add_argument("--warmup-requests", type=int, default=1, metavar="N", help="answers to wait for first [1]")
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")


def _add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="what is asked [random]")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of mooncake and jsonl")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="how many requests, or lines [100]")
    group.add_argument("--random-input-len", type=int, default=256, metavar="N", help="most prompt tokens [256]")
    group.add_argument("--random-output-len", type=int, default=64, metavar="N", help="most answer tokens [64]")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="least lengths, as a share of the most [0]"
    )
    group.add_argument("--gsp-num-groups", type=int, default=8, metavar="N", help="different system prompts [8]")
    group.add_argument("--gsp-prompts-per-group", type=int, default=16, metavar="N", help="prompts of each [16]")
    group.add_argument("--gsp-system-prompt-len", type=int, default=512, metavar="N", help="tokens [512]")
    group.add_argument("--gsp-question-len", type=int, default=64, metavar="N", help="tokens [64]")
    group.add_argument("--gsp-output-len", type=int, default=64, metavar="N", help="tokens [64]")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--goodput", default=GOODPUT, metavar="T", help=f"targets in ms, of ttft, tpot and e2el [{GOODPUT}]"
    )
    group.add_argument("--cache-report", action="store_true", help="say how much of the prompts was cached")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="append the numbers there as a JSON line")
    group.add_argument("--output-details", action="store_true", help="with every request's own numbers in the file")
