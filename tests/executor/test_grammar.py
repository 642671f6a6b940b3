"""Grammars in the executor: what compiles, masks over logits, and rows that start, end and resume."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import tokenyard
from tokenyard.base import InvalidRequestError, RowStart, SamplingParams, StepPlan
from tokenyard.executor.grammar import GrammarCache, GrammarRows, VocabMasks

TOKENIZER = (Path(tokenyard.__file__).parent / "demo_model" / "tokenizer.json").read_text()
VOCABULARY, EOS = 2048, 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store():
    return GrammarCache(VOCABULARY, (EOS,))


def plan(row: int, epoch: int, *, starts: list[RowStart] = ()) -> StepPlan:
    one, none = np.array([1], np.int32), np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        pool_rows=np.array([row], np.int32),
        epochs=np.array([epoch], np.int32),
        starts=none,
        counts=one,
        samples=one,
        tokens=none,
        page_rows=none,
        page_columns=none,
        page_ids=none,
        row_starts=list(starts),
        delay_sampling=True,
    )


def begun(store: GrammarCache, grammar: str, output: list[int] = ()) -> GrammarRows:
    store.compile(grammar, lambda: TOKENIZER)
    rows = GrammarRows(store, VOCABULARY, CPU)
    known = np.array([5, 5, *output], np.int32)
    rows.take(plan(3, 7, starts=[RowStart(3, SamplingParams(), known, 2, grammar=grammar)]))
    return rows


def allowed(rows: GrammarRows) -> set[int]:
    masks = rows.masks(plan(3, 7))
    assert masks is not None
    return set(torch.nonzero(masks.values[0] == 0).flatten().tolist())


def answer(rows: GrammarRows, seed: int, most: int = 200, eos: int = EOS) -> list[int]:
    """What random weights say."""
    generator, tokens = np.random.default_rng(seed), []
    while len(tokens) < most:
        token = int(generator.choice(sorted(allowed(rows))))
        ended, failures = rows.consume(plan(3, 7), np.array([token], np.int32))
        assert failures == {}
        if token == eos:
            break
        tokens.append(token)
        if ended[0]:
            break
    return tokens


def test_random_choices_keep_to_the_grammar(store):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(TOKENIZER)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_pattern": "[ ]?"}}
    for seed in range(5):
        text = tokenizer.decode(answer(begun(store, "start: %json " + json.dumps(schema)), seed))
        try:
            assert isinstance(json.loads(text)["a"], int)
        except ValueError:
            assert text.startswith('{"a":') or text.startswith('{ "a"'), "cut off within an endless number"


def test_a_resumed_row_continues_after_its_answer(store):
    whole = begun(store, 'start: /[0-9]{6}/ "x"')
    tokens = answer(whole, 1)
    for cut in range(len(tokens)):
        resumed = begun(store, 'start: /[0-9]{6}/ "x"', tokens[:cut])
        assert tokens[cut] in allowed(resumed)


def mask_walk(rows: GrammarRows, tokens: list[int]) -> list[set[int]]:
    found = []
    for token in tokens:
        found.append(allowed(rows))
        rows.consume(plan(3, 7), np.array([token], np.int32))
    return found


@pytest.mark.parametrize("grammar", ["start: /[a-z ]{1,40}/", 'start: %json {"type": "object"}', 'start: "ab" | "abc"'])
def test_a_matcher_that_was_used_before_allows_the_same(store, grammar):
    tokens = answer(begun(store, grammar), 3, most=30)
    expected = mask_walk(begun(store, grammar), tokens)
    rows = begun(store, grammar)
    for round_number in range(3):
        assert mask_walk(rows, tokens) == expected
        rows.take(plan(3, 7, starts=[RowStart(3, SamplingParams(), np.array([5, 5], np.int32), 2, grammar=grammar)]))
        assert rows.matchers[3].used, round_number


def test_many_rows_have_the_masks_that_each_has_alone(store):
    grammars = ["start: /[a-z ]{1,40}/", 'start: %json {"type": "object"}', 'start: "ab" | "abc"', "start: /[0-9]+/"]
    for grammar in grammars:
        store.compile(grammar, lambda: TOKENIZER)
    count = 24
    together = plan(3, 7)
    together.pool_rows = np.arange(count, dtype=np.int32)
    together.epochs = np.full(count, 7, np.int32)
    together.samples = together.counts = np.ones(count, np.int32)
    known = np.array([5, 5], np.int32)
    together.row_starts = [
        RowStart(row, SamplingParams(), known, 2, grammar=grammars[row % len(grammars)]) for row in range(count)
    ]
    rows = GrammarRows(store, VOCABULARY, CPU)
    rows.take(together)
    values = rows.masks(together).values
    for row in range(count):
        alone = set(torch.nonzero(values[row] == 0).flatten().tolist())
        assert alone == allowed(begun(store, grammars[row % len(grammars)]))


@pytest.mark.parametrize("where", ["mask", "token"])
def test_a_used_matcher_that_fails_is_replaced_by_a_fresh_one(store, where):
    grammar = 'start: /[0-9]{4}/ "x"'
    rows = begun(store, grammar)
    rows.take(plan(3, 7, starts=[RowStart(3, SamplingParams(), np.array([5, 5], np.int32), 2, grammar=grammar)]))
    digit = min(allowed(rows))
    rows.consume(plan(3, 7), np.array([digit], np.int32))
    expected = allowed(rows)
    # As a limit that earlier answers have used up shows.
    rows.matchers[3].state.consume_token(EOS)
    assert rows.matchers[3].state.is_error()
    if where == "mask":
        assert allowed(rows) == expected
    _, failures = rows.consume(plan(3, 7), np.array([digit], np.int32))
    assert failures == {}
    assert not rows.matchers[3].used
    assert allowed(rows) == allowed(begun(store, grammar, [digit, digit]))


def test_results_of_an_earlier_owner_of_the_row_are_not_taken_in(store):
    rows = begun(store, 'start: "ab"')
    before = allowed(rows)
    ended, failures = rows.consume(plan(3, 6), np.array([EOS], np.int32))
    assert failures == {}
    assert not ended[0]
    assert allowed(rows) == before


def test_a_late_result_of_an_owner_with_the_same_epoch_is_not_taken_in(store):
    rows = begun(store, 'start: "ab"')
    before = allowed(rows)
    late, first = plan(3, 7), plan(3, 7, starts=[])
    first.step = 9
    first.row_starts = [RowStart(3, SamplingParams(), np.array([5, 5], np.int32), 2, grammar='start: "ab"')]
    rows.take(first)
    late.step = 8
    ended, failures = rows.consume(late, np.array([EOS], np.int32))
    assert failures == {}
    assert not ended[0]
    # The row keeps its matcher: without one its answer would be free text up to its length.
    assert allowed(rows) == before


def test_a_token_that_the_grammar_forbids_fails_its_row_alone(store):
    rows = begun(store, 'start: "ab"')
    _, failures = rows.consume(plan(3, 7), np.array([EOS], np.int32))
    assert "grammar" in failures[0]
    assert rows.masks(plan(3, 7)) is None


def test_rows_without_a_grammar_have_no_masks(store):
    rows = GrammarRows(store, VOCABULARY, CPU)
    rows.take(plan(3, 7, starts=[RowStart(3, SamplingParams(), np.array([1], np.int32), 1)]))
    assert rows.masks(plan(3, 7)) is None


def test_a_mask_wins_over_a_bias_that_leaves_nothing():
    values = torch.full((1, 4), float("-inf"))
    values[0, 2] = 0.0
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("-inf")
    VocabMasks(np.array([1]), values).apply(logits)
    assert logits[1].argmax() == 2
    assert (logits[0] == 0).all()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: %json {"type": "object", "not": {}}', "not"),
        ("start: /(/", "unclosed"),
        ("start: nowhere", "nowhere"),
        ("nonsense", "grammar"),
        ("start: start start", "no answer"),
    ],
)
def test_wrong_grammars_are_refused_with_the_reason(store, grammar, words):
    with pytest.raises(InvalidRequestError, match=words):
        store.compile(grammar, lambda: TOKENIZER)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string"}, "b/c": {"not": {}}}}, r"tools: f at /properties/b~1c: .*not"),
        ({"items": {"anyOf": [{"type": "string"}, {"type": "nope"}]}}, r"tools: f at /items/anyOf/1: .*nope"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"format": "foo"}}}, r"tools: f at .*/x: .*foo"),
        ({"uniqueItems": True}, r"tools: f: .*uniqueItems"),
    ],
)
def test_a_refusal_names_the_tool_and_the_pointer(store, schema, words):
    good = json.dumps({"type": "object"})
    rules = f"a: %json {good} // tools: e\nb: %json {json.dumps(schema)} // tools: f"
    with pytest.raises(InvalidRequestError, match=words):
        store.compile(f"start: a | b\n{rules}", lambda: TOKENIZER)


def test_runs_are_taken_in_up_to_the_end_of_the_grammar(store):
    rows = begun(store, "start: /[0-9]{3}/")
    digit = min(allowed(rows))
    ended, failures = rows.consume(plan(3, 7), np.array([digit, digit], np.int32), np.array([2], np.int32))
    assert (ended.tolist(), failures) == ([False], {})
    # What a run holds behind the end of the grammar is cut off with the row.
    run = np.array([digit, EOS, digit], np.int32)
    ended, failures = rows.consume(plan(3, 7), run, np.array([3], np.int32))
    assert (ended.tolist(), failures) == ([True], {})
    rows = begun(store, "start: /[0-9]{3}/")
    ended, failures = rows.consume(plan(3, 7), np.zeros(0, np.int32), np.array([0], np.int32))
    assert (ended.tolist(), failures) == ([False], {})
    _, failures = rows.consume(plan(3, 7), np.array([digit, EOS], np.int32), np.array([2], np.int32))
    assert "grammar" in failures[0]


def test_a_continued_answer_that_violates_its_grammar_fails_instead_of_ending_early(store):
    rows = begun(store, "start: /[0-9]{3}/", [EOS + 1])
    (token,) = allowed(rows)
    _, failures = rows.consume(plan(3, 7), np.array([token], np.int32))
    assert "grammar" in failures[0]


def test_a_tokenizer_that_cannot_be_used_is_refused():
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        GrammarCache(VOCABULARY, (EOS,)).compile('start: "a"', lambda: "{}")


def metaspace(kind: str, *more: str) -> Tokenizer:
    """A small tokenizer as SentencePiece makes them, with a decoder of Metaspace; `more` tokens are in it."""
    letters = list('▁abcdefghijklmnopqrstuvwxyz0123456789{}:",ü\n')
    marks, lines = ["<s>", "</s>", "<unk>", *more], ["the quick fox: 10 wolves, no way", '{"a": 1}', " ".join(letters)]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(
            vocab_size=120, special_tokens=marks, initial_alphabet=letters, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=marks, initial_alphabet=letters, unk_token="<unk>", show_progress=False
        )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("pattern", ["[a-z]{1,3} [a-z ]{2,9}[0-9]", "yes|no way", "ü\n ?ü", '[{]"a": [0-9]{1,3}[}]'])
def test_random_choices_with_a_metaspace_tokenizer_keep_to_the_grammar(kind, pattern):
    tokenizer = metaspace(kind)
    size, before = tokenizer.get_vocab_size(), tokenizer.encode("the").ids
    own, grammar = GrammarCache(size, (1,)), f"start: /{pattern}/"
    own.compile(grammar, tokenizer.to_str)
    for seed in range(6):
        rows = GrammarRows(own, size, CPU)
        rows.take(
            plan(3, 7, starts=[RowStart(3, SamplingParams(), np.array(before, np.int32), len(before), grammar=grammar)])
        )
        tokens = answer(rows, seed, eos=1)
        assert re.fullmatch(pattern, tokenizer.decode(before + tokens).removeprefix("the"))


def test_metaspace_with_tokens_for_bytes_is_refused():
    tokenizer = metaspace("bpe", "<0x0A>")
    with pytest.raises(InvalidRequestError, match="this model's tokenizer cannot be used with grammars"):
        GrammarCache(tokenizer.get_vocab_size(), (1,)).compile("start: /[a-z]+/", tokenizer.to_str)


def test_a_complete_grammar_ends_its_row_without_another_step(store):
    rows = begun(store, "start: /[0-9]/")
    token = min(allowed(rows))
    ended, failures = rows.consume(plan(3, 7), np.array([token], np.int32))
    assert ended.tolist() == [True]
    assert failures == {}
    after, failures = rows.consume(plan(3, 7), np.array([token], np.int32))
    assert failures == {}
    assert after.tolist() == [True]


def ids_of(text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(TOKENIZER).encode(text, add_special_tokens=False).ids


def verify(row: int, epoch: int, drafts: list[int]) -> StepPlan:
    """A step that verifies drafts whose ids are in the plan already."""
    step = plan(row, epoch)
    step.samples = step.counts = np.array([1 + len(drafts)], np.int32)
    step.tokens = np.array([-1, *drafts], np.int32)
    step.verify_rows = 1
    return step


def test_a_row_that_verifies_drafts_has_the_masks_of_single_steps(store):
    grammar = 'start: %json {"type": "object"}'
    tokens = answer(begun(store, grammar), 3, most=8)
    expected = mask_walk(begun(store, grammar), tokens)
    rows = begun(store, grammar)
    for _ in range(2):
        masks = rows.masks(verify(3, 7, tokens[:-1]))
        assert masks.places.tolist() == list(range(8))
        assert not len(masks.withdrawn)
        found = [set(torch.nonzero(values == 0).flatten().tolist()) for values in masks.values]
        assert found == expected
    # What was only looked at is not taken in.
    assert allowed(rows) == expected[0]


WRONG, ENDED = 'start: "yes" "yes" "yes"', 'start: "yes" | "yes yes"'


@pytest.mark.parametrize(("grammar", "drafts"), [(WRONG, ["yes", "no", "yes"]), (ENDED, ["yes", "", "yes"])])
def test_a_draft_followed_by_nothing_known_is_withdrawn(store, grammar, drafts):
    words = [[EOS] if not word else ids_of(word) for word in drafts]
    masks = begun(store, grammar).masks(verify(3, 7, [id for word in words for id in word]))
    known = len(words[0]) + 1
    assert masks.places.tolist() == list(range(known))
    # Input 0 is the row's last token, so a draft's own place among the inputs is that of the sample behind it.
    assert masks.withdrawn.tolist() == [known]
    among = masks.among(np.array([0, 1, known + 1]))
    assert among.places.tolist() == [0, 1]
    assert torch.equal(among.values, masks.values[:2])


def test_drafts_are_what_the_grammar_forces_or_what_it_allows_of_others(store):
    rows = begun(store, 'start: "Once upon a time " /[a-z]+/')
    forced, changed = rows.drafts(3, np.zeros(0, np.int32), 20)
    assert changed
    assert len(forced) > 2
    assert forced.tolist() == ids_of("Once upon a time")[: len(forced)]
    assert rows.drafts(3, np.zeros(0, np.int32), 2)[0].tolist() == forced[:2].tolist()
    proposed = np.array([*ids_of("Once upon a time he"), EOS, 5], np.int32)
    longer, changed = rows.drafts(3, proposed, 20)
    assert changed
    assert longer.tolist() == proposed[:-1].tolist()
    free = np.array([9, 9], np.int32)
    assert rows.drafts(4, free, 20)[0] is free
    rows.consume(plan(3, 7), proposed[:-1], np.array([len(proposed) - 1], np.int32))
    assert not len(rows.drafts(3, free, 20)[0]), "nothing follows the end"
