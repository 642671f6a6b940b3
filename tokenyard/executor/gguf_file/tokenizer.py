"""The tokenizer that a GGUF file holds, as Hugging Face's files. Needs no torch.

Byte-level BPE is rebuilt exactly: tokens, merges, and the pre-tokenizer, which the file only names. A file with an
unknown pre-tokenizer is refused, as a wrong split would silently give wrong tokens. For SentencePiece's BPE see spm.py.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.gguf_reader import GgufFile
from tokenyard.executor.gguf_file.spm import CONTROL, SPM_KINDS, USER_DEFINED, spm_tokenizer, stated_merges

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "gpt-4o": rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
"""Patterns of words, by the name that GGUF has for them."""


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that cannot be rebuilt."""
    tokens = file.value("tokenizer.ggml.tokens")
    if not tokens:
        return
    kind, name = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", *SPM_KINDS):
        raise ConfigError(
            f"{file.path}: its tokenizer is of kind {kind!r}, and only byte-level BPE (gpt2) and SentencePiece's BPE"
            " (llama, gemma4) can be rebuilt; take the model's Hugging Face folder instead"
        )
    tokenizer = spm_tokenizer(file, tokens) if kind in SPM_KINDS else _byte_level(file, tokens, name)
    config = _config(file, tokens)
    if file.value("tokenizer.ggml.add_bos_token", kind in SPM_KINDS or name == "llama-bpe") and "bos_token" in config:
        mark = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{mark} $A", pair=f"{mark} $A {mark} $B", special_tokens=[(mark, tokens.index(mark))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _byte_level(file: GgufFile, tokens: list[str], name: str) -> Tokenizer:
    merges = stated_merges(file)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = _split(file, name)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type") or []
    for number, kind_of_token in enumerate(types):
        if kind_of_token in (CONTROL, USER_DEFINED):
            token = AddedToken(tokens[number], special=kind_of_token == CONTROL, normalized=False)
            tokenizer.add_tokens([token]) if kind_of_token == USER_DEFINED else tokenizer.add_special_tokens([token])
    return tokenizer


def _split(file: GgufFile, name: str) -> pre_tokenizers.PreTokenizer:
    if name in SPLITS:
        words = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if name == "gpt-2":
        return whole
    known = ", ".join((*SPLITS, "smollm", "gpt-2"))
    raise ConfigError(
        f"{file.path}: its tokenizer splits text in a way named {name!r}; known are {known}; take the model's Hugging"
        " Face folder instead"
    )


def _config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Return special tokens by role, and the chat template."""
    config: dict[str, Any] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = file.value(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[f"{role}_token"] = tokens[number]
    template = file.value("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})
