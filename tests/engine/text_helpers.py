"""Token batches by hand, and a collector for what comes out."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tokenyard.base import Finish, Started, TextOptions, TokenBatch
from tokenyard.engine.detokenizer.assembler import TextAssembler

SHARED = Path(__file__).resolve().parents[2] / "../shared"
DEMO_TOKENIZER = Path(__file__).resolve().parents[2] / "tokenyard" / "demo_model" / "tokenizer.json"


def demo():
    return Tokenizer.from_file(str(DEMO_TOKENIZER))


def gpt2():
    path = SHARED / "tokenizers" / "gpt2" / "tokenizer.json"
    if not path.exists():
        pytest.skip("the folder shared/tokenizers is not next to the checkout")
    return Tokenizer.from_file(str(path))


def started(number=1, prompt=(), stop=(), begun=(), **options):
    prompt_ids, output_ids = (np.array(ids, dtype=np.int32) for ids in (prompt, begun))
    options = TextOptions(**{"stream": True, **options})
    return Started(number, prompt_ids, options, list(stop), [], output_ids=output_ids)


def batch(numbers=(), tokens=(), start=(), finish=(), logprobs=(), hits=None):
    return TokenBatch(
        np.array(numbers, dtype=np.int64),
        np.array(tokens, dtype=np.int32),
        np.array(hits if hits is not None else [0] * len(numbers), dtype=np.int32),
        list(start),
        list(finish),
        list(logprobs),
    )


class Run:
    """Feeds one answer token by token."""

    def __init__(self, tokenizer, tokens, *, end=None, **options):
        self.assembler = TextAssembler(tokenizer)
        self.pieces, self.tokens, self.stops, self.finish, self.said = [], [], [], None, ""
        self._take(batch(start=[started(**options)]))
        for i, token in enumerate(tokens):
            last = [end] if end is not None and i == len(tokens) - 1 else []
            self._take(batch([1], [token], finish=last))
            if self.stops and end is None:
                break
        if end is None:
            self._take(batch(finish=[Finish(1, "length", completion_tokens=len(tokens))]))

    def _take(self, message):
        out, stops = self.assembler.step(message)
        self.stops += stops
        self.said += "".join(text for _, text in out.said)
        self.pieces += [text for text in out.texts if text]
        self.tokens += out.tokens.tolist()
        if out.finished:
            self.finish = out.finished[0]

    @property
    def text(self):
        return "".join(self.pieces)
