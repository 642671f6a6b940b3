"""Fields of a trace's line that say what a prompt holds: hashes of its blocks, or its token ids."""

from typing import Any

import numpy as np

from tokenyard.base import ConfigError, Int32Array

HASH_BLOCK_TOKENS = 512
"""Tokens of a hashed block of Mooncake's traces, and of those that do not say."""
MAX_TIMES_NEEDED = 8
"""With more ids than so many times those that a prompt needs, they stand for smaller blocks."""


def block_segments(record: dict[str, Any], where: str, tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    """`hash_ids` as segments of a prompt of `tokens` tokens (see `SegmentContent`).

    Raises ConfigError unless there is an id from 0 to 2**40 - 1 for every `block_tokens` tokens, and not far more.
    """
    blocks = record.get("hash_ids")
    needed = -(-tokens // block_tokens)
    if not isinstance(blocks, list) or len(blocks) < needed:
        raise ConfigError(f"{where}: hash_ids must hold {needed} ids, one per {block_tokens} tokens of the prompt")
    if len(blocks) > MAX_TIMES_NEEDED * needed:
        raise ConfigError(
            f"{where}: hash_ids holds {len(blocks)} ids where {needed} are needed, one per {block_tokens} tokens; "
            "is this the right --trace-format, or size of block?"
        )
    if not all(isinstance(block, int) and 0 <= block < 1 << 40 for block in blocks):
        raise ConfigError(f"{where}: hash_ids must be whole numbers from 0 to 2**40 - 1")
    return [(block, block_tokens) for block in blocks[:needed]]


def token_ids(record: dict[str, Any], key: str, count_key: str, where: str) -> Int32Array:
    """The list `record[key]`, int32[n]. Raises ConfigError unless n is `record[count_key]`, if that is given."""
    try:
        ids = np.array(record.get(key))
    except ValueError:  # lists of several lengths
        ids = np.empty(0)
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31:
        raise ConfigError(f"{where}: {key} must be a list of token ids, whole numbers from 0 to 2**31 - 1")
    count = record.get(count_key)
    if count is not None and count != len(ids):
        raise ConfigError(f"{where}: {key} holds {len(ids)} ids, but {count_key} is {count}")
    return ids.astype(np.int32)
