"""`tokenyard bench offline`: the throughput of an engine in this process, with all prompts sent at once."""

import argparse
import time

import numpy as np

from tokenyard.base import ConfigError, SamplingParams
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.table import append_line, offline_table
from tokenyard.cli.bench_prompts import make_prompts
from tokenyard.cli.flags import resolve
from tokenyard.engine.processes.logs import set_up_logging
from tokenyard.offline import LLM
from tokenyard.progress import follow


def bench_offline(args: argparse.Namespace) -> int:
    """Answer all prompts at once with an engine in this process, and print the table."""
    settings = resolve(vars(args)).settings
    set_up_logging("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    with LLM.from_settings(settings) as llm:
        prompts = make_prompts(args, llm.tokenizer, np.random.default_rng(settings.random_seed), settings.random_seed)
        contents = [_plain_content(prompt) for prompt in prompts]
        params = [SamplingParams(max_new_tokens=p.output_tokens, temperature=0.0, ignore_eos=True) for p in prompts]
        begin = time.perf_counter()
        answers = follow(llm.submit(contents, params), llm.generated_tokens)
        seconds = time.perf_counter() - begin
    inputs = sum(answer.prompt_tokens for answer in answers)
    outputs = sum(len(completion.token_ids) for answer in answers for completion in answer.completions)
    numbers = {
        "backend": "tokenyard",
        "dataset_name": args.dataset_name,
        "completed": len(answers),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answers) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
    }
    print(offline_table(numbers))
    if args.output_file:
        append_line(args.output_file, numbers)
    return 0


def _plain_content(prompt: DatasetRow) -> str | list[int]:
    """A prompt's text or token ids. Raises ConfigError for messages."""
    content = prompt.content
    if isinstance(content, list) and isinstance(content[0], dict):
        raise ConfigError("bench offline takes prompts of text or token ids, not messages")
    return content
