import numpy as np

from tokenyard.sim.traces.prompt_ids import (
    ANSWER_STREAM,
    EOS_TOKEN,
    VOCAB_SIZE,
    BlankContent,
    SegmentContent,
    TokenContent,
    UniqueContent,
    stream_tokens,
)


def common_prefix(one, other) -> int:
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


def test_a_stream_repeats_itself_and_never_says_end_of_sequence():
    ids = stream_tokens(7, np.arange(100_000))
    assert (ids == stream_tokens(7, np.arange(100_000))).all()
    assert ids.min() > EOS_TOKEN
    assert ids.max() < VOCAB_SIZE
    assert len(np.unique(ids)) > 99_900


def test_streams_differ_from_each_other():
    assert common_prefix(stream_tokens(7, np.arange(64)), stream_tokens(8, np.arange(64))) == 0


def test_segments_share_exactly_the_streams_they_have_in_common():
    streams, lengths = np.array([1, 2, 1, 3], np.int64), np.array([512] * 4, np.int32)
    content = SegmentContent(streams, lengths, np.array([0, 2, 4], np.int64))
    one, other = content.prompt_ids(0, 1000), content.prompt_ids(1, 700)
    assert (len(one), len(other)) == (1000, 700)
    assert common_prefix(one, other) == 512


def test_an_answer_is_the_stream_that_a_later_turn_names():
    content = SegmentContent(
        np.array([5, ANSWER_STREAM + 3], np.int64), np.array([10, 20], np.int32), np.array([0, 2], np.int64)
    )
    assert (content.prompt_ids(0, 30)[10:] == stream_tokens(ANSWER_STREAM + 3, np.arange(20))).all()


def test_unique_prompts_share_nothing():
    content = UniqueContent()
    assert common_prefix(content.prompt_ids(0, 100), content.prompt_ids(1, 100)) == 0


def test_blank_prompts_have_the_right_length_whatever_was_asked_before():
    content = BlankContent()
    assert len(content.prompt_ids(0, 5)) == 5
    assert len(content.prompt_ids(1, 200_000)) == 200_000


def test_known_ids_are_given_back():
    content = TokenContent([np.array([4, 5, 6], np.int32)])
    assert content.prompt_ids(0, 3).tolist() == [4, 5, 6]
