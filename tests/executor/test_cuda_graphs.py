"""Recorded decode steps: their sizes, how batches are filled up, and that answers stay those of plain steps.

There is no GPU here, so a recorder keeps the calls of the work and makes them again on the same memory.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.call_tape import CallTape, capture
from tests.executor.driver import GREEDY
from tests.executor.tiny_models import greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import ConfigError, SamplingParams, SchedulerSettings
from tokenyard.executor.cuda_devices import choose_device
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner, capture_batch_sizes, capture_buckets, why_not
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch

CPU = torch.device("cpu")


def likeliest(logits):
    """As on a device; on a CPU numpy chooses, of which a tape knows nothing."""
    return logits.argmax(dim=-1)


class TableAttention:
    """Attends with data on the device alone, as recorded attention must: all columns of the table, then a mask."""

    def __init__(self, pool, pages, spec):
        self.pool, self.pages, self.spec = pool, pages, spec

    def prepare(self, batch):
        # Lengths on the host are those of the recording and must not be read.
        batch.starts = None

    def plan_bucket(self, batch, bucket):
        """Tokens say whose they are."""

    def forward(self, layer, q, k, v, batch):
        keys, values = self.pool.layer(layer)
        keys[batch.slots], values[batch.slots] = k, v
        every = torch.arange(self.pages.tensor.shape[1] * self.pages.page_size, device=q.device)
        slots = self.pages.slots(batch.pool_rows[:, None], every).long()
        group = q.shape[1] // keys.shape[1]
        own_k, own_v = (side[slots].repeat_interleave(group, dim=2) for side in (keys, values))
        scores = torch.einsum("thd,tnhd->thn", q, own_k) * self.spec.scale
        hidden = every > batch.positions[:, None]
        if self.spec.windows[layer]:
            hidden |= every <= batch.positions[:, None] - self.spec.windows[layer]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return torch.einsum("thn,tnhd->thd", weights, own_v).flatten(1)


class Player:
    """A Recorder that counts: `played` lists the sizes in the order that they were played.

    record: runs work and returns what makes it again.
    """

    def __init__(self, record=capture):
        self.record, self.recorded, self.played = record, [], []

    def __call__(self, work):
        number, again = len(self.recorded), self.record(work)
        self.recorded.append(work)

        def play():
            self.played.append(number)
            again()

        return play


@pytest.fixture
def recorded(folder, make_driver):
    """Make a driver whose decode steps of up to `largest` rows are recorded, and what plays them. plans: whether they
    begin with a plan and end with tokens. aux: layers that a draft head reads. max_tokens: of other steps that are
    recorded.
    """

    def make(case, largest, page_size, *, plans=False, aux=(), max_tokens=0, **options):
        driver = make_driver(case, page_size=page_size, **options)
        executor, player = driver.executor, Player()
        model = executor.model
        model.decoder.aux_layers = aux
        model.attention = TableAttention(executor.kv_pool, executor.pages, model.attention_spec)
        config = read_folder_config(Path(folder(case)))
        with torch.inference_mode():
            inputs = PlanInputs(executor.pages, executor.future, likeliest, prepare_by_torch) if plans else None
            executor.model = CudaGraphRunner(model, config, largest, CPU, player, plans=inputs, max_tokens=max_tokens)
        return driver, player

    return make


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize(("case", "page_size"), [("llama", 1), ("qwen3-layers", 4)])
def test_recorded_steps_answer_as_transformers_do(recorded, case, page_size, plans):
    driver, player = recorded(case, 4, page_size, plans=plans)
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 21, 30, 9)]
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step(*[(row, None) for row in rows])
    assert not player.played
    # Sizes are recorded from large to small: 4, 2, 1. Five rows are too many; three are filled up to four.
    for count, number in ((5, None), (4, 0), (3, 0), (1, 2), (2, 1), (3, 0)):
        played = len(player.played)
        driver.step(*[(row, 1) for row in rows[:count]])
        assert player.played[played:] == ([] if number is None else [number])
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.output == greedy(case, prompt, len(row.output))


def test_recorded_steps_leave_what_a_draft_head_reads(recorded, make_driver):
    found, aux = [], (0, 2)
    plain = make_driver("llama")
    plain.executor.model.decoder.aux_layers = aux
    for driver in (recorded("llama", 4, 1, aux=aux)[0], plain):
        rows = [driver.start(prompt_of(9, seed=seed)) for seed in range(3)]
        for count in (None, 1, 1):
            driver.step(*[(row, count) for row in rows])
            found.append(driver.executor.model.aux_hidden(0, 3).clone())
    assert found[2].shape == (3, 2 * 48)
    for one, other in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


KINDS = {
    "greedy": GREEDY,
    "random": SamplingParams(temperature=1.0, seed=3),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    "edited": SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_new_tokens=30),
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("delay", [False, True])
def test_steps_from_plan_to_tokens_sample_as_others_do(recorded, make_driver, page_size, delay):
    """Rows of all kinds, alone and together, with two steps in flight: the tokens of a captured step are kept where all
    of its rows are greedy, and else they are sampled, and the next step reads those.
    """
    outputs = []
    for driver in (recorded("llama", 4, page_size, plans=True)[0], make_driver("llama", page_size=page_size)):
        rows = [driver.start(prompt_of(9, seed=seed), kind) for seed, kind in enumerate(KINDS.values())]
        driver.step(*[(row, None) for row in rows])
        for chosen in (rows, rows[:1], rows[1:2], rows[:1], rows[2:], rows):
            flying = [driver.launch(*[(row, 1) for row in chosen], delay=delay)]
            if delay:
                driver.executor.sample(flying[0][2])
            flying.append(driver.launch(*[(row, 1) for row in chosen]))
            for launched in flying:
                driver.collect(launched)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


def test_a_row_that_fills_up_a_step_takes_no_other_rows_token(recorded):
    driver, player = recorded("llama", 4, 1, plans=True)
    rows = [driver.start(prompt_of(5, seed=seed)) for seed in range(8)]
    driver.step(*[(row, None) for row in rows])
    before = driver.executor.future.last_tokens.clone()
    driver.step(*[(row, 1) for row in rows[:3]])
    assert player.played == [0]
    own = [row.row for row in rows[:3]]
    after = driver.executor.future.last_tokens
    assert after[own].tolist() == [row.known[-1] for row in rows[:3]]
    others = [row.row for row in rows[3:]]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("plans", [False, True])
def test_filled_up_rows_touch_nothing_but_page_0(recorded, plans):
    driver, player = recorded("llama", 4, 4, plans=plans)
    pool = driver.executor.kv_pool.tensor
    rows = [driver.start(prompt_of(5, seed=seed)) for seed in range(4)]
    driver.step(*[(row, None) for row in rows])
    driver.step(*[(row, 1) for row in rows])
    before = pool.clone()
    driver.step(*[(row, 1) for row in rows[1:]])
    assert player.played == [0, 0]
    changed = (pool != before).flatten(3).any(3).any(0).any(0)
    owned = {row.pages[position // 4] * 4 + position % 4 for row in rows[1:] for position in (row.planned - 1,)}
    assert set(changed.nonzero().flatten().tolist()) <= {0, *owned}
    assert owned <= set(changed.nonzero().flatten().tolist())


@pytest.mark.parametrize(("case", "page_size"), [("llama", 1), ("qwen3-layers", 4)])
def test_steps_of_rows_of_all_kinds_answer_as_transformers_do(recorded, case, page_size):
    """Chunks alone and with decodes, and more decodes than a decode step has rows, by tokens; and one too large."""
    driver, player = recorded(case, 1, page_size, plans=True, max_tokens=24)
    # Recorded are 24, 16 and 8 tokens, then the decode.
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 21, 9)]
    rows = [driver.start(prompt) for prompt in prompts]
    short, long, middle, late = rows
    for number, work in (
        (2, [(short, None)]),
        (None, [(long, 30)]),
        (1, [(long, None), (short, 1)]),
        (0, [(middle, None), (short, 1), (long, 1)]),
        (1, [(late, None), (short, 1), (long, 1)]),
        (2, [(row, 1) for row in rows]),
        (3, [(long, 1)]),
    ):
        played = len(player.played)
        driver.step(*work)
        assert player.played[played:] == ([] if number is None else [number])
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.output == greedy(case, prompt, len(row.output))


def test_drafts_are_verified_by_recorded_steps(recorded):
    driver, player = recorded("llama", 8, 4, max_tokens=64, draft_tokens=4, max_total_tokens=600)
    settings = SchedulerSettings(page_size=4, max_running_requests=8, context_length=200, chunked_prefill_size=32)
    yard = Yard(settings, replace(driver.info, eos_token_ids=()), executor=driver.executor)
    prompts = [prompt_of(20 + index, seed=index) for index in range(4)]
    # All right but for every fourth, so that some are refused.
    predictions = [np.array(greedy("llama", prompt, 16), np.int32) for prompt in prompts]
    for prediction in predictions:
        prediction[3::4] = 3
    pairs = zip(prompts, predictions, strict=True)
    numbers = [yard.submit(prompt, max_new=16, prediction=prediction) for prompt, prediction in pairs]
    yard.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy("llama", prompt, 16)
    counters = yard.scheduler.snapshot(0).counters
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
    buckets = len(capture_buckets(64))
    assert [number for number in player.played if number < buckets]


def test_tokens_that_fill_up_a_step_touch_nothing_but_page_0(recorded):
    driver, player = recorded("llama", 1, 4, max_tokens=16)
    pool = driver.executor.kv_pool.tensor
    first, second = (driver.start(prompt_of(9, seed=seed)) for seed in range(2))
    driver.step((first, None))
    before = pool.clone()
    driver.step((second, 5), (first, 1))
    assert player.played == [0, 1]
    changed = (pool != before).flatten(3).any(3).any(0).any(0)
    owned = {second.pages[position // 4] * 4 + position % 4 for position in range(5)} | {first.pages[2] * 4 + 1}
    assert owned <= set(changed.nonzero().flatten().tolist()) <= {0, *owned}


def test_a_step_with_a_chunk_is_computed_eagerly(recorded):
    driver, player = recorded("llama", 4, 1)
    row, late = driver.start(prompt_of(8, seed=1)), driver.start(prompt_of(20, seed=2))
    driver.step((row, None))
    driver.step((row, 1), (late, 7))
    assert not player.played
    driver.step((row, 1))
    assert len(player.played) == 1


def test_hidden_states_and_logits_of_a_played_step(recorded, make_driver):
    driver, player = recorded("llama", 2, 1)
    plain = make_driver("llama")
    for each in (driver, plain):
        row = each.start(prompt_of(8, seed=1))
        each.step((row, None))
        each.step((row, 1))
    assert player.played == [1]
    for name in ("logits", "hidden"):
        with torch.inference_mode():
            found, expected = (getattr(each.executor.model, name)(0, 1) for each in (driver, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 60, 64, 100, 256, 300, 512])
def test_sizes_rise_to_the_largest_and_waste_little(largest):
    sizes = capture_batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for rows in range(4, largest + 1):
        size = next(size for size in sizes if size >= rows)
        assert (size - rows) / size < (0.2 if rows >= 40 else 0.5)
    assert len(sizes) < 40


def test_no_memory_says_what_to_lower(make_driver, folder):
    driver = make_driver("llama")

    def record(work):
        raise torch.OutOfMemoryError

    config = read_folder_config(Path(folder("llama")))
    with pytest.raises(ConfigError, match="lower --cuda-graph-max-bs"):
        CudaGraphRunner(driver.executor.model, config, 2, CPU, record)


def test_why_steps_are_not_recorded(folder, monkeypatch):
    config, experts = (read_folder_config(Path(folder(case))) for case in ("llama", "qwen3-moe"))
    cuda, half = torch.device("cuda:0"), torch.bfloat16
    plain = {"capturable": True, "divided": False, "adapters": False}
    assert not why_not(config, cuda, half, **plain)
    assert "CUDA" in why_not(config, choose_device("cpu"), half, **plain)
    for capability, kind, reason in (((8, 0), half, "9.x"), ((9, 0), torch.float16, "bfloat16"), ((9, 0), half, "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert reason in why_not(experts, cuda, kind, **plain)
        assert bool(reason) == bool(why_not(experts, cuda, kind, **plain))
    for name, word in (("capturable", "attention"), ("divided", "ranks"), ("adapters", "adapters")):
        assert word in why_not(config, cuda, half, **{**plain, name: not plain[name]})


def test_what_the_host_decides_while_it_records_stays_so():
    out, counts = torch.zeros(2), [1.0]

    def work():
        found = out + counts[0]
        out.copy_(found if counts[0] < 2 else found * 10)

    play = capture(work)
    assert out.tolist() == [2.0, 2.0]
    counts[0] = 7.0
    out.zero_()
    play()
    assert out.tolist() == [1.0, 1.0]


def test_a_tape_has_no_views():
    x, out = torch.ones(2, 3), torch.zeros(3, 2)
    tape = CallTape(lambda: out.copy_(x.t()[:, :2].reshape(3, 2) + 1.0))
    assert len(tape.calls) == 2
