"""EAGLE heads: their drafts are those of the papers, and change no answer."""

import json
from pathlib import Path

import pytest
import torch

from tests.executor.crowded_yard import check_greedy_answers, seen_drafts, yard_of
from tests.executor.eagle_maker import HeadJudge, head_config, head_tensors, save_head
from tests.executor.tiny_models import DEVICE, SMALL, VOCAB, greedy, judge, prompt_of
from tokenyard.base import ConfigError, LogprobOptions, SamplingParams
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor, memory_need
from tokenyard.executor.models.eagle_head import eagle_head_config
from tokenyard.executor.warm_up import CHUNKS, warm_up

HIDDEN = SMALL["hidden_size"]
OWN_WORDS = {"draft_vocab_size": 70}
SPECULATORS = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 2]}
CASES = {
    "eagle": ("llama", "layers.0.", {}, {"biases": ("fc", "q_proj", "k_proj", "v_proj")}),
    "eagle-scaled": ("granite", "layers.0.", {}, {}),
    "eagle3": ("llama", "midlayer.", OWN_WORDS, {"aux": (0, 1, 2)}),
    "eagle3-sglang": (
        "qwen3.5",
        "midlayer.",
        OWN_WORDS | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}},
        {"aux": (1, 4)},
    ),
    "eagle3-vllm": (
        "qwen3",
        "layers.0.",
        {"draft_vocab_size": VOCAB, **SPECULATORS},
        {"aux": (0, 2), "lm_head": False},
    ),
    "eagle3-windows": ("gemma3", "midlayer.", OWN_WORDS, {"aux": (2, 3, 4)}),
}
"""By name: the model, the beginning of the names of the head's layer, fields of its config, and what it has."""


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """From a case to the folder of its head, and its judge."""

    def make(case):
        model, layer, fields, having = CASES[case]
        aux = having.get("aux", ())
        config = head_config(VOCAB, HIDDEN, **fields)
        tensors = head_tensors(config, layer=layer, **having | {"aux": len(aux)})
        stored = config
        if case == "eagle3-vllm":
            inner = {name: value for name, value in config.items() if name not in fields}
            stored = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner, **fields}
        target = save_head(tmp_path_factory.mktemp(case), stored, tensors)
        return target, HeadJudge(judge(model), config, tensors, layer, aux, "norm_before_residual" in fields)

    return make


def load(path, head, algorithm, **options):
    sizes = {"page_size": 4, "max_total_tokens": 400, "max_pool_rows": 9, "mamba_track_interval": 8, "draft_tokens": 3}
    drafting = {"draft_head": algorithm, "draft_model": str(head)}
    executor = load_executor(path, device=DEVICE, dtype="float32", **sizes | drafting | options)
    # Tiny models take as long as their drafts.
    executor.drafter.clock = lambda: 0.0
    return executor


def algorithm_of(case):
    return "EAGLE3" if case.startswith("eagle3") else "EAGLE"


@pytest.mark.parametrize("case", ["eagle", "eagle-scaled", "eagle3", "eagle3-sglang", "eagle3-vllm"])
def test_drafts_are_those_of_the_papers(head, folder, case):
    """Of a prompt in chunks, of steps whose drafts were refused, and of another prompt behind a cached prefix."""
    model, (path, head_judge) = CASES[case][0], head(case)
    yard = yard_of(load(folder(model), path, algorithm_of(case)))
    seen = seen_drafts(yard.executor.drafter)
    prompt = prompt_of(45, seed=3)
    number = yard.submit(prompt, max_new=6)
    yard.run(1)
    turn = prompt + prompt_of(6, seed=4)
    second = yard.submit(turn, max_new=4)
    yard.run(1)
    assert yard.tokens[number] == greedy(model, prompt, 6, yard.tokens[number])
    assert yard.tokens[second] == greedy(model, turn, 4, yard.tokens[second])
    assert yard.finished[second].cached_tokens == 44
    assert len(seen) >= 5
    for ids, drafts in seen:
        assert drafts == head_judge.drafts(ids, len(drafts))


@pytest.mark.parametrize(("case", "depth"), [("eagle", 1), ("eagle3-sglang", 2), ("eagle3-windows", 2)])
def test_greedy_answers_are_those_of_transformers(head, folder, case, depth):
    """Chunked, cached, retracted, paused and several at a time, with a pool that evicts."""
    model = CASES[case][0]
    executor = load(folder(model), head(case)[0], algorithm_of(case), max_total_tokens=180)
    yard = yard_of(executor, max_in_flight=depth)
    counters = check_greedy_answers(yard, model, 6, depth)
    assert counters.draft_tokens
    assert yard.scheduler.idle() is None


@pytest.mark.parametrize("case", ["eagle", "eagle3"])
def test_the_warm_up_runs_a_head_over_runs_of_all_kinds(head, folder, case):
    model = CASES[case][0]
    executor = load(folder(model), head(case)[0], algorithm_of(case))
    drafter, lengths = executor.drafter, []
    layers = drafter.model.layers

    def noted(batch):
        lengths.append(len(batch.token_ids))
        return layers(batch)

    drafter.model.layers = noted
    warm_up(executor)
    assert tuple(lengths[: len(CHUNKS)]) == CHUNKS
    assert drafter.pool.tensor[:, :, :4].any()
    assert not drafter.pool.tensor[:, :, 4:].any()
    yard, prompt = yard_of(executor), prompt_of(21, seed=3)
    number = yard.submit(prompt, max_new=6)
    yard.run(1)
    assert yard.tokens[number] == greedy(model, prompt, 6)


def test_sampled_answers_are_those_without_drafts(head, folder):
    def run(executor):
        yard = yard_of(executor, max_in_flight=2)
        for index in range(5):
            sampling = SamplingParams(
                max_new_tokens=12,
                temperature=0.2 + 0.4 * index,
                top_p=0.9,
                seed=index,
                presence_penalty=0.3 * (index == 2),
            )
            wanted = LogprobOptions(output=True) if index == 3 else None
            yard.submit(prompt_of(22 + index, seed=index), sampling=sampling, logprobs=wanted)
        yard.run(2)
        return yard.tokens, yard.scheduler.snapshot(0).counters.draft_tokens

    plain = load_executor(
        folder("llama"), device=DEVICE, dtype="float32", page_size=4, max_total_tokens=400, max_pool_rows=9
    )
    (expected, _), (found, drafts) = run(plain), run(load(folder("llama"), head("eagle3")[0], "EAGLE3"))
    assert found == expected
    assert drafts


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_the_drafts_of_a_head_that_knows_the_model_are_accepted(tmp_path, algorithm):
    """The model's next token follows from the last one alone: one layer that adds nothing, and an output head that
    takes each embedding to the next token's. What EAGLE-3 reads is one token older, so its head goes two tokens on, and
    knows only its first draft.
    """
    count, hidden, layer = 40, 48, "layers.0."
    draw = torch.Generator().manual_seed(1)
    table = torch.linalg.qr(torch.randn(hidden, hidden, generator=draw))[0][:count] * hidden**0.5
    # One cycle, so that no answer stops.
    order = torch.randperm(count, generator=draw)
    following = torch.empty(count, dtype=torch.long).scatter_(0, order, order.roll(-1))
    config = head_config(count, hidden, eos_token_id=None, max_position_embeddings=256)
    model = head_tensors(config | {"draft_vocab_size": count}, layer="model.layers.0.", aux=1)
    model = {name: value for name, value in model.items() if name.startswith("model.")}
    model |= {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.zeros(rows, hidden)
        for name, rows in zip("qkv", (48, 16, 16), strict=True)
    }
    del model["model.layers.0.hidden_norm.weight"]
    model |= {"model.layers.0.mlp.down_proj.weight": torch.zeros(hidden, 64), "model.norm.weight": torch.ones(hidden)}
    lm_head = torch.empty_like(table)
    lm_head[following] = table
    model |= {"model.embed_tokens.weight": table, "lm_head.weight": lm_head}
    path = save_head(tmp_path / "model", config, model)
    third = algorithm == "EAGLE3"
    fields = {"draft_vocab_size": count, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}} if third else {}
    own = head_config(count, hidden, **fields)
    tensors = head_tensors(own, layer=layer, aux=int(third))
    tensors[f"{layer}self_attn.o_proj.weight"].zero_()
    tensors[f"{layer}mlp.down_proj.weight"].zero_()
    if third:
        twice = torch.empty_like(table)
        twice[following[following]] = table
        # The head's own words are in the other order.
        tensors |= {"fc.weight": torch.eye(hidden), "norm.weight": torch.ones(hidden), "lm_head.weight": twice.flip(0)}
        tensors["d2t"] = count - 1 - 2 * torch.arange(count)
    else:
        tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    yard = yard_of(load(path, save_head(tmp_path / "head", own, tensors), algorithm, draft_tokens=1 if third else 3))
    number = yard.submit([5, 9, 3], max_new=16)
    yard.run(1)
    tokens = [3]
    for _ in range(16):
        tokens.append(int(following[tokens[-1]]))
    assert yard.tokens[number] == tokens[1:]
    counters = yard.scheduler.snapshot(0).counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 6


def test_heads_that_do_not_fit_are_refused(head, folder, tmp_path):
    path, llama = head("eagle3")[0], folder("llama")

    def refused(match, algorithm="EAGLE3", target=llama, draft=path, **fields):
        if fields:
            config = json.loads((Path(path) / "config.json").read_text())
            (tmp_path / "config.json").write_text(json.dumps(config | fields))
            (tmp_path / "model.safetensors").write_bytes((Path(path) / "model.safetensors").read_bytes())
            draft = str(tmp_path)
        with pytest.raises(ConfigError, match=match) as caught:
            load(target, draft, algorithm)
        assert "\n" not in caught.value.message

    refused("is for --speculative-algorithm EAGLE3, not EAGLE", "EAGLE")
    refused("is for --speculative-algorithm EAGLE, not EAGLE3", draft=head("eagle")[0])
    refused("has a hidden size of 48, and the model 120; it was trained for another", target=folder("llama-odd"))
    refused("has a vocabulary of 198, and the model 199", vocab_size=198)
    refused("has a target hidden size of 64, and the model 48", target_hidden_size=64)
    refused("has 2 layers; only heads of one layer", num_hidden_layers=2)
    refused("reads no auxiliary hidden states", eagle_config={"use_aux_hidden_state": False})
    refused("reads layers .* of the model .*which has 3", eagle_aux_hidden_state_layer_ids=[0, 4])
    refused(
        "tensor 'fc.weight' has shape .48, 144., but config.json means .48, 96.",
        eagle_aux_hidden_state_layer_ids=[0, 1],
    )
    refused("d2t that does not map 69 tokens to the model's 199", draft_vocab_size=69)
    refused("has a field of the wrong type", eagle_aux_hidden_state_layer_ids="all")
    refused("the head .*: config.json: intermediate_size", intermediate_size=0)
    refused("holds no EAGLE head of Llama's shape", draft=folder_of_another(tmp_path / "other", path, llama))
    with pytest.raises(ConfigError, match="cannot be used with --speculative-algorithm EAGLE3; leave it out"):
        load(llama, path, "EAGLE3", model_impl="native")
    with pytest.raises(ConfigError, match=r"NEXTN, EAGLE, EAGLE3\) cannot be changed"):
        load(llama, path, "EAGLE3", load_format="dummy").weight("model.norm.weight", 1)


def folder_of_another(folder, head, model):
    """A folder with a head's config and the tensors of a model."""
    folder.mkdir()
    (folder / "config.json").write_text((Path(head) / "config.json").read_text())
    (folder / "model.safetensors").write_bytes((Path(model) / "model.safetensors").read_bytes())
    return str(folder)


def test_layers_are_counted_as_those_who_wrote_the_file_do(folder):
    target = read_folder_config(Path(folder("gemma3")))
    for fields, layers in (
        ({}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}, (0, 2, 7)),
    ):
        config = head_config(VOCAB, HIDDEN, draft_vocab_size=70, **fields)
        assert eagle_head_config(config, "EAGLE3", target, "h").eagle.aux_layers == layers


def test_a_head_counts_among_what_a_model_takes(head, folder):
    options = {"device": "cpu", "dtype": "float32", "max_total_tokens": 256, "max_pool_rows": 2, "model_impl": "torch"}
    path, head_judge = head("eagle3")
    plain, _ = memory_need(folder("llama"), **options)
    drafting = {"draft_tokens": 3, "draft_head": "EAGLE3", "draft_model": path}
    found, _ = memory_need(folder("llama"), **options, **drafting)
    assert found.weights - plain.weights == 4 * sum(tensor.numel() for tensor in head_judge.tensors.values())
    assert found.kv_pool - plain.kv_pool == 256 * 2 * 16 * 4
