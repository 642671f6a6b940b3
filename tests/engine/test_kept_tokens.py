"""Special tokens that mark calls stay in the text while all others are skipped."""

import numpy as np
from tokenizers import Tokenizer

from tokenyard.config import DEMO_MODEL
from tokenyard.engine.detokenizer.incremental import IncrementalDetokenizer


def test_only_the_kept_special_tokens_are_shown():
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    special = [token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
    kept, dropped = special[0], special[1]
    words = tokenizer.encode("Alice was", add_special_tokens=False).ids
    ids = [dropped, kept, *words, dropped, kept]
    prompt = np.array(words, np.int32)

    def text(keep):
        incremental = IncrementalDetokenizer(tokenizer, prompt, True, keep)
        return "".join(incremental.add(token) for token in ids) + incremental.flush()

    mark = tokenizer.id_to_token(kept)
    assert text([kept]).count(mark) == 2
    assert tokenizer.id_to_token(dropped) not in text([kept])
    assert text([kept]).replace(mark, "") == text([])
