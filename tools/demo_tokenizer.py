"""Trains the demo model's tokenizer and writes its files in the layout that Hugging Face transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from demo_corpus import ASSISTANT, BOS, END, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the role must be system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '" + END + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens, the special ones first.

    All 256 bytes are in the alphabet, so every text can be encoded and comes back as it was.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token; raises ValueError if the tokenizer has no such token."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}: train it again with --new-tokenizer")
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path, trained_context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json to `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": trained_context_tokens,
        "clean_up_tokenization_spaces": False,
        **named,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    special = {**named, "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
