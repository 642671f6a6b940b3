"""A model in stages: one process that has all layers is the judge, bit for bit."""

import os
import shutil
import signal
from collections import defaultdict, deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import Driver
from tests.executor.test_pieces import assert_copies_serve
from tests.executor.test_tensor_parallel import OPTIONS, SERVED, assert_equal_bits, life_of_a_server, watch_logits
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError, DeviceLostError, WeightSource
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.distributed import process_watch
from tokenyard.executor.distributed.distributed_loader import load_executor as load_divided
from tokenyard.executor.distributed.pipeline import PipelineStage
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.warm_up import warm_up

TOKENS = 8


class Mail:
    """The ranks of one process, which compute one after the other."""

    def __init__(self):
        self.boxes = defaultdict(deque)

    def of(self, rank):
        return Mailbox(self.boxes, rank)


class Mailbox:
    def __init__(self, boxes, rank):
        self.boxes, self.rank = boxes, rank

    def send(self, tensor, to):
        self.boxes[self.rank, to].append(tensor.clone())

    def receive(self, memory, sender):
        found = self.boxes[sender, self.rank].popleft()
        assert (found.shape, found.dtype) == (memory.shape, memory.dtype)
        return memory.copy_(found)


class StagesInTurn:
    """The model of the last stage as executors see it."""

    def __init__(self, stages, models):
        self.stages, self.models = stages, models

    def step(self, batch):
        for stage, model in list(zip(self.stages, self.models, strict=True))[1:]:
            own = replace(batch, attention={}, token_ids=batch.token_ids.clone())
            stage.compute(model, own, [], open_tokens=False)
        self.stages[0].receive_hidden(self.models[0], batch, open_tokens=False)
        return self.models[0].step(batch)

    def logits(self, first, last):
        return self.models[0].logits(first, last)

    def hidden(self, first, last):
        return self.models[0].hidden(first, last)


class AtCollect:
    """An executor of one process that computes a step when it is collected, as the last stage of a pipeline does."""

    def __init__(self, inner):
        self.inner, self.info = inner, inner.info
        self.compile_grammar = inner.compile_grammar

    def launch(self, plan):
        return SimpleNamespace(plan=plan)

    def sample(self, ticket):
        pass

    def collect(self, ticket):
        ticket = self.inner.launch(ticket.plan)
        if ticket.plan.delay_sampling:
            self.inner.sample(ticket)
        return self.inner.collect(ticket)


def load_in_turn(path, size, **options):
    mail = Mail()
    stages = [PipelineStage(rank, size, mail.of(rank), lambda info: info) for rank in range(size)]
    parts = [load_executor(path, **options, part=stage) for stage in stages]
    for other in parts[1:]:
        other.pages.tensor, other.pages.host = parts[0].pages.tensor, parts[0].pages.host
    parts[0].model = StagesInTurn(stages, [part.model for part in parts])
    return parts[0]


@pytest.mark.parametrize(
    ("case", "size"),
    [("llama", 2), ("llama", 3), ("qwen2-window", 2), ("qwen3-moe-mixed", 2), ("gemma2", 2), ("gpt-oss", 2)],
)
def test_stages_together_are_the_model_bit_for_bit(folder, case, size):
    torch.set_num_threads(1)
    options = OPTIONS | {"max_total_tokens": 512, "max_pool_rows": 8, "page_size": 4}
    found, seen = [], []
    for executor in (
        load_in_turn(folder(case), size, **options),
        load_executor(folder(case), model_impl="torch", **options),
    ):
        seen.append(watch_logits(executor))
        driver = Driver(executor)
        sequences = [driver.start(prompt_of(length, seed=length)) for length in (5, 23, 40)]
        driver.prefill(sequences[1], chunk=7)
        driver.step((sequences[0], 5), (sequences[2], 16), (sequences[1], 1))
        found.append([driver.generate(sequence, TOKENS) for sequence in sequences])
    assert found[0] == found[1]
    assert_equal_bits(*seen)


def test_random_weights_are_those_of_the_whole_model(folder):
    options = OPTIONS | {"load_format": "dummy", "seed": 3, "max_total_tokens": 256, "max_pool_rows": 4}
    answers = []
    for executor in (
        load_in_turn(folder("llama"), 2, **options),
        load_executor(folder("llama"), model_impl="torch", **options),
    ):
        driver = Driver(executor)
        answers.append(driver.generate(driver.start(prompt_of(20, seed=1)), TOKENS))
    assert answers[0] == answers[1]


def test_more_stages_than_layers_are_refused(folder):
    with pytest.raises(ConfigError, match="--pp-size 4 is more than the model's 3 layers"):
        load_in_turn(folder("llama"), 4, **OPTIONS)


def test_native_kernels_for_whole_steps_are_refused(folder):
    with pytest.raises(ConfigError, match="cannot be used with --pp-size"):
        load_in_turn(folder("llama"), 2, **OPTIONS, model_impl="native")


@pytest.fixture(scope="module")
def stages():
    """The demo model in two stages, each a process."""
    torch.set_num_threads(1)
    executor = load_divided(str(DEMO_MODEL), pp_size=2, share_kv=True, **OPTIONS, **SERVED)
    # As on devices, where kernels compile in it.
    warm_up(executor, executor.collect)
    yield executor
    executor.close()


@pytest.mark.part(2)
@pytest.mark.parametrize("depth", [2, 3])
def test_processes_with_plans_in_flight_compute_what_one_computes(stages, depth):
    whole = load_executor(str(DEMO_MODEL), model_impl="torch", **OPTIONS, **SERVED)
    found, judged = watch_logits(stages), watch_logits(whole)
    tokens, counters = life_of_a_server(stages, depth)
    assert counters.retracted > 0
    assert counters.hit_tokens > 100
    assert life_of_a_server(AtCollect(whole), depth)[0] == tokens
    assert_equal_bits(found, judged)


@pytest.mark.slow
def test_stages_work_ahead_of_what_is_collected(stages):
    """The first stage computes the chunks of a prompt before the first of them is collected."""
    driver = Driver(stages)
    sequence = driver.start(prompt_of(24, seed=5))
    flying = [driver.launch((sequence, 8)) for _ in range(3)]
    while stages.describe_ranks()[1]["step"] < flying[-1][0].step:
        assert process_watch.state_of(stages.describe_ranks()[1]["pid"])
    assert [len(stages.collect(ticket).tokens) for _, _, ticket in flying] == [0, 0, 1]


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_all():
    executor = load_divided(str(DEMO_MODEL), pp_size=2, **OPTIONS, **SERVED)
    try:
        driver = Driver(executor)
        sequence = driver.start(prompt_of(9, seed=2))
        driver.generate(sequence, 2)
        places = executor.describe_ranks()
        assert [place["pp_rank"] for place in places] == [1, 0]
        os.kill(places[1]["pid"], signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=r"^pipeline stage 0 was killed by signal 9$"):
            driver.generate(sequence, 40)
    finally:
        executor.close()


@pytest.mark.slow
def test_kv_that_is_copied_is_as_good_as_computed(stages):
    assert_copies_serve(stages)


def test_stages_change_their_weights_from_the_same_step_on(stages, tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "new")
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    last = max(name for name in tensors if name.endswith("o_proj.weight"))
    save_file(tensors | {last: 2 * tensors[last]}, tmp_path / "new" / "model.safetensors")

    def answer(executor):
        driver = Driver(executor)
        return driver.generate(driver.start(prompt_of(20, seed=3)), TOKENS)

    before = answer(stages)
    first = stages.prepare_weights(WeightSource(str(tmp_path / "new")))
    assert answer(stages) == before, "they are only read"
    stages.swap_weights()
    options = {name: value for name, value in SERVED.items() if name != "draft_tokens"}
    whole = load_executor(str(tmp_path / "new"), model_impl="torch", **OPTIONS, **options)
    assert answer(stages) == answer(whole) != before
    save_file(tensors | {last: torch.full_like(tensors[last], torch.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(ConfigError, match="NaN"):
        stages.prepare_weights(WeightSource(files=(str(tmp_path / "nan.safetensors"),)))
    stages.drop_weights()
    assert answer(stages) == answer(whole)
    assert stages.prepare_weights(WeightSource(str(DEMO_MODEL))) != first
    stages.swap_weights()
    assert answer(stages) == before
