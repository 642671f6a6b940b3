"""Loads the tokenizer files of a model folder, with the same setup as HF transformers."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tokenyard.base import ConfigError
from tokenyard.engine.text.model_files import read_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_DIGITS = 10


def token_text(value: Any) -> str:
    """A special token, which is written as a string or as an object with its `content`; "" for anything else, such as
    half a character.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value == value.encode(errors="ignore").decode() else ""


def special_tokens(folder: Path) -> dict[str, str]:
    """The text of each special token in a folder's config files, such as eos_token. Raises ConfigError."""
    found = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    return {name: text for name in found if name.endswith("_token") and (text := token_text(found[name]))}


def load_tokenizer(path: str) -> Tokenizer:
    """Load tokenizer.json from a folder, or that file, with the settings of the tokenizer_config.json next to it.

    Padding and truncation that were saved with a tokenizer are disabled: they would change prompts silently. Raises
    ConfigError if there is none or it is broken.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}; give --tokenizer-path or --skip-tokenizer-init")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises a bare Exception; a panic of it is not even that
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = read_json(file.parent / "tokenizer_config.json")
    _add_tokens(tokenizer, read_json(file.parent / "special_tokens_map.json") | config)
    if "add_bos_token" in config or "add_eos_token" in config:
        _frame(tokenizer, config)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Declare the added tokens of a config, and mark its special ones, which answers leave out.

    Tokens that are not in the vocabulary are ignored, as no model knows them.
    """
    listed = config.get("added_tokens_decoder")
    entries = {
        int(key): entry
        for key, entry in (listed.items() if isinstance(listed, dict) else ())
        if key.isdecimal() and len(key) < MAX_DIGITS and isinstance(entry, dict)
    }
    for number in sorted(entries):
        entry, text = entries[number], token_text(entries[number])
        known = tokenizer.token_to_id(text)
        if text and (known == number or (known is None and number == tokenizer.get_vocab_size())):
            flags = {flag: entry[flag] for flag in FLAGS if isinstance(entry.get(flag), bool)}
            tokenizer.add_tokens([AddedToken(text, **flags)])
    more = config.get("additional_special_tokens")
    values = [config.get(name) for name in NAMED_TOKENS] + (more if isinstance(more, list) else [])
    declared = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = {token_text(value) for value in values} - declared
    tokenizer.add_special_tokens(sorted(text for text in special if text and tokenizer.token_to_id(text) is not None))


def _frame(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Add the BOS and EOS tokens that the config asks for with add_bos_token and add_eos_token."""
    parts, marks = [], []
    for name, part in (("bos", None), ("", "$A"), ("eos", None)):
        text = token_text(config.get(f"{name}_token"))
        number = tokenizer.token_to_id(text) if text else None
        if part is not None:
            parts.append(part)
        elif config.get(f"add_{name}_token") and number is not None:
            parts.append(text)
            marks.append((text, number))
    tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=marks)
