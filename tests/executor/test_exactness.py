"""Greedy output is that of transformers, whatever the plan."""

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import CASES, DEVICE, greedy, logits, prompt_of
from tokenyard.executor.attention.torch_native import MatmulAttention, SdpaAttention

TOKENS = 10


@pytest.mark.part(6)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(make_driver, backend, case, page_size):
    driver = make_driver(case, page_size=page_size, **backend)
    prompt = prompt_of(37, seed=1)
    expected = greedy(case, prompt, TOKENS)
    assert driver.generate(driver.start(prompt), TOKENS) == expected
    assert driver.generate(driver.start(prompt), TOKENS, chunk=16) == expected


@pytest.mark.parametrize("case", CASES)
def test_logits_are_close_to_those_of_transformers(make_driver, backend, case):
    driver = make_driver(case, page_size=4, **backend)
    prompt = prompt_of(41, seed=2)
    plan, _, ticket = driver.launch((driver.start(prompt), 23), delay=True)
    assert ticket.logits is None
    assert not plan.sampled.any()
    sequence = driver.start(prompt)
    driver.step((sequence, 23))
    _, _, ticket = driver.launch((sequence, None), delay=True)
    torch.testing.assert_close(ticket.logits[0].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["llama", "qwen3-layers"])
def test_rows_sample_at_several_positions(make_driver, backend, case):
    # What a row with drafts to verify asks for, next to a decode and a chunk that samples once or not at all.
    driver = make_driver(case, page_size=4, **backend)
    prompts = {4: prompt_of(40, seed=3), 1: prompt_of(23, seed=4), 0: prompt_of(50, seed=5), 2: prompt_of(9, seed=6)}
    rows = {samples: driver.start(prompt) for samples, prompt in prompts.items()}
    for samples in (4, 1):
        driver.step((rows[samples], len(prompts[samples]) - max(samples, 1)))
    work = [(rows[1], 1), (rows[4], 4), (rows[0], 30), (rows[2], 9)]
    plan = driver.plan(work)
    plan.samples = np.array([1, 4, 0, 2], dtype=np.int32)
    plan.delay_sampling = True
    ticket = driver.executor.launch(plan)
    expected = torch.cat([logits(case, prompts[samples])[-samples:] for samples in (1, 4, 2)])
    torch.testing.assert_close(ticket.logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    driver.executor.sample(ticket)
    assert torch.equal(ticket.tokens.cpu(), expected.argmax(-1))


@pytest.mark.parametrize("attend", [SdpaAttention, MatmulAttention])
@pytest.mark.parametrize("case", ["llama-odd", "mistral-window", "qwen3-layers"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_unlike_length_decode_together_with_chunks(make_driver, monkeypatch, attend, case, page_size):
    monkeypatch.setattr(
        "tokenyard.executor.attention.reference.choose_torch_attention", lambda device, spec: attend(spec)
    )
    run_chunks_with_decodes(make_driver(case, page_size=page_size), case)


@pytest.mark.parametrize("case", ["llama-odd", "mistral-window", "qwen3-layers"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_back_end_computes_them(make_driver, backend, case, page_size):
    run_chunks_with_decodes(make_driver(case, page_size=page_size, **backend), case)


def run_chunks_with_decodes(driver, case):
    prompts = [prompt_of(length, seed=length) for length in (3, 120, 45, 46)]
    late = prompt_of(33, seed=9)
    sequences = [driver.start(prompt) for prompt in prompts]
    driver.step(*[(sequence, None) for sequence in sequences])
    sequences.append(driver.start(late))
    for count in (16, 16, 1):
        driver.step((sequences[-1], count), *[(sequence, 1) for sequence in sequences[:-1]])
    while len(sequences[-1].output) < 4:
        driver.step(*[(sequence, 1) for sequence in sequences])
    for prompt, sequence in zip([*prompts, late], sequences, strict=True):
        assert sequence.output == greedy(case, prompt, len(sequence.output), sequence.output)


@pytest.mark.part(2)
@pytest.mark.parametrize("case", ["llama", "llama-odd", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("chunk", [None, 50, 70, 3])
def test_long_prompts_in_chunks_of_any_size(make_driver, backend, case, chunk):
    driver = make_driver(case, page_size=4, **backend)
    prompt = prompt_of(150, seed=3)
    assert driver.generate(driver.start(prompt), 2, chunk=chunk) == greedy(case, prompt, 2)


@pytest.mark.parametrize("attend", [SdpaAttention, MatmulAttention])
@pytest.mark.parametrize("case", ["llama", "llama-odd", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("chunk", [None, 50, 70])
def test_long_chunks_attend_in_blocks(make_driver, monkeypatch, attend, case, chunk):
    monkeypatch.setattr("tokenyard.executor.attention.reference.MASK_ELEMENTS", 4000)
    monkeypatch.setattr(MatmulAttention, "key_multiple", 24)
    monkeypatch.setattr(
        "tokenyard.executor.attention.reference.choose_torch_attention", lambda device, spec: attend(spec)
    )
    driver = make_driver(case, page_size=4)
    prompt = prompt_of(150, seed=3)
    assert driver.generate(driver.start(prompt), 2, chunk=chunk) == greedy(case, prompt, 2)


def test_what_a_decode_gathers_is_bounded_and_grows_seldom(make_driver, monkeypatch):
    # A token's keys and values in one layer of the tiny llama take 192 bytes.
    monkeypatch.setattr("tokenyard.executor.attention.reference.GATHER_BYTES", 192 * 150)
    driver = make_driver("llama")
    prompts = [prompt_of(length, seed=length) for length in (30, 33, 34, 41, 70)]
    sequences = [driver.start(prompt) for prompt in prompts]
    for sequence in sequences:
        driver.prefill(sequence)
    spaces = set()
    for _ in range(8):
        driver.step(*[(sequence, 1) for sequence in sequences])
        spaces.add(driver.executor.model.attention.workspace.data_ptr())
    assert [sequence.output for sequence in sequences] == [greedy("llama", prompt, 9) for prompt in prompts]
    assert driver.executor.model.attention.workspace.nbytes <= 1.25 * 192 * 150
    assert len(spaces) <= 2


def test_on_a_cpu_keys_attend_in_whole_blocks(make_driver, monkeypatch):
    # A kernel is made for each shape: one more key at every step would make one at every step.
    shapes = set()

    class Watched(MatmulAttention):
        def decode(self, layer, q, k, v, mask):
            shapes.add(k.shape)
            return super().decode(layer, q, k, v, mask)

        def chunk(self, layer, q, k, v, start, mask):
            assert k.shape[1] % self.key_multiple == 0
            return super().chunk(layer, q, k, v, start, mask)

    monkeypatch.setattr(
        "tokenyard.executor.attention.reference.choose_torch_attention", lambda device, spec: Watched(spec)
    )
    driver = make_driver("llama")
    prompt = prompt_of(50, seed=1)
    assert driver.generate(driver.start(prompt), 20, chunk=30) == greedy("llama", prompt, 20)
    assert {shape[2] for shape in shapes} == {64, 128}


def test_a_retracted_row_is_resumed(make_driver, backend):
    driver = make_driver("qwen2", page_size=4, **backend)
    prompt, other = prompt_of(30, seed=4), prompt_of(50, seed=5)
    expected = greedy("qwen2", prompt, 12)
    sequence = driver.start(prompt)
    driver.generate(sequence, 5)
    again = driver.retract(sequence)
    assert driver.generate(driver.start(other), 6) == greedy("qwen2", other, 6)
    resumed = driver.start(**again)
    assert driver.generate(resumed, 12, chunk=16) == expected


@pytest.mark.parametrize("page_size", [1, 8])
def test_rows_share_pages(make_driver, backend, page_size):
    driver = make_driver("mistral-window", page_size=page_size, **backend)
    prefix = prompt_of(24, seed=6)
    first, second = prefix + prompt_of(9, seed=7), prefix + prompt_of(13, seed=8)
    owner = driver.start(first)
    driver.prefill(owner)
    guest = driver.start(second, shared_with=owner, shared_tokens=24)
    driver.prefill(guest)
    for _ in range(5):
        driver.step((owner, 1), (guest, 1))
    assert owner.output == greedy("mistral-window", first, 6, owner.output)
    assert guest.output == greedy("mistral-window", second, 6, guest.output)


def test_steps_in_flight_read_each_others_tokens(make_driver, backend):
    driver = make_driver("qwen3", page_size=4, **backend)
    prompts = [prompt_of(20, seed=10), prompt_of(31, seed=11)]
    sequences = [driver.start(prompt) for prompt in prompts]
    flying = [driver.launch(*[(sequence, None) for sequence in sequences])]
    for _ in range(6):
        flying.append(driver.launch(*[(sequence, 1) for sequence in sequences]))
        driver.collect(flying.pop(0))
    driver.collect(flying.pop())
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output == greedy("qwen3", prompt, 7, sequence.output)


def test_what_a_failed_request_left_behind_reaches_no_other(make_driver, backend):
    driver = make_driver("llama", page_size=4, max_pool_rows=2, **backend)
    long, short = prompt_of(60, seed=14), prompt_of(9, seed=15)
    broken = driver.start(prompt_of(60, seed=16))
    driver.prefill(broken)
    for page in broken.pages:
        driver.executor.kv_pool.tensor[:, :, page * 4 : page * 4 + 4] = float("nan")
    driver.rows.append(broken.row)
    sequences = [driver.start(short), driver.start(long)]
    assert sequences[0].row == broken.row
    for _ in range(4):
        driver.step(*[(sequence, None) for sequence in sequences])
    assert [sequence.output for sequence in sequences] == [greedy("llama", p, 4) for p in (short, long)]


def test_a_delayed_sampling_gives_the_same_tokens(make_driver, backend):
    driver = make_driver(**backend)
    prompt = prompt_of(20, seed=12)
    sequence = driver.start(prompt)
    while len(sequence.output) < 4:
        launched = driver.launch((sequence, None), delay=True)
        driver.executor.sample(launched[2])
        driver.collect(launched)
    assert sequence.output == greedy("llama", prompt, 4, sequence.output)


def test_closing_twice_is_no_error(make_driver):
    driver = make_driver()
    driver.executor.close()
    driver.executor.close()
    assert not hasattr(driver.executor, "kv_pool")


def test_an_idle_plan_does_nothing(make_driver, backend):
    driver = make_driver(**backend)
    result = driver.step()
    assert result.tokens.tolist() == []
    assert result.logprobs == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_formats_stay_near_float32(folder, make_driver, dtype):
    from tokenyard.executor.model_loader import load_executor

    prompt = prompt_of(40, seed=13)
    driver = make_driver("qwen3")
    driver.executor = load_executor(folder("qwen3"), device=DEVICE, dtype=dtype, max_total_tokens=1024, max_pool_rows=8)
    _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
    assert ticket.logits.dtype == torch.float32
    expected = logits("qwen3", prompt)[-1]
    assert torch.cosine_similarity(ticket.logits[0].cpu(), expected, dim=0) > 0.99
