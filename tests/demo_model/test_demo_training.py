"""The demo model's training scripts: samples from stories, packing, attention and the check for loops."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import check_demo_model  # noqa: E402
import demo_attention  # noqa: E402
import demo_corpus  # noqa: E402
import train_demo_model  # noqa: E402

FOX_STORY = (
    "Once upon a time, there was a red fox named Tim. The fox lived in a forest with his friend Lily.\n\n"
    "One day the fox saw a well. Tim and Lily looked into the well and laughed."
)


def test_clean_straightens_quotes_blanks_and_paragraphs() -> None:
    assert demo_corpus.clean("â€œIâ€™m here,â€ he said.") == '"I\'m here," he said.'
    assert demo_corpus.clean("  “Hi,”  she\tsaid.\n\n\nIt’s late. ") == '"Hi," she said.\n\nIt\'s late.'


def test_subjects_come_with_the_most_telling_first() -> None:
    assert demo_corpus.subjects_of(FOX_STORY) == ("red fox", "well")


def test_names_and_animals_are_exchanged_one_for_one() -> None:
    pools = (demo_corpus.GIRLS, demo_corpus.BOYS, demo_corpus.ANIMALS)
    changed = demo_corpus.exchange_words(FOX_STORY, pools, random.Random(1))
    before, after = FOX_STORY.split(), changed.split()
    renamed = {old: new for old, new in zip(before, after, strict=True) if old != new}
    assert set(renamed) == {"fox", "Tim.", "Tim", "Lily.", "Lily"}
    assert renamed["Tim."] == renamed["Tim"] + "."
    assert renamed["Tim"] in demo_corpus.BOYS
    assert renamed["Lily"] in demo_corpus.GIRLS
    assert renamed["fox"] in demo_corpus.ANIMALS


def test_requests_ask_for_what_the_story_holds() -> None:
    requests = {demo_corpus.request_for(FOX_STORY, False, random.Random(seed)).lower() for seed in range(200)}
    assert "tell me a story about a red fox" in requests
    assert any(
        request.startswith("write a story that begins: once upon a time, there was a red fox") for request in requests
    )
    assert all("dog" not in request for request in requests)


def test_samples_are_whole_documents_or_chats() -> None:
    story = demo_corpus.Story(FOX_STORY)
    samples = [demo_corpus.sample_text(story, random.Random(seed), exchange=False) for seed in range(60)]
    documents = [sample for sample in samples if sample.endswith(demo_corpus.EOS)]
    chats = [sample for sample in samples if sample.endswith(demo_corpus.END)]
    assert len(documents) + len(chats) == len(samples)
    assert set(documents) == {f"{demo_corpus.BOS}{FOX_STORY}{demo_corpus.EOS}"}
    assert all(f"{demo_corpus.ASSISTANT}{FOX_STORY}{demo_corpus.END}" in chat for chat in chats)


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--corpus must name a folder"):
        demo_corpus.load_corpus(tmp_path)


def test_packing_keeps_samples_whole_and_pads_the_rest() -> None:
    rng = random.Random(3)
    samples = [[index] * rng.randrange(1, 400) for index in range(1, 60)]
    rows = train_demo_model.pack_rows(samples, pad=0)
    width = train_demo_model.CONTEXT_TOKENS + 1
    total = sum(len(sample) for sample in samples)
    assert rows.shape[1] == width
    assert rows.shape[0] <= 1.2 * total / width + 1
    counts = torch.bincount(rows.flatten(), minlength=60).tolist()
    assert counts[1:] == [len(sample) for sample in samples]
    assert all(len({int(row) for row in (rows == index).nonzero()[:, 0]}) == 1 for index in range(1, 60))


@pytest.mark.parametrize("positions", [1, 128, 300])
def test_blocked_attention_equals_the_plain_formula(positions: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 8, positions, 16)
    key, value = torch.randn(2, 2, positions, 16), torch.randn(2, 2, positions, 16)
    output, weights = demo_attention.blocked_causal_attention(torch.nn.Identity(), query, key, value, None, 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(4, 1), value.repeat_interleave(4, 1), is_causal=True, scale=0.25
    )
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_rates_warm_up_and_fall() -> None:
    factors = [train_demo_model.rate_factor(step / 100) for step in range(101)]
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(train_demo_model.FINAL_RATE)


def test_repetition_distinguishes_a_loop_from_a_story() -> None:
    assert check_demo_model.repetition_of([1, 2, 3, 4, 5, 6, 7, 8] * 3).loops
    assert check_demo_model.repetition_of([7] * 30).loops
    assert not check_demo_model.repetition_of(range(200)).loops
    assert not check_demo_model.repetition_of([]).loops


@pytest.mark.slow
def test_the_demo_model_does_not_loop_and_mostly_ends(model_folder: Path) -> None:
    answers = check_demo_model.sample_answers(model_folder, seed=1, new_tokens=448)
    assert len(answers) == 20
    for prompt, text, ids, _ended in answers:
        assert not check_demo_model.repetition_of(ids[:200]).loops, f"{prompt}: {text}"
    assert sum(ended for *_rest, ended in answers) >= 16
