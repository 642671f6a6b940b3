"""Models whose layers keep a recurrent state, against transformers, under any schedule."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.crowded_yard import check_greedy_answers, yard_of
from tests.executor.driver import Driver
from tests.executor.test_cuda_graphs import Player, TableAttention
from tests.executor.tiny_models import DEVICE, STATE_CASES, greedy, logits, prompt_of
from tokenyard.base import ConfigError, LogprobOptions, SamplingParams
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.layers.delta_net import delta_chunks, delta_step
from tokenyard.executor.layers.mamba2 import ssm_chunks, ssm_step
from tokenyard.executor.layers.recurrent import causal_conv
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch

TOKENS = 9
BACKENDS = ["gather", "auto"] if DEVICE == "cpu" else ["auto"]


def load(folder, case, **options):
    sizes = {"page_size": 4, "max_total_tokens": 180, "max_pool_rows": 9, "mamba_track_interval": 8}
    return load_executor(folder(case), device=DEVICE, dtype="float32", **sizes | options)


@pytest.mark.parametrize("case", STATE_CASES)
@pytest.mark.parametrize("chunks", [(), (1, 2), (64,), (3, 64, 1), (63, 65)])
def test_logits_do_not_depend_on_where_a_prompt_is_cut(folder, case, chunks):
    driver, prompt = Driver(load(folder, case)), prompt_of(141, seed=2)
    sequence = driver.start(prompt)
    for count in chunks:
        driver.step((sequence, count))
    _, _, ticket = driver.launch((sequence, None), delay=True)
    torch.testing.assert_close(ticket.logits[0].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.part(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "depth"), [(case, 1 + place % 2) for place, case in enumerate(STATE_CASES)])
def test_greedy_tokens_are_those_of_transformers(folder, case, backend, depth):
    """Chunked, cached, retracted, paused and several at a time, with a pool that evicts."""
    yard = yard_of(load(folder, case, attention_backend=backend), max_in_flight=depth)
    counters = check_greedy_answers(yard, case, TOKENS, depth)
    assert counters.recomputed_tokens
    assert yard.scheduler.idle() is None


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3.5", {"mamba_shared_memory": True, "max_total_tokens": 300}),
        ("granite-hybrid", {}),
        ("lfm2", {"draft_tokens": 3}),
    ],
)
def test_recorded_decodes_are_those_of_transformers(folder, case, options):
    """Rows that fill up a step have the state of no row, and states are saved after it."""
    executor = load(folder, case, attention_backend="gather", **options)
    model, player = executor.model, Player()
    model.attention = TableAttention(executor.kv_pool, executor.pages, model.attention_spec)
    config = read_folder_config(Path(folder(case)))
    with torch.inference_mode():
        plans = PlanInputs(executor.pages, executor.future, lambda logits: logits.argmax(dim=-1), prepare_by_torch)
        plans = None if "draft_tokens" in options else plans
        executor.model = CudaGraphRunner(
            model, config, 4, torch.device("cpu"), player, plans=plans, states=executor.states
        )
    check_greedy_answers(yard_of(executor, max_in_flight=2), case, TOKENS, 2)
    assert len(player.played) > TOKENS


@pytest.mark.parametrize("depth", [1, 2])
def test_checkpoints_in_pages_of_the_kv_pool(folder, depth):
    """The pool is too small for both, so that pages hold KV and states by turns."""
    executor = load(folder, "qwen3.5", max_total_tokens=300, mamba_shared_memory=True)
    assert (executor.info.num_pages, executor.info.states.slot_pages) == (142, 16)
    yard = yard_of(executor, max_in_flight=depth)
    check_greedy_answers(yard, "qwen3.5", TOKENS, depth)
    for seed in range(60, 70):
        prompt = prompt_of(70, seed=seed)
        number = yard.submit(prompt, max_new=TOKENS)
        yard.run(depth)
        yard.check()
        assert yard.tokens[number] == greedy("qwen3.5", prompt, TOKENS, yard.tokens[number])
    again = yard.submit(prompt, max_new=TOKENS)
    yard.run(depth)
    assert yard.finished[again].cached_tokens == 68
    assert yard.tokens[again] == yard.tokens[number]
    assert yard.scheduler.idle() is None


def predicted(case, prompt, tokens):
    """What a client may expect of an answer: the answer, with every fourth token wrong."""
    ids = np.array(greedy(case, prompt, tokens), np.int32)
    ids[3::4] = 3
    return ids


def answers(yard, case, prompts, depth, tokens=20):
    """Prompts with a next turn of the last one behind them, and the answers; the turn hits what the answer left."""

    def submit(prompt):
        return yard.submit(prompt, max_new=tokens, prediction=predicted(case, prompt, tokens))

    numbers = [submit(prompt) for prompt in prompts]
    yard.run(depth)
    yard.check()
    turn = prompts[-1] + yard.tokens[numbers[-1]] + prompts[1][:9]
    numbers.append(submit(turn))
    yard.run(depth)
    assert yard.finished[numbers[-1]].cached_tokens > len(prompts[-1])
    assert yard.scheduler.idle() is None
    return [*prompts, turn], [yard.tokens[number] for number in numbers]


DRAFTING = [
    ("qwen3.5", 1, {}),
    ("qwen3.5", 2, {"mamba_shared_memory": True, "max_total_tokens": 300}),
    ("granite-hybrid", 2, {}),
    ("lfm2", 1, {"mamba_shared_memory": True, "page_size": 1}),
]


@pytest.mark.parametrize(("case", "depth", "options"), DRAFTING)
def test_refused_drafts_leave_the_state(folder, case, depth, options):
    """Checkpoints every eight tokens, so that drafts often end where one is saved."""
    yard = yard_of(load(folder, case, draft_tokens=5, **options), max_in_flight=depth)
    prompts = [prompt_of(26 + index, seed=index) for index in range(6)]
    for prompt, found in zip(*answers(yard, case, prompts, depth), strict=True):
        assert found == greedy(case, prompt, 20, found)
    counters = yard.scheduler.snapshot(0).counters
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens


def test_sampled_answers_are_those_without_drafts(folder):
    def run(**options):
        yard = yard_of(load(folder, "qwen3.5", max_total_tokens=600, **options), max_in_flight=2)
        for index in range(5):
            prompt = prompt_of(22 + index, seed=index)
            sampling = SamplingParams(max_new_tokens=20, temperature=0.2 + 0.3 * index, top_p=0.9, seed=index)
            yard.submit(prompt, sampling=sampling, prediction=predicted("qwen3.5", prompt, 20))
        yard.run(2)
        return yard.tokens, yard.scheduler.snapshot(0).counters

    (plain, _), (drafting, counters) = run(), run(draft_tokens=4)
    assert plain == drafting
    assert 0 < counters.accepted_draft_tokens < counters.draft_tokens


def test_a_draft_model_whose_layers_all_attend(folder):
    yard = yard_of(load(folder, "qwen3.5", draft_tokens=3, draft_model=folder("llama"), context_length=256))
    yard.executor.drafter.clock = lambda: 0.0
    prompts = [prompt_of(20 + index, seed=index) for index in range(3)]
    for prompt, found in zip(*answers(yard, "qwen3.5", prompts, 1, tokens=12), strict=True):
        assert found == greedy("qwen3.5", prompt, 12, found)
    assert yard.scheduler.snapshot(0).counters.draft_tokens
    with pytest.raises(ConfigError, match="has recurrent states"):
        load(folder, "llama", draft_tokens=3, draft_model=folder("qwen3.5"))


def test_log_probabilities_of_prompt_and_answer(folder):
    driver, prompt = Driver(load(folder, "qwen3.5")), prompt_of(90, seed=4)
    sequence = driver.start(prompt, logprobs=LogprobOptions(output=True, prompt_from=1))
    answer = driver.generate(sequence, TOKENS, chunk=37)
    expected = logits("qwen3.5", prompt + answer).log_softmax(-1)
    found = {}
    for entry in sequence.logprobs:
        found |= {entry.position + place: value for place, value in enumerate(entry.logprobs)}
    known = prompt + answer
    assert sorted(found) == list(range(1, len(known)))
    wanted = {position: expected[position - 1, known[position]].item() for position in found}
    assert found == pytest.approx(wanted, abs=1e-3)


def test_the_recurrence_in_chunks_is_that_of_single_tokens():
    """In float64, with decays from nearly none to nearly all, against the recurrence written down token by token."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, heads, key_dim, value_dim = 150, 3, 8, 5
    queries, keys, values = (
        random(tokens, heads, key_dim),
        random(tokens, heads, key_dim),
        random(tokens, heads, value_dim),
    )
    keys = torch.nn.functional.normalize(keys, dim=-1)
    decay, strength = -random(tokens, heads).mul(3).exp(), random(tokens, heads).sigmoid()
    state = begin = random(heads, key_dim, value_dim)
    expected = []
    for token in range(tokens):
        state = state * decay[token].exp()[:, None, None]
        for head in range(heads):
            error = values[token, head] - keys[token, head] @ state[head]
            state[head] += torch.outer(keys[token, head], strength[token, head] * error)
        expected.append(torch.stack([queries[token, head] @ state[head] for head in range(heads)]))
    inputs = queries, keys, values, decay, strength
    found, end = delta_chunks(*inputs, begin)
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(end, state)
    by_steps = begin[None].clone()
    for token in range(tokens):
        single = [column[token : token + 1] for column in inputs]
        torch.testing.assert_close(delta_step(*single, by_steps)[0], expected[token])
    torch.testing.assert_close(by_steps[0], state)


def test_the_convolution_is_that_of_torch():
    x, weights = torch.randn(20, 6), torch.randn(4, 6)
    expected = torch.nn.functional.conv1d(x.T[None], weights.T[:, None], groups=6)[0].T
    torch.testing.assert_close(causal_conv(x, weights), expected)


def test_the_scan_of_mamba_2_in_chunks_is_that_of_single_tokens():
    """In float64, with decays from nearly none to nearly all."""
    generator = torch.Generator().manual_seed(5)
    tokens, heads, head_dim, state_size = 150, 3, 5, 8
    values, writes, reads = (
        torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
        for size in (head_dim, state_size, state_size)
    )
    decay = -torch.randn(tokens, heads, generator=generator, dtype=torch.float64).mul(3).exp()
    begin = torch.randn(heads, head_dim, state_size, generator=generator, dtype=torch.float64)
    found, end = ssm_chunks(values, writes, reads, decay, begin)
    state, expected = begin[None].clone(), []
    for token in range(tokens):
        single = (column[token : token + 1] for column in (values, writes, reads, decay))
        expected.append(ssm_step(*single, state)[0])
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(end, state[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_mamba_cache_size": 8}, "9 running requests need a slot each"),
        ({"mamba_track_interval": 0}, "mamba_track_interval is 0"),
    ],
)
def test_what_does_not_work_with_states_is_refused(folder, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(folder, "qwen3.5", **options)
    assert "\n" not in str(caught.value)


def test_the_pools_hold_what_their_layers_need(folder):
    executor = load(folder, "qwen3.5", max_mamba_cache_size=20)
    assert len(executor.kv_pool.tensor) == 1, "one of five layers attends"
    assert executor.info.states.num_slots == 20 - 9
    # Four layers: 4 heads of 16 x 24 in float32, and three tokens of 2 * 2 * 16 + 4 * 24 channels.
    assert executor.info.states.slot_bytes == 4 * (4 * 16 * 24 * 4 + 3 * 160 * 4)
    assert load(folder, "qwen3.5", mamba_full_memory_ratio=0.0).info.states.num_slots == 0


def test_the_text_part_of_a_vision_model(folder, tmp_path):
    """As the released checkpoints are: their towers and the draft head stay unread."""
    source = Path(folder("qwen3.5"))
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    tensors |= {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    driver, prompt = Driver(load_executor(str(tmp_path), device=DEVICE, dtype="float32")), prompt_of(20, seed=1)
    assert driver.generate(driver.start(prompt), TOKENS) == greedy("qwen3.5", prompt, TOKENS)


def test_experts_in_one_tensor_per_layer(folder, tmp_path):
    """As the released checkpoints of Qwen3.5 have them; transformers writes a tensor per expert."""
    source = Path(folder("qwen3.5-moe"))
    tensors = load_file(source / "model.safetensors")
    for layer in range(5):
        prefix, parts = f"model.layers.{layer}.mlp.experts.", ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(7)]) for part in parts
        )
        tensors |= {prefix + "gate_up_proj": torch.cat((gate, up), dim=1), prefix + "down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    driver, prompt = Driver(load_executor(str(tmp_path), device=DEVICE, dtype="float32")), prompt_of(20, seed=1)
    assert driver.generate(driver.start(prompt), TOKENS) == greedy("qwen3.5-moe", prompt, TOKENS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ({"mamba_d_head": 8}, "6 heads of 8 in 1 groups do not make 96"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"layer_types": ["mamba"] * 4}, "names no full_attention"),
    ],
)
def test_a_config_of_mamba_2_that_makes_no_sense_is_refused(folder, changes, says):
    raw = json.loads((Path(folder("granite-hybrid")) / "config.json").read_text())
    with pytest.raises(ConfigError, match=says):
        read_model_config(raw | changes)


def test_names_of_layers_in_older_files(folder):
    raw = json.loads((Path(folder("granite-hybrid")) / "config.json").read_text())
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    older = [kinds[kind] for kind in raw["layer_types"]]
    assert read_model_config(raw | {"layer_types": older}) == read_model_config(raw)


def test_no_experts_and_no_shared_expert(folder):
    """As transformers, which then has an MLP, or nothing next to the experts."""

    def read(case, **changes):
        return read_model_config(json.loads((Path(folder(case)) / "config.json").read_text()) | changes)

    assert read("qwen3-next", num_experts=0).experts is None
    assert read("qwen3.5-moe", shared_expert_intermediate_size=0).experts.shared_size == 0
    with pytest.raises(ConfigError, match="conv_L_cache 1 is not supported"):
        read("lfm2", conv_L_cache=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"layer_types": ["linear_attention"] * 5}, "names no full_attention"),
        ({"layer_types": ["sliding_attention"] * 5}, "must name full_attention or linear_attention for 5 layers"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(folder, tmp_path, changes, says):
    raw = json.loads((Path(folder("qwen3.5")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ConfigError, match=says):
        load_executor(str(tmp_path), device=DEVICE, dtype="float32")
