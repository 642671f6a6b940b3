"""Draft heads that checkpoints bring: their drafts are those of transformers' own head, and change no answer."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.executor.crowded_yard import check_greedy_answers, seen_drafts, yard_of
from tests.executor.tiny_models import DEVICE, greedy, judge, prompt_of
from tokenyard.base import ConfigError, LogprobOptions, SamplingParams
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.draft_head import DraftHeadWeights, draft_head_names

CASES = ["deepseek-v3", "deepseek-v3-halves", "qwen3.5", "qwen3.5-moe", "qwen3-next"]
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def head_of(case):
    """transformers' head of a tiny model, with random weights; it has no name for that of Qwen."""
    main = judge(case)
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    torch.manual_seed(5)
    head = MtpModel(main, 1).eval().float()
    for name in ("enorm", "hnorm", "post_norm"):
        # It takes the class of any norm of the last layer, that of a gated one too.
        setattr(head.layers[0], name, copy.deepcopy(main.model.norm))
    with torch.no_grad():
        for name, weight in head.layers.named_parameters():
            weight.normal_(0.0, 0.1 if "norm" in name else 0.3)
            if "norm" in name and case.startswith("deepseek"):
                weight.add_(1.0)
    return head


def stored_name(case, name):
    """The checkpoint's name of a parameter of the head's layer."""
    if case.startswith("deepseek"):
        part = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        return f"model.layers.{judge(case).config.num_hidden_layers}.{part}"
    if name.startswith("mtp_block."):
        return "mtp.layers.0." + name.removeprefix("mtp_block.")
    first, rest = name.split(".", 1)
    return f"mtp.{QWEN[first]}.{rest}"


@pytest.fixture(scope="module")
def with_head(folder, tmp_path_factory):
    """From a case to the folder of its checkpoint with a head, and the head."""

    def make(case):
        head, target = head_of(case), tmp_path_factory.mktemp(f"{case}-mtp")
        shutil.copy(Path(folder(case)) / "config.json", target)
        tensors = load_file(Path(folder(case)) / "model.safetensors")
        for name, weight in head.layers[0].state_dict().items():
            stored = stored_name(case, name)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[stored] = weight
                continue
            # As the rest of the checkpoint, a tensor per expert.
            prefix, kind = stored.rsplit(".", 1)
            for expert, matrix in enumerate(weight):
                parts = (
                    {"down": matrix} if kind == "down_proj" else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
                )
                for part, value in parts.items():
                    tensors[f"{prefix}.{expert}.{part}_proj.weight"] = value.contiguous()
        save_file(tensors, target / "model.safetensors")
        return str(target), head

    return make


def load(path, **options):
    sizes = {"page_size": 4, "max_total_tokens": 400, "max_pool_rows": 9, "mamba_track_interval": 8, "draft_tokens": 3}
    executor = load_executor(path, device=DEVICE, dtype="float32", draft_head="NEXTN", **sizes | options)
    # Tiny models take as long as their drafts.
    executor.drafter.clock = lambda: 0.0
    return executor


@torch.inference_mode()
def drafts_of(case, head, ids, count):
    """What the head drafts after `ids`, each draft from the one before."""
    hidden = judge(case).model(torch.tensor([ids])).last_hidden_state[:, :-1]
    ids, found = list(ids), []
    for _ in range(count):
        positions = torch.arange(len(ids) - 1)[None]
        inputs = torch.tensor([ids[1:]])
        out = head.forward_layer(0, hidden, positions, None, input_ids=inputs)
        found.append(int(head.shared_head(out)[0, -1].argmax()))
        ids.append(found[-1])
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return found


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_transformers_own_head(with_head, case):
    """Of a prompt in chunks, of steps whose drafts were refused, and of another prompt behind a cached prefix."""
    path, head = with_head(case)
    yard = yard_of(load(path))
    seen = seen_drafts(yard.executor.drafter)
    prompt = prompt_of(45, seed=3)
    number = yard.submit(prompt, max_new=8)
    yard.run(1)
    turn = prompt + prompt_of(6, seed=4)
    second = yard.submit(turn, max_new=5)
    yard.run(1)
    assert yard.tokens[number] == greedy(case, prompt, 8, yard.tokens[number])
    assert yard.tokens[second] == greedy(case, turn, 5, yard.tokens[second])
    assert yard.finished[second].cached_tokens == 44
    assert len(seen) >= 6
    for ids, drafts in seen:
        assert drafts == drafts_of(case, head, ids, len(drafts))


@pytest.mark.parametrize(("case", "depth"), [("deepseek-v3", 1), ("qwen3.5", 2)])
def test_greedy_answers_are_those_of_transformers(with_head, case, depth):
    """Chunked, cached, retracted, paused and several at a time, with a pool that evicts."""
    yard = yard_of(load(with_head(case)[0], max_total_tokens=180), max_in_flight=depth)
    counters = check_greedy_answers(yard, case, 9, depth)
    assert counters.draft_tokens
    assert yard.scheduler.idle() is None


def test_sampled_answers_are_those_without_drafts(with_head, folder):
    def run(executor):
        yard = yard_of(executor, max_in_flight=2)
        for index in range(5):
            sampling = SamplingParams(max_new_tokens=12, temperature=0.2 + 0.4 * index, top_p=0.9, seed=index)
            wanted = LogprobOptions(output=True) if index == 3 else None
            yard.submit(prompt_of(22 + index, seed=index), sampling=sampling, logprobs=wanted)
        yard.run(2)
        return yard.tokens, yard.scheduler.snapshot(0).counters.draft_tokens

    plain = load_executor(
        folder("qwen3.5"), device=DEVICE, dtype="float32", page_size=4, max_total_tokens=400, max_pool_rows=9
    )
    (expected, _), (found, drafts) = run(plain), run(load(with_head("qwen3.5")[0]))
    assert found == expected
    assert drafts


def test_what_cannot_draft_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"brings no draft head.*no mtp.fc.weight; use --speculative-algorithm NGRAM"):
        load(folder("qwen3.5"))
    with pytest.raises(ConfigError, match="models of LlamaForCausalLM bring no draft head"):
        load(folder("llama"))
    with pytest.raises(ConfigError, match="cannot be used with --speculative-algorithm NEXTN; leave it out"):
        load(folder("qwen3.5"), model_impl="native")
    config = json.loads((Path(folder("deepseek-v3")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    executor = load(str(tmp_path), load_format="dummy")
    with pytest.raises(ConfigError, match=r"NEXTN, EAGLE, EAGLE3\) cannot be changed"):
        executor.weight("model.norm.weight", 1)


def test_the_head_is_not_taken_for_the_first_layer(folder, tmp_path):
    """Whichever way its tensors are read, the kinds of quantized ones among them."""
    name, here = "mlp.up_proj.weight", torch.device("cpu")
    save_file(
        {f"model.layers.0.{name}": torch.zeros(4, 8), f"mtp.layers.0.{name}": torch.ones(2, 8, dtype=torch.int8)},
        tmp_path / "model.safetensors",
    )
    names = draft_head_names(read_folder_config(Path(folder("qwen3.5"))))
    files = DraftHeadWeights(tmp_path, here, torch.float32, names.layer)
    assert files.stored_kind(f"model.layers.0.{name}") == ("I8", (2, 8))
    assert files.parts("model.layers.0.mlp.up_proj.", ["weight"])["weight"].all()
