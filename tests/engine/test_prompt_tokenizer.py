"""Texts that cannot fit are refused before they are tokenized, and what is tokenized at a time is bounded."""

import asyncio
import threading

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine.text_helpers import DEMO_TOKENIZER
from tokenyard.base import ContextLengthError, InvalidRequestError
from tokenyard.engine.text import prompt_tokenizer
from tokenyard.engine.text.prompt_tokenizer import (
    BYTES_AT_A_TIME,
    MIN_LONGEST_TOKEN_BYTES,
    PIECE_CHARS,
    ByteSemaphore,
    PromptTokenizer,
    max_token_bytes,
)

DEMO = Tokenizer.from_file(str(DEMO_TOKENIZER))


class Watched:
    """A tokenizer that says how much it was given, and how much at most at a time; `gate` holds its threads."""

    def __init__(self):
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.gate.set()
        self.decoder, self.given, self.now, self.most = DEMO.decoder, 0, 0, 0

    def get_vocab(self, with_added_tokens=True):
        return DEMO.get_vocab(with_added_tokens)

    def encode_batch_fast(self, texts, add_special_tokens=True):
        size = sum(map(len, texts))
        with self.lock:
            self.given += size
            self.now += size
            self.most = max(self.most, self.now)
        self.gate.wait()
        found = DEMO.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        with self.lock:
            self.now -= size
        return found


def test_a_text_beyond_the_bytes_of_its_tokens_is_refused_unseen():
    tokenizer = Watched()
    prompts = PromptTokenizer(tokenizer, 1000)
    with pytest.raises(ContextLengthError, match="bytes"):
        asyncio.run(prompts.ids("x" * (prompts.max_bytes + 1), True))
    with pytest.raises(ContextLengthError):
        asyncio.run(prompts.ids("é" * (prompts.max_bytes // 2 + 1), True))
    assert tokenizer.given == 0


def test_a_text_that_is_certainly_too_long_is_tokenized_only_slightly_beyond_the_limit():
    tokenizer = Watched()
    prompts = PromptTokenizer(tokenizer, 10_000)
    text = "a b " * (prompts.max_bytes // 4)
    with pytest.raises(ContextLengthError):
        asyncio.run(prompts.ids(text, True))
    assert tokenizer.given < len(text) / 4
    assert tokenizer.most <= PIECE_CHARS


@pytest.mark.parametrize("text", ["the " * 4000, " " * 24_000, "é ü\n" * 4000])
def test_a_long_text_that_just_fits_is_tokenized_as_one(text):
    wanted = DEMO.encode(text).ids
    assert asyncio.run(PromptTokenizer(DEMO, len(wanted)).ids(text, True)).tolist() == wanted


def test_a_text_that_is_only_counted_may_be_longer():
    text = "a b " * 2000
    found = asyncio.run(PromptTokenizer(DEMO, 10).ids(text, True, allow_too_long=True))
    assert len(found) == len(DEMO.encode(text).ids)
    with pytest.raises(ContextLengthError):
        asyncio.run(PromptTokenizer(DEMO, 10).ids("a" * 1_000_001, True, allow_too_long=True))


def test_without_a_tokenizer_text_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        asyncio.run(PromptTokenizer(None, 10).ids("x", True))


def test_many_texts_are_tokenized_a_bounded_number_of_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(prompt_tokenizer, "BYTES_AT_A_TIME", 5000)
    monkeypatch.setattr(prompt_tokenizer.os, "cpu_count", lambda: 64)
    tokenizer = Watched()
    prompts = PromptTokenizer(tokenizer, 10_000)

    async def work():
        return await asyncio.gather(*[prompts.ids("ab " * 600, True) for _ in range(9)])

    assert len({len(ids) for ids in asyncio.run(work())}) == 1
    assert tokenizer.given == 9 * 1800
    assert tokenizer.most <= 5000 < BYTES_AT_A_TIME


def test_a_cancelled_caller_returns_its_budget_only_when_its_thread_ends(monkeypatch):
    monkeypatch.setattr(prompt_tokenizer, "BYTES_AT_A_TIME", 2000)
    tokenizer = Watched()
    prompts = PromptTokenizer(tokenizer, 10_000)

    async def work():
        tokenizer.gate.clear()
        first, second = (asyncio.create_task(prompts.ids("ab " * 600, True)) for _ in range(2))
        while not tokenizer.now:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert tokenizer.given == 1800
        tokenizer.gate.set()
        assert len(await second)

    asyncio.run(work())
    assert (tokenizer.given, tokenizer.most) == (3600, 1800)


def test_the_budget_is_granted_in_order_and_not_lost_to_cancelled_callers():
    async def work():
        room, order = ByteSemaphore(10), []

        async def one(name, size):
            taken = await room.take(size)
            order.append(name)
            return taken

        assert await one("all", 99) == 10
        waiting = [asyncio.create_task(one(name, size)) for name, size in (("a", 8), ("b", 1), ("c", 2))]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        room.give(10)
        assert await asyncio.gather(*waiting[1:]) == [1, 2]
        assert (order, room.free) == (["all", "b", "c"], 7)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "longest"),
    [
        ({"Ġ" * 40: 0, "a": 1}, decoders.ByteLevel(), 40),
        ({"\u2581" * 40: 0, "a": 1}, decoders.Metaspace(), 40),
        ({"é" * 40: 0, "a": 1}, decoders.WordPiece(), 80),
        ({"a": 0}, decoders.ByteLevel(), MIN_LONGEST_TOKEN_BYTES),
    ],
)
def test_the_longest_token_in_bytes(vocabulary, decoder, longest):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoder
    assert max_token_bytes(tokenizer) == longest
