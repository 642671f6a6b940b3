"""Tokens to text: whole characters only, exact stop strings, and the right thing at the end."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.text_helpers import Run, batch, demo, gpt2, started
from tests.examples import examples
from tokenyard.base import Finish, InvalidRequestError, TokenLogprobs
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.detokenizer.stop_strings import StopHit, StopMatcher
from tokenyard.engine.processes.messages import Fence

EOS = "<|endoftext|>"


@pytest.fixture(scope="module", params=[demo, gpt2])
def tokenizer(request):
    return request.param()


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "text", ["Hello world, it's 5 o'clock.", "naïve 🤦🏽‍♂️ 日本語 \n\n done", "a", "\ufffd and more \ufffd"]
)
def test_text_is_restored_whole(tokenizer, text, stream):
    run = Run(tokenizer, ids_of(tokenizer, text), stream=stream)
    assert run.text == text
    assert run.tokens == ids_of(tokenizer, text)
    assert len(run.assembler) == 0


def test_no_piece_holds_half_a_character(tokenizer):
    run = Run(tokenizer, ids_of(tokenizer, "🤦🏽‍♂️日本語🎉" * 3))
    assert len(run.pieces) > 5
    assert not any("\ufffd" in piece for piece in run.pieces)


def test_an_answer_cut_inside_a_character_shows_it_at_the_end(tokenizer):
    ids = ids_of(tokenizer, "ok 🎉")[:-1]
    run = Run(tokenizer, ids)
    assert run.text == tokenizer.decode(ids)
    assert run.pieces[-1].endswith("\ufffd")


@settings(max_examples=examples(60), deadline=None)
@given(ids=st.lists(st.integers(0, 2047), max_size=150), stream=st.booleans())
def test_any_tokens_decode_as_in_one_go(tokenizer, ids, stream):
    run = Run(tokenizer, ids, stream=stream, skip_special_tokens=False)
    want = tokenizer.decode(ids, skip_special_tokens=False)
    assert run.text.replace("\ufffd", "") == want.replace("\ufffd", "")


def test_long_runs_without_text_stay_whole(tokenizer):
    ids = [tokenizer.token_to_id(EOS)] * 200 + ids_of(tokenizer, " word")
    assert Run(tokenizer, ids, prompt=ids_of(tokenizer, "A")).text == " word"
    broken = [tokenizer.token_to_id("Ł")] * 200
    assert Run(tokenizer, broken).text.strip("\ufffd") == ""


def test_unknown_ids_have_no_text(tokenizer):
    (known,) = ids_of(tokenizer, " one")
    assert Run(tokenizer, [60000, known, 70000]).text == " one"


def test_the_prompt_decides_the_first_space():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<s>": 0, "▁Hello": 1, "▁world": 2, "▁": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    assert Run(tokenizer, [1, 2], prompt=[0]).text == "Hello world"
    assert Run(tokenizer, [1, 2], prompt=[0, 2]).text == " Hello world"


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer):
    prompt = ids_of(tokenizer, "abc 🎉")[:-1]
    assert "abc" not in Run(tokenizer, ids_of(tokenizer, " next"), prompt=prompt).text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (["lazy"], "The quick brown fox jumps over the ", "lazy"),
        (["n fox ju"], "The quick brow", "n fox ju"),
        (["dog", "fox"], "The quick brown ", "fox"),
        (["brown fox", "fox"], "The quick ", "brown fox"),
        (["nope"], "The quick brown fox jumps over the lazy dog.", None),
    ],
)
def test_stop_strings(tokenizer, stop, text, matched, stream):
    ids = ids_of(tokenizer, "The quick brown fox jumps over the lazy dog.")
    run = Run(tokenizer, ids, stop=stop, stream=stream)
    assert run.text == text
    if matched is None:
        assert run.finish.reason == "length"
        return
    (found,) = run.stops
    assert (run.finish.reason, run.finish.matched) == ("stop", matched)
    kept = ids[: found.keep_tokens]
    assert matched in tokenizer.decode(kept)
    assert matched not in tokenizer.decode(kept[:-1])
    assert run.finish.completion_tokens == found.keep_tokens
    assert run.tokens == kept


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_wait_for_the_least_number_of_tokens(tokenizer, stream):
    text = "one two three one two three"
    ids = ids_of(tokenizer, text)
    least = len(ids_of(tokenizer, "one two three"))
    run = Run(tokenizer, ids, stop=[" two"], min_tokens=least, stream=stream)
    assert (run.text, run.finish.matched) == ("one two three one", " two")
    assert run.finish.completion_tokens > least
    assert Run(tokenizer, ids, stop=[" two"], min_tokens=len(ids), stream=stream).text == text


def test_no_stop_trim_keeps_the_stop_string(tokenizer):
    ids = ids_of(tokenizer, "one two three four")
    assert Run(tokenizer, ids, stop=["three"], no_stop_trim=True).text == "one two three"


def test_a_found_stop_wins_over_length_and_abort(tokenizer):
    ids = ids_of(tokenizer, "one two three")
    for reason in ("length", "abort"):
        end = Finish(1, reason, message="gone", cause="cancelled", completion_tokens=3)
        run = Run(tokenizer, ids, stop=[" two"], end=end)
        assert (run.finish.reason, run.finish.matched, run.finish.completion_tokens) == ("stop", " two", 2)
        assert (run.finish.message, run.finish.cause, run.text) == ("", "", "one")


def test_the_beginning_of_a_stop_string_is_shown_when_the_rest_does_not_follow(tokenizer):
    ids = ids_of(tokenizer, "one two thr")
    assert Run(tokenizer, ids, stop=[" three"]).text == "one two thr"


def texts_by_token(tokenizer, ids, **options):
    """What an answer that streams shows with each of its tokens, and at its end."""
    assembler = TextAssembler(tokenizer)
    assembler.step(batch(start=[started(**options)]))
    shown = ["".join(assembler.step(batch([1], [token]))[0].texts) for token in ids]
    last, _ = assembler.step(batch(finish=[Finish(1, "length", completion_tokens=len(ids))]))
    return [*shown, "".join(last.texts)]


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2047), min_size=1, max_size=80) | st.just([*demo().encode("a 🎉 b 🤦🏽‍♂️ c").ids] * 2),
    cut=st.integers(0, 80),
    stream=st.booleans(),
    stop=st.sampled_from([[], ["e"], ["the ", "zz"], ["🎉 b"]]),
    least=st.sampled_from([0, 20]),
)
def test_a_continued_answer_shows_what_was_not_yet_shown(tokenizer, ids, cut, stream, stop, least):
    cut = min(cut, len(ids))
    options = {"stop": stop, "min_tokens": least, "prompt": [5, 6]}
    whole = Run(tokenizer, ids, **options)
    begun = Run(tokenizer, ids[cut:], begun=ids[:cut], stream=stream, **options)
    before = "".join(texts_by_token(tokenizer, ids, **options)[:cut])
    assert before + begun.text == whole.text
    assert begun.said == before
    if cut < len(whole.tokens):
        assert ids[:cut] + begun.tokens == whole.tokens
    assert begun.finish.reason == whole.finish.reason
    assert begun.finish.matched == whole.finish.matched


def test_a_stop_string_in_a_continued_answer_is_reported_at_once(tokenizer):
    ids = ids_of(tokenizer, "one two three")
    assembler = TextAssembler(tokenizer)
    _, stops = assembler.step(batch(start=[started(begun=ids, stop=["two"])]))
    assert [(stop.number, stop.keep_tokens, stop.matched) for stop in stops] == [(1, len(ids), "two")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [(), ("two thr",), ("one",)])
def test_an_answer_continues_with_another_scheduler_where_the_first_one_left_it(tokenizer, stream, stop):
    ids = ids_of(tokenizer, "one 🎉 two three 🎉 four")
    whole = Run(tokenizer, ids, stop=stop, stream=stream)
    for cut in range(len(ids) + 1):
        assembler, shown = TextAssembler(tokenizer), []
        assembler.step(batch(start=[started(stop=stop, stream=stream), started(2)]), source=1)
        for token in ids[:cut]:
            shown += assembler.step(batch([1], [token]), source=1)[0].texts
        fenced = assembler.fence(Fence(1, [1, 3]))
        assert (fenced.numbers.tolist(), fenced.token_counts.tolist()) == ([1], [min(cut, len(whole.tokens))])
        assert fenced.tokens.tolist() == whole.tokens[:cut]
        assert len(assembler) == 1, "what else the first one had is forgotten"
        begun = fenced.tokens.tolist()
        _, stops = assembler.step(batch(start=[started(stop=stop, stream=stream, begun=begun)]), source=2)
        assert bool(stops) == (whole.finish.reason == "stop" and len(whole.tokens) <= cut)
        for token in ids[cut:]:
            shown += assembler.step(batch([1], [token]), source=2)[0].texts
        last, _ = assembler.step(batch(finish=[Finish(1, "length", completion_tokens=len(ids))]), source=2)
        assert "".join([*shown, *last.texts]) == whole.text
        assert (last.finished[0].reason, last.finished[0].matched) == (whole.finish.reason, whole.finish.matched)


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "one two"), (True, "one two three")])
def test_a_stop_token_is_trimmed(tokenizer, no_stop_trim, text):
    ids = ids_of(tokenizer, "one two three")
    end = Finish(1, "stop", matched=ids[-1], completion_tokens=3)
    run = Run(tokenizer, ids, end=end, no_stop_trim=no_stop_trim)
    assert run.text == text
    assert run.tokens == ids
    assert run.finish.matched == ids[-1]


def test_an_eos_token_leaves_no_text(tokenizer):
    ids = [*ids_of(tokenizer, "done"), tokenizer.token_to_id(EOS)]
    end = Finish(1, "stop", matched=ids[-1], completion_tokens=len(ids))
    assert Run(tokenizer, ids, end=end, no_stop_trim=True).text == "done"
    shown = Run(tokenizer, ids, end=end, no_stop_trim=True, skip_special_tokens=False)
    assert shown.text == "done<|endoftext|>"


def test_stream_interval_sends_the_first_token_at_once(tokenizer):
    run = Run(tokenizer, ids_of(tokenizer, "a b c d e f g h"), stream_interval=4)
    assert run.pieces == ["a", " b c d e", " f g h"]


def test_an_answer_that_does_not_stream_is_sent_once(tokenizer):
    run = Run(tokenizer, ids_of(tokenizer, "a b c d e f"), stream=False)
    assert run.pieces == ["a b c d e f"]


def test_without_tokenizer_only_ids_pass():
    run = Run(None, [5, 6, 7])
    assert (run.text, run.tokens) == ("", [5, 6, 7])
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        Run(None, [5], stop=["x"])


def test_a_step_with_many_answers_keeps_them_apart(tokenizer):
    assembler = TextAssembler(tokenizer)
    words = [" one", " two", " three", " four"]
    ids = [ids_of(tokenizer, word)[0] for word in words]
    assembler.step(batch(start=[started(number) for number in range(4)]))
    out, _ = assembler.step(batch(range(4), ids, hits=[0, 1, 2, 3]))
    assert out.numbers.tolist() == [0, 1, 2, 3]
    assert out.texts == words
    assert out.cached_tokens.tolist() == [0, 1, 2, 3]
    assert out.token_counts.tolist() == [1, 1, 1, 1]


def test_an_end_without_a_start_passes():
    out, _ = TextAssembler(None).step(batch(finish=[Finish(9, "abort", message="queue full", cause="queue_full")]))
    assert out.finished[0].cause == "queue_full"
    assert len(out.numbers) == 0


def test_logprobs_go_with_their_tokens_and_end_at_a_found_stop(tokenizer):
    ids = ids_of(tokenizer, "one two three four")
    entries = [TokenLogprobs(1, 2 + i, token, -1.0) for i, token in enumerate(ids)]
    assembler = TextAssembler(tokenizer)
    assembler.step(batch(start=[started(prompt=[0, 1], stop=["two"])]))
    out, stops = assembler.step(batch([1] * 4, ids, logprobs=entries))
    out_end, _ = assembler.step(batch(finish=[Finish(1, "stop", completion_tokens=2)]))
    assert stops[0].keep_tokens == 2
    assert [entry.position for entry in out.logprobs + out_end.logprobs] == [2, 3]


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_matcher_equals_a_search_of_the_whole_text(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher, shown, hit = StopMatcher(stops), "", None
    for begin, end in itertools.pairwise(edges):
        out = matcher.feed(text[begin:end])
        if isinstance(out, StopHit):
            hit = out
            break
        shown += out
    ends = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
    if not ends:
        assert hit is None
        assert shown + matcher.rest() == text
    else:
        assert hit is not None
        assert shown + hit.before + hit.matched == text[: ends[0][0]]
        assert len(hit.matched) == -ends[0][1]


def test_columns_have_their_types(tokenizer):
    assembler = TextAssembler(tokenizer)
    assembler.step(batch(start=[started()]))
    out, _ = assembler.step(batch([1], [500]))
    assert out.numbers.dtype == np.int64
    assert {out.tokens.dtype, out.token_counts.dtype, out.completion_tokens.dtype} == {np.dtype(np.int32)}
