"""Loads or generates the data set that a benchmark's arguments name."""

import argparse

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import ConfigError
from tokenyard.bench import datasets
from tokenyard.bench.datasets import DatasetRow, Lengths, SharedPrefix, Vocabulary


def make_prompts(
    args: argparse.Namespace, tokenizer: Tokenizer | None, rng: np.random.Generator, seed: int
) -> list[DatasetRow]:
    """The data set that the arguments name. Raises ConfigError if a file or the tokenizer is missing."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {args.num_prompts}; it must be at least 1")
    name, path = args.dataset_name, args.dataset_path
    if (path is None) == (name in ("mooncake", "jsonl")):
        raise ConfigError(f"--dataset-name {name} {'needs' if path is None else 'takes no'} --dataset-path")
    if name == "jsonl":
        return datasets.json_lines(path, args.num_prompts, args.random_output_len)
    if tokenizer is None:
        raise ConfigError(f"--dataset-name {name} needs a tokenizer; give --tokenizer with a folder or tokenizer.json")
    vocabulary = Vocabulary(tokenizer)
    if name == "mooncake":
        return datasets.mooncake(vocabulary, path, args.num_prompts, seed)
    if name == "generated-shared-prefix":
        shape = SharedPrefix(
            groups=args.gsp_num_groups,
            prompts_per_group=args.gsp_prompts_per_group,
            system_prompt_tokens=args.gsp_system_prompt_len,
            question_tokens=args.gsp_question_len,
            output_tokens=args.gsp_output_len,
        )
        return datasets.shared_prefix(vocabulary, shape, rng)
    lengths = Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    make = datasets.random_ids if name == "random-ids" else datasets.random_text
    return make(vocabulary, args.num_prompts, lengths, rng)
