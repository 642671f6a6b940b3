"""Answers that keep to grammars are the same under every schedule: alone, chunked, overlapped, cached and retracted."""

import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.executor.eagle_maker import head_config, head_tensors, save_head
from tests.executor.test_grammar import TOKENIZER
from tests.scheduler.harness import Yard
from tokenyard.base import NO_TOKENS, Int32Array, OpenGate, SamplingParams, SchedulerSettings
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.model_loader import load_executor
from tokenyard.scheduler.request_observer import Counters
from tokenyard.scheduler.row_state import Gate

GRAMMARS = (
    'start: %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}',
    "start: /[a-z ]{12,30}/",
    'start: "yes" | "no way"',
    'start: "[" item (", " item){9}  "]"\nitem: "{\\"kind\\": \\"fox\\", \\"name\\": \\"" /[a-z]{1,3}/ "\\"}"',
    "",
)
TEXTS = ("Alice was beginning to get very tired of sitting", "Once upon a time", "The Queen said", "x")
TOKENS = 24
REQUESTS = 12


class DelayedYard(Yard):
    """Samples delayed steps when the one before has been committed, as the event loops do."""

    def advance(self, depth: int = 1) -> bool:
        began = len(self.tickets) < depth and self.launch()
        if not began or len(self.tickets) == depth:
            done = self.commit() if len(self.tickets) > began else False
        else:
            done = False
        if began and self.tickets[-1].plan.delay_sampling:
            self.executor.sample(self.tickets[-1])
        if began and depth == 1:
            done = self.commit()
        return bool(began or done)


def sampling(place: int, penalty: float = 0.0) -> SamplingParams:
    """How a request is sampled; `penalty` is for all, or 0 for a small one of two."""
    temperature = 0.0 if place % 2 else 1.0
    penalty = penalty or 0.02 * (place in (6, 9))
    return SamplingParams(
        max_new_tokens=TOKENS,
        temperature=temperature,
        seed=place,
        n=1 + (place % 5 == 0),
        frequency_penalty=penalty,
        presence_penalty=penalty,
    )


def answers(
    *,
    tokens: int,
    chunk: int,
    depth: int,
    no_cache: bool,
    together: bool,
    drafts: int = 0,
    penalty: float = 0.0,
    grammars: Sequence[str] = GRAMMARS,
    predictions: Sequence[Int32Array] = (),
    **loading: str,
) -> tuple[list[list[int]], Counters]:
    """The tokens of every answer, and what the scheduler counted. loading: further options of load_executor."""
    torch.set_num_threads(1)
    executor = load_executor(
        str(DEMO_MODEL),
        device="cpu",
        dtype="float32",
        max_total_tokens=tokens,
        max_pool_rows=REQUESTS * 2 + depth,
        draft_tokens=drafts,
        **loading,
    )
    settings = SchedulerSettings(
        max_running_requests=REQUESTS * 2,
        context_length=executor.info.context_length,
        chunked_prefill_size=chunk,
        disable_radix_cache=no_cache,
        max_in_flight=depth,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
    )
    yard = DelayedYard(settings, executor.info, executor=executor)
    tokenizer = Tokenizer.from_str(TOKENIZER)
    numbers = []
    for place in range(REQUESTS):
        grammar, wish = grammars[place % len(grammars)], sampling(place, penalty)
        prompt, prediction = tokenizer.encode(TEXTS[place % 3]).ids, predictions[place] if predictions else NO_TOKENS
        first = yard.submit(prompt, sampling=wish, grammar=grammar, prediction=prediction)
        numbers += range(first, first + wish.n)
        if grammar:
            executor.compile_grammar(grammar, lambda: TOKENIZER)
            for number in range(first, first + wish.n):
                yard.apply(OpenGate(number, Gate.GRAMMAR))
        if not together:
            yard.run(depth)
    yard.run(depth)
    assert yard.scheduler.idle() is None
    return [yard.tokens[number] for number in numbers], yard.scheduler.snapshot(0).counters


@pytest.fixture(scope="module")
def alone():
    return answers(tokens=4096, chunk=-1, depth=1, no_cache=True, together=False)[0]


def test_alone_every_answer_keeps_to_its_grammar(alone):
    tokenizer = Tokenizer.from_str(TOKENIZER)
    texts = [tokenizer.decode(tokens) for tokens in alone]
    assert any(text.strip() in ("yes", "no way") for text in texts)
    assert any(text.startswith("{") for text in texts)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("chunk", "depth", "no_cache", "tokens"), list(itertools.product((4, -1), (1, 2), (False, True), (4096, 110)))
)
def test_no_schedule_changes_an_answer(alone, chunk, depth, no_cache, tokens):
    found, counters = answers(tokens=tokens, chunk=chunk, depth=depth, no_cache=no_cache, together=True)
    assert found == alone
    if tokens < 200:
        assert counters.retracted > 0


@pytest.mark.parametrize(("depth", "tokens"), [(1, 110), (2, 4096), (2, 110)])
def test_no_drafts_change_an_answer(alone, depth, tokens):
    found, counters = answers(tokens=tokens, chunk=-1, depth=depth, no_cache=False, together=True, drafts=5)
    assert found == alone
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
    if tokens < 200:
        assert counters.retracted > 0


def test_no_drafts_of_a_head_change_an_answer(alone, tmp_path):
    target = json.loads((DEMO_MODEL / "config.json").read_text())
    fields = {"draft_vocab_size": 100, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    config = head_config(target["vocab_size"], target["hidden_size"], **fields)
    head = save_head(tmp_path, config, head_tensors(config, layer="midlayer.", aux=3))
    schedule = {"tokens": 110, "chunk": -1, "depth": 2, "no_cache": False, "together": True}
    found, counters = answers(**schedule, drafts=3, draft_head="EAGLE3", draft_model=head)
    assert found == alone
    assert counters.draft_tokens > 0 < counters.retracted


def early_ends(tokens: list[int], end: int) -> Int32Array:
    """A prediction whose drafts are right for two tokens at most, and then end the grammar."""
    return np.array([x for place in range(len(tokens) - 3) for x in (*tokens[place : place + 4], end)], np.int32)


@pytest.mark.part(2)
@pytest.mark.parametrize("penalty", [0.2, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_draft_that_a_grammar_withdraws_changes_a_penalised_answer(depth, penalty):
    # Behind a draft that may end the answer nothing is known, so it and what follows it are sampled again.
    grammars, end = ("start: /[A-Za-z ,]{0,120}[.]?/",), Tokenizer.from_str(TOKENIZER).encode(".").ids[-1]
    free = {"tokens": 4096, "chunk": -1, "penalty": penalty, "grammars": grammars}
    plain, _ = answers(**free, depth=1, no_cache=True, together=False)
    firsts = np.cumsum([0] + [sampling(place).n for place in range(REQUESTS - 1)])
    predictions = [early_ends(plain[first], end) for first in firsts]
    found, counters = answers(**free, depth=depth, no_cache=False, together=True, drafts=5, predictions=predictions)
    assert found == plain
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens


def test_a_request_waits_until_its_grammar_is_compiled():
    executor = load_executor(str(DEMO_MODEL), device="cpu", dtype="float32", max_total_tokens=256)
    yard = DelayedYard(SchedulerSettings(context_length=256), executor.info, executor=executor)
    number = yard.submit([5, 6], grammar=GRAMMARS[2], max_new=4)
    plain = yard.submit([5, 6], max_new=4)
    yard.run()
    assert plain in yard.finished
    assert number not in yard.finished
    executor.compile_grammar(GRAMMARS[2], lambda: TOKENIZER)
    yard.apply(OpenGate(number, Gate.GRAMMAR))
    yard.run()
    assert yard.finished[number].reason == "stop"
    assert not any(plan.delay_sampling for plan in yard.plans[:4])


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_continued_from_any_of_its_tokens_is_the_same(alone, depth):
    torch.set_num_threads(1)
    executor = load_executor(str(DEMO_MODEL), device="cpu", dtype="float32", max_total_tokens=4096, max_pool_rows=80)
    settings = SchedulerSettings(max_running_requests=64, context_length=512, max_in_flight=depth)
    yard = DelayedYard(settings, executor.info, executor=executor)
    tokenizer = Tokenizer.from_str(TOKENIZER)
    answers_of, at, expected = {}, 0, {}
    for place in range(REQUESTS):
        answers_of[place], at = alone[at], at + sampling(place).n
    for place, whole in answers_of.items():
        grammar, wish = GRAMMARS[place % len(GRAMMARS)], sampling(place)
        wish.n = 1
        if grammar:
            executor.compile_grammar(grammar, lambda: TOKENIZER)
        for cut in range(0, len(whole), 3):
            begun = np.array(whole[:cut], np.int32)
            prompt = tokenizer.encode(TEXTS[place % 3]).ids
            number = yard.submit(prompt, sampling=wish, grammar=grammar, output_ids=begun)
            expected[number] = whole[cut:]
            if grammar:
                yard.apply(OpenGate(number, Gate.GRAMMAR))
    yard.run(depth)
    assert {number: yard.tokens[number] for number in expected} == expected
