"""On a GPU a step only queues work: nothing in it waits for the device, and nothing mixes devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.crowded_yard import yard_of
from tests.executor.lora_maker import save_adapter
from tests.executor.meta_device import GPU, UPLOADS, Waited, Watch, Weights, pretend_driver
from tests.executor.test_cuda_graphs import TableAttention
from tests.executor.tiny_models import prompt_of
from tokenyard.base import DRAFT, LogprobOptions, SamplingParams, WindowGroup
from tokenyard.executor.attention.hybrid import HybridAttention
from tokenyard.executor.attention.reference import GatherAttention
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.cuda_streams import to_device
from tokenyard.executor.draft_model import ModelDrafter
from tokenyard.executor.forward_batch import PageTable
from tokenyard.executor.head_drafter import HeadDrafter
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.lora_manager import LoraManager, TorchLoraPool
from tokenyard.executor.models.decoder import Decoder
from tokenyard.executor.models.eagle_head import EagleHead
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch
from tokenyard.executor.sampling.top_k_top_p import likeliest

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, seed=3),
    "filtered": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=4),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2),
    "edited": SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_new_tokens=3),
}
REPORTED = LogprobOptions(output=True, top=2, prompt_from=0)


@pytest.fixture
def driver(folder, monkeypatch, request):
    case, page_size = request.param
    return pretend_driver(monkeypatch, read_folder_config(Path(folder(case))), page_size)


CASES = pytest.mark.parametrize("driver", [("llama", 1), ("qwen3-layers", 4)], indirect=True, ids=str)


@pytest.mark.part(8)
@CASES
@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", [None, REPORTED], ids=["plain", "logprobs"])
def test_a_step_waits_for_nothing(driver, sampling, options):
    rows = [driver.start(prompt_of(length, seed=length), sampling, options) for length in (3, 120, 60)]
    late = driver.start(prompt_of(90, seed=9), sampling, options, known=prompt_of(92, seed=9))
    with Watch():
        driver.launch(*[(row, None) for row in rows])
        driver.launch(*[(row, 1) for row in rows])
        for count in (40, None):
            driver.launch((late, count), *[(row, 1) for row in rows])
        driver.launch(*[(row, 1) for row in (*rows, late)])


@CASES
def test_rows_of_all_kinds_sample_together(driver):
    rows = [driver.start(prompt_of(20, seed=5), sampling) for sampling in KINDS.values()]
    with Watch():
        driver.launch(*[(row, None) for row in rows])
        _, _, ticket = driver.launch(*[(row, 1) for row in rows], delay=True)
        driver.executor.sample(ticket)
    assert ticket.tokens.device.type == "cpu"
    assert ticket.tokens.shape == (len(KINDS),)


class Kernels:
    """A Drawer whose kernels are launched and nothing more."""

    def likeliest(self, logits):
        return torch.empty(len(logits), dtype=torch.int64, device=GPU)

    def draw(self, logits, draws):
        assert {column.device for column in (logits, draws.rows, draws.pool_rows, draws.positions)} == {GPU}
        return torch.empty_like(draws.rows)


@CASES
def test_kernels_that_choose_tokens_are_not_waited_for(driver):
    sampler = driver.executor.sampler
    sampler.sampling_backend, sampler.likeliest = Kernels(), Kernels().likeliest
    rows = [driver.start(prompt_of(20, seed=5), sampling) for sampling in KINDS.values()]
    with Watch():
        driver.launch(*[(row, None) for row in rows])
        driver.launch(*[(row, 1) for row in rows])


@pytest.mark.parametrize("plans", [False, True])
def test_a_recorded_step_waits_for_nothing(folder, monkeypatch, plans):
    config = read_folder_config(Path(folder("llama")))
    driver, played = pretend_driver(monkeypatch, config, 4), []
    executor = driver.executor
    executor.model.attention = TableAttention(executor.kv_pool, executor.pages, executor.model.attention_spec)

    def record(work):
        work()
        return lambda: played.append(work())

    with torch.inference_mode():
        inputs = PlanInputs(executor.pages, executor.future, likeliest, prepare_by_torch) if plans else None
        executor.model = CudaGraphRunner(executor.model, config, 4, GPU, record, plans=inputs)
    rows = [driver.start(prompt_of(20, seed=5), sampling) for sampling in KINDS.values()][:3]
    for row in rows:
        # As if their prompts were computed: all rows decode.
        row.planned = row.total - 1
    with Watch():
        driver.launch(*[(row, 1) for row in rows])
        driver.launch(*[(row, 1) for row in rows])
    assert len(played) == 2


def test_a_recorded_step_with_a_chunk_waits_for_nothing(folder, monkeypatch):
    config = read_folder_config(Path(folder("llama")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor = driver.executor
    executor.model.attention = TableAttention(executor.kv_pool, executor.pages, executor.model.attention_spec)
    played = []

    def record(work):
        work()
        return lambda: played.append(work())

    with torch.inference_mode():
        executor.model = CudaGraphRunner(executor.model, config, 1, GPU, record, max_tokens=32)
    rows = [driver.start(prompt_of(20, seed=5), sampling) for sampling in KINDS.values()][:3]
    with Watch():
        driver.launch((rows[0], None))
        driver.launch((rows[0], 1), (rows[1], 11), (rows[2], 5))
    assert len(played) == 2


def test_recurrent_states_are_not_waited_for(folder, monkeypatch):
    """Neither those that rows continue, nor their copies from and to checkpoints, in a recorded step either."""
    config = read_folder_config(Path(folder("qwen3.5")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor = driver.executor
    executor.model.attention = TableAttention(executor.kv_pool, executor.pages, executor.model.attention_spec)
    rows = [driver.start(prompt_of(length, seed=length)) for length in (9, 70, 1)]
    for recorded in (False, True):
        if recorded:
            record, states = (lambda work: work() or work), executor.states
            with torch.inference_mode():
                executor.model = CudaGraphRunner(executor.model, config, 4, GPU, record, states=states)
        with Watch():
            driver.launch(*[(row, None) for row in rows])
            plan = driver.plan([(row, 1) for row in rows])
            checkpoint = executor.info.max_pool_rows
            plan.state_copies = np.array([[checkpoint, rows[1].row]])
            plan.state_saves = np.array([[rows[0].row, 10, checkpoint + 1]])
            executor.launch(plan)
        for row in rows:
            row.planned, row.sent = 0, False


def test_a_recorded_greedy_step_is_one_upload(folder, monkeypatch):
    """With the writes of its pages, from the plan to the tokens on their way to the host."""
    config = read_folder_config(Path(folder("llama")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor, uploads = driver.executor, []
    executor.model.attention = TableAttention(executor.kv_pool, executor.pages, executor.model.attention_spec)
    with torch.inference_mode():
        inputs = PlanInputs(executor.pages, executor.future, likeliest, prepare_by_torch)
        executor.model = CudaGraphRunner(
            executor.model, config, 4, GPU, lambda work: work() or (lambda: None), plans=inputs
        )
    rows = [driver.start(prompt_of(20, seed=seed)) for seed in range(3)]
    for row in rows:
        row.planned = row.total - 1
    pin = torch.Tensor.pin_memory
    with Watch():
        driver.launch(*[(row, 1) for row in rows])
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: uploads.append(host) or pin(host))
        _, _, ticket = driver.launch(*[(row, 1) for row in rows])
    assert len(uploads) == 1
    assert ticket.tokens.shape == (3,)


def test_adapters_are_not_waited_for(folder, monkeypatch, tmp_path):
    """Neither their rows nor their way to the device: a mix of them in a product, and each in one of its own."""
    config = read_folder_config(Path(folder("llama")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor = driver.executor
    with torch.inference_mode():
        slots = TorchLoraPool(executor.model.decoder, config, 3, 8, GPU, torch.bfloat16)
    executor.adapters = LoraManager(config, slots, 3, 8, executor.info.max_pool_rows)
    for number in (1, 2):
        executor.load_adapter(f"a{number}", save_adapter(tmp_path / str(number), "llama", rank=4, seed=number))
    with Watch():
        rows = [driver.start(prompt_of(70, seed=slot), adapter=(f"a{slot}" if slot else "", slot)) for slot in range(3)]
        driver.launch(*[(row, None) for row in rows])
        driver.launch(*[(row, 1) for row in rows])


def drafter_of(executor, config, kind):
    """A drafter on the pretended device: the model itself, or a head of one layer."""
    info, pages = executor.info, executor.pages
    if kind == "head":
        config = replace(config, num_layers=1, windows=(0,), has_embedding=False, has_lm_head=False)
    pool = KvPool(config, info.num_pages, info.page_size, GPU, torch.bfloat16)
    layers = Decoder(config, Weights(), GPU, config.context_length)
    model = TorchModel(layers, GatherAttention(pool, pages, layers.attention_spec))
    if kind == "model":
        return ModelDrafter(3, model, pool, pages, executor.sampler.guess)
    head = EagleHead(executor.model.decoder, layers, Weights(), bias=False)
    return HeadDrafter(3, head, model, pool, pages, executor.sampler.guess)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_drafts_are_waited_for_once_a_step(folder, monkeypatch, kind):
    """For all drafts of all rows together, as they come to the host."""
    config = read_folder_config(Path(folder("llama")))
    driver = pretend_driver(monkeypatch, config, 4)
    with torch.inference_mode():
        drafter = driver.executor.drafter = drafter_of(driver.executor, config, kind)
    rows = [driver.start(prompt_of(9, seed=seed)) for seed in range(2)]
    with Watch():
        driver.step(*[(row, None) for row in rows])
    for row in drafter.rows.values():
        # The host waits once a row for what the draft model has already seen of it.
        row.seen = 0
    plan = driver.plan([(row, 1) for row in rows])
    plan.counts, plan.samples = np.array([[4, 3], [4, 3]], np.int32)
    plan.decode_rows, plan.verify_rows = 0, 2
    plan.tokens = np.array([0, DRAFT, DRAFT, DRAFT, 0, DRAFT, DRAFT], np.int32)
    with Watch(), torch.inference_mode(), pytest.raises(Waited, match=r"blocking copy of \(2, 3\) from meta to cpu"):
        drafter.fill_in(plan)


@CASES
def test_vectors_of_prompts_are_not_waited_for(driver):
    rows = [driver.start(prompt_of(20, seed=seed)) for seed in range(2)]
    with Watch():
        for counts in ((12, 20), (8,)):
            plan = driver.plan(list(zip(rows, counts, strict=False)))
            for start, pooling in zip(plan.row_starts, ("mean", "last"), strict=False):
                start.pooling = pooling
            ticket = driver.executor.launch(plan)
            assert len(ticket.vectors) == 1


def test_layers_with_a_window_are_not_waited_for(folder, monkeypatch):
    """In a pool of their own, whose pages rows take and release as they go."""
    config = read_folder_config(Path(folder("gemma2")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor, group = driver.executor, WindowGroup(max(config.windows), 40)
    executor.kv_pool = KvPool(config, executor.info.num_pages, 4, GPU, torch.bfloat16, group)
    executor.pages = PageTable(executor.info.max_pool_rows, config.context_length, 4, GPU, windows=True)
    spec = executor.model.attention_spec
    executor.model.attention = HybridAttention(GatherAttention, executor.kv_pool, executor.pages, spec)
    executor.info = replace(executor.info, windows=group, eos_token_ids=())
    yard = yard_of(executor)
    number = yard.submit(prompt_of(30, seed=1), max_new=2)
    with Watch():
        yard.run()
    assert len(yard.tokens[number]) == 2


@CASES
def test_the_watch_sees_what_waits(driver):
    numbers = np.arange(4)
    with Watch():
        on_device = to_device(numbers, GPU)
        with pytest.raises(Waited, match="blocking"):
            torch.from_numpy(numbers).to(GPU)
        with torch.inference_mode(), pytest.raises(Waited, match="blocking"):
            torch.from_numpy(numbers).to(GPU)
        with pytest.raises(Waited, match="waits for the step before"):
            torch.from_numpy(numbers).pin_memory().to(GPU, non_blocking=True)
        with pytest.raises(Waited, match="not pinned"), torch.cuda.stream(UPLOADS):
            torch.from_numpy(numbers).to(GPU, non_blocking=True)
        with pytest.raises(Waited, match="blocking"):
            on_device.cpu()
        with pytest.raises(Waited, match="blocking"):
            torch.tensor([1, 2], device=GPU)
        with pytest.raises(Waited, match="mixes"):
            on_device + torch.from_numpy(numbers)
        for wait in (torch.nonzero, torch.bincount, lambda t: t[0].item(), lambda t: t[t > 1], lambda t: bool(t.any())):
            with pytest.raises((RuntimeError, NotImplementedError)):
                wait(on_device)
