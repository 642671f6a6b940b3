"""The sampler against naive versions of what each parameter means."""

import math
import sys

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import MISSING
from tokenyard.base import RowStart, SamplingParams
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library
from tokenyard.executor.native.runtime import NativeRuntime
from tokenyard.executor.native.sampling import NativeSamplingBackend
from tokenyard.executor.sampling import top_k_top_p
from tokenyard.executor.sampling.noise import signed_seed, uniform
from tokenyard.executor.sampling.sampler import Sampler

VOCAB = 50
EOS = (2,)
SLOWLY = "in Triton's interpreter"
"""A draw takes a tenth of a second there, so tests ask it for few."""
DRAWERS = {"torch": lambda vocab: None}
try:
    if DEVICE != "cpu":
        raise NoLibraryError("native kernels are for the CPU")
    LIBRARY = load_library()
    for number in LIBRARY.levels():
        engine = NativeRuntime(LIBRARY, 2, number)
        DRAWERS[LEVELS[number]] = lambda vocab, engine=engine: NativeSamplingBackend(engine, vocab)
except NoLibraryError as error:
    DRAWERS["native"] = lambda vocab, error=error: pytest.skip(f"no native library: {error}")
if not MISSING:
    from tokenyard.executor.attention.triton.sampling_kernels import TritonSamplingBackend

    DRAWERS[SLOWLY if DEVICE == "cpu" else "triton"] = lambda vocab: TritonSamplingBackend()


@pytest.fixture(autouse=True, params=DRAWERS)
def drawers(request, monkeypatch):
    """Every test draws by torch and by the kernels of each instruction set."""
    monkeypatch.setattr(sys.modules[__name__], "make_drawer", DRAWERS[request.param])
    monkeypatch.setattr(sys.modules[__name__], "slowly", request.param == SLOWLY)


make_drawer, slowly = DRAWERS["torch"], False


def make_sampler(*params, known=(5, 6, 7), prompt_tokens=None, vocab=VOCAB):
    """A sampler with one row for each SamplingParams."""
    sampler = Sampler(len(params) or 1, vocab, EOS, torch.device(DEVICE), make_drawer(vocab))
    known = np.array(known, dtype=np.int32)
    prompt_tokens = len(known) if prompt_tokens is None else prompt_tokens
    sampler.take([RowStart(row, sampling, known, prompt_tokens) for row, sampling in enumerate(params)])
    return sampler


def sample(sampler, logits, rows=None, positions=None):
    rows = np.arange(len(logits), dtype=np.int32) if rows is None else np.array(rows, dtype=np.int32)
    positions = np.full(len(logits), 3) if positions is None else np.array(positions)
    return sampler.sample(logits.to(DEVICE, copy=True), rows, positions.astype(np.int64)).tolist()


def random_logits(rows, vocab=VOCAB, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def naive_probabilities(logits, params):
    """Temperature, top_k, top_p, min_p, one after the other, each on what the one before left."""
    values = [float(value) / params.temperature for value in logits]
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < params.top_p * total:
            kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
]


@pytest.mark.parametrize("fields", FILTERS)
def test_draws_follow_the_distribution(fields):
    params = SamplingParams(seed=11, **fields)
    logits = random_logits(1, seed=3)
    draws = 120 if slowly else 4000
    tokens = sample(make_sampler(params), logits.expand(draws, -1), [0] * draws, range(draws))
    expected = naive_probabilities(logits[0], params)
    assert set(tokens) <= set(expected)
    # Cells with few expected draws are joined, as a chi-square test wants it.
    rare = [i for i, p in expected.items() if p * draws < 8]
    cells = [([i], p) for i, p in expected.items() if i not in rare] + [(rare, sum(expected[i] for i in rare))]
    counts = np.bincount(tokens, minlength=VOCAB)
    chi = sum((counts[ids].sum() - p * draws) ** 2 / (p * draws) for ids, p in cells if p > 0)
    degrees = len(cells) - 1
    assert chi < degrees + 4 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("vocab", [50, 5000])
def test_filters_keep_what_the_naive_version_keeps(vocab):
    cases = [SamplingParams(**fields) for fields in FILTERS if "temperature" not in fields and "min_p" not in fields]
    cases += [SamplingParams(top_k=3, top_p=0.4), SamplingParams(top_p=0.99), SamplingParams(top_p=1e-6)]
    cases += [SamplingParams(top_k=2000, top_p=0.97), SamplingParams(top_k=1)]
    logits = random_logits(len(cases), vocab, seed=4)
    top_k = torch.tensor([vocab if case.top_k < 1 else min(case.top_k, vocab) for case in cases])
    top_p = torch.tensor([case.top_p for case in cases])
    together = top_k_top_p.apply_top_k_top_p(logits, top_k, top_p, int(top_k.max()))
    for row, case in enumerate(cases):
        kept = set(torch.isfinite(together[row]).nonzero().flatten().tolist())
        assert kept == set(naive_probabilities(logits[row], case))
        alone = top_k_top_p.apply_top_k_top_p(
            logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1], int(top_k[row])
        )
        assert torch.equal(alone[0], together[row])


def test_a_long_top_k_with_a_short_nucleus():
    logits = random_logits(2, 5000, seed=6)
    params = [SamplingParams(top_k=2000, top_p=0.97), SamplingParams(top_p=0.3)]
    found = top_k_top_p.apply_top_k_top_p(logits, torch.tensor([2000, 5000]), torch.tensor([0.97, 0.3]), 5000)
    for row, case in enumerate(params):
        kept = set(torch.isfinite(found[row]).nonzero().flatten().tolist())
        assert kept == set(naive_probabilities(logits[row], case))


def test_tokens_as_likely_as_the_last_stay_in():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = top_k_top_p.apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([1.0]), 2)
    assert torch.isfinite(kept).tolist() == [[False, True, True, True, False]]


def test_seeds_repeat_whatever_else_is_in_the_batch():
    params = [SamplingParams(seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(6)]
    logits = random_logits(6)
    sampler = make_sampler(*params)
    together = sample(sampler, logits, positions=[9] * 6)
    backwards = sample(sampler, logits.flip(0), [5, 4, 3, 2, 1, 0], [9] * 6)
    assert backwards == together[::-1]
    for row in range(6):
        alone = make_sampler(params[row])
        assert sample(alone, logits[row : row + 1], positions=[9]) == [together[row]]


def test_uniforms_differ_by_seed_and_position():
    seeds = torch.arange(100).repeat_interleave(100)
    positions = torch.arange(100).repeat(100)
    numbers = uniform(seeds, positions)
    assert len(numbers.unique()) == 10_000
    assert 0.0 <= float(numbers.min()) <= float(numbers.max()) < 1.0
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    histogram = np.histogram(numbers.numpy(), bins=20, range=(0, 1))[0]
    assert ((histogram - 500) ** 2 / 500).sum() < 50


def test_uniform_is_this_function_and_no_other():
    """Tapes and tests on other machines rely on the exact numbers; Python's integers are the reference."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (1, 7), (-5, 100), (2**63 + 17, 3), (2**70 + 1, 2**31 - 1)]:
        state = mix((mix((seed + golden) % 2**64) + position * golden) % 2**64)
        found = uniform(torch.tensor([signed_seed(seed)]), torch.tensor([position]))
        assert float(found[0]) == (state >> 16) * 2.0**-48


def test_greedy_and_drawn_rows_share_a_batch():
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(top_k=1), SamplingParams(seed=4)]
    logits = random_logits(4, seed=8)
    tokens = sample(make_sampler(*params), logits)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())
    assert tokens[1] == sample(make_sampler(params[1]), logits[1:2])[0]


def naive_penalties(logits, params, prompt, output):
    found = logits.clone()
    for token in set(prompt) | set(output):
        found[token] = (
            found[token] / params.repetition_penalty if found[token] > 0 else (found[token] * params.repetition_penalty)
        )
    for token in set(output):
        found[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return found


def test_penalties_follow_the_tokens_sampled_so_far():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7)
    plain = SamplingParams(temperature=0.0)
    prompt, output = [5, 6, 7, 7], [8, 9, 8]
    sampler = make_sampler(plain, params, known=prompt + output, prompt_tokens=len(prompt))
    logits = random_logits(1, seed=5, scale=0.5)[0].abs()
    for _ in range(25):
        expected = int(naive_penalties(logits, params, prompt, output).argmax())
        tokens = sample(sampler, torch.stack((logits, logits)))
        assert tokens == [int(logits.argmax()), expected]
        output.append(expected)
    assert len(set(output)) > 5


def test_a_reused_row_has_no_penalties():
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    sampler = make_sampler(params)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 1.5, 1.0
    assert sample(sampler, logits) + sample(sampler, logits) == [4, 9]
    sampler.take([RowStart(0, params, np.array([1], dtype=np.int32), 1)])
    assert sample(sampler, logits) == [4]
    sampler.take([RowStart(0, SamplingParams(temperature=0.0), np.array([1], dtype=np.int32), 1)])
    assert sample(sampler, logits) + sample(sampler, logits) == [4, 4]


def test_many_rows_with_penalties():
    params = [SamplingParams(temperature=0.0, presence_penalty=float(row % 3)) for row in range(30)]
    sampler = make_sampler(*params)
    logits = torch.zeros(30, VOCAB)
    logits[:, 4], logits[:, 9] = 0.5, 0.1
    assert sample(sampler, logits) == [4] * 30
    assert sample(sampler, logits) == [4 if row % 3 == 0 else 9 for row in range(30)]


def test_logit_bias_moves_tokens():
    params = [
        SamplingParams(temperature=0.0, logit_bias={7: 50.0, 9999: 3.0}),
        SamplingParams(temperature=0.0, logit_bias={7: -100.0, 8: 1.0}),
        SamplingParams(temperature=0.0),
    ]
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 5.0
    logits[0, 7] = -20.0
    assert sample(make_sampler(*params), logits) == [7, 8, 7]


def test_an_answer_does_not_end_before_min_new_tokens():
    logits = torch.zeros(3, VOCAB)
    logits[:, 2], logits[:, 3], logits[:, 4] = 9.0, 8.0, 7.0
    params = [
        SamplingParams(temperature=0.0, min_new_tokens=2, stop_token_ids=[3], logit_bias={3: 5.0, 2: 1.0}),
        SamplingParams(temperature=0.0, min_new_tokens=2, ignore_eos=True, stop_token_ids=[3]),
        SamplingParams(temperature=0.0, min_new_tokens=2),
    ]
    sampler = make_sampler(*params)
    assert sample(sampler, logits, positions=[3, 3, 3]) == [4, 2, 3]
    assert sample(sampler, logits, positions=[4, 4, 4]) == [4, 2, 3]
    assert sample(sampler, logits, positions=[5, 5, 5]) == [3, 2, 2]


def test_rows_of_nan_stay_inside_the_vocabulary():
    logits = random_logits(2)
    logits[0] = float("nan")
    params = [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=2)]
    tokens = sample(make_sampler(*params), logits)
    assert 0 <= tokens[0] < VOCAB
    assert tokens[1] == sample(make_sampler(*params), random_logits(2))[1]


@pytest.mark.part(4)
@pytest.mark.parametrize("fields", [*FILTERS, {"temperature": 1e-5}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 4999}])
@pytest.mark.parametrize("vocab", [5000, 1 << 15])
def test_all_draw_the_same_tokens(fields, vocab):
    params = [SamplingParams(seed=seed, **fields) for seed in range(6)]
    logits = random_logits(6, vocab, seed=9)
    logits[1, 100:] = -math.inf
    logits[2] = 0.0
    logits[3, ::2] = logits[3, 1::2]
    sampler = make_sampler(*params, vocab=vocab)
    expected = Sampler(6, vocab, EOS, torch.device(DEVICE))
    expected.take([RowStart(row, one, np.array([5, 6, 7], np.int32), 3) for row, one in enumerate(params)])
    for position in range(3, 5 if slowly else 13):
        assert sample(sampler, logits, positions=[position] * 6) == sample(expected, logits, positions=[position] * 6)


def test_a_token_without_a_chance_is_never_drawn():
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [11, 12]] = torch.tensor([0.0, 1.0])
    sampler = make_sampler(SamplingParams(seed=3))
    assert {sample(sampler, logits, positions=[position])[0] for position in range(20 if slowly else 200)} == {11, 12}
