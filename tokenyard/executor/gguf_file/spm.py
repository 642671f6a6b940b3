"""A SentencePiece BPE tokenizer rebuilt from the vocabulary alone (GGUF's kind llama), or with the merges that the file
states (gemma4). Needs no torch.

SentencePiece (Kudo and Richardson 2018, arXiv 1808.06226) merges the two neighbours whose joined piece scores best. The
same comes of a list of merges in the order of the scores of what they make, which is what Hugging Face's BPE wants.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.gguf_reader import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens."""

SPACE = "▁"
SPM_KINDS = ("llama", "gemma4")
"""GGUF's names of such tokenizers."""


def spm_tokenizer(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Return the tokenizer of a file of one of SPM_KINDS. Raises ConfigError for what the file lacks."""
    scores, kinds = file.value("tokenizer.ggml.scores"), file.value("tokenizer.ggml.token_type")
    if not scores or not kinds or not len(scores) == len(kinds) == len(tokens):
        raise ConfigError(f"{file.path}: its tokenizer lacks a score or a type for each of {len(tokens)} tokens")
    if file.value("tokenizer.ggml.precompiled_charsmap"):
        raise ConfigError(f"{file.path}: its tokenizer has a table of characters, which cannot be rebuilt")
    unknown = next((tokens[number] for number, kind in enumerate(kinds) if kind == UNKNOWN), None)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = stated_merges(file) or merges_by_score(tokens, scores, kinds)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds))
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    for number, kind in enumerate(kinds):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(tokens[number], special=True, normalized=False)])
        elif kind == USER_DEFINED:
            # Runs of spaces are found in the text as it is merged, where nothing stands before it.
            inside = SPACE in tokens[number] and not prefix
            tokenizer.add_tokens([AddedToken(tokens[number], special=False, normalized=inside)])
    return tokenizer


def stated_merges(file: GgufFile) -> list[tuple[str, str]]:
    """Return the merges that a file states, in order."""
    pairs = (merge.split(" ", 1) for merge in file.value("tokenizer.ggml.merges") or [])
    return [(left, right) for left, right in pairs]


def merges_by_score(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, in the order in which SentencePiece would join them."""
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    order = sorted(range(len(tokens)), key=lambda number: (-scores[number], number))
    merges = []
    for number in order:
        token = tokens[number]
        if kinds[number] == NORMAL:
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            merges += [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
    return merges
