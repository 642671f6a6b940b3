"""Forced and strict calls of a model whose tokenizer has Qwen3's markers, with their published flags."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tokenyard import LLM
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

SHARED = Path(__file__).resolve().parents[2] / "../shared"
pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="there is no demo model")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    '{% if tools %}{{ tools | tojson }} <tool_call> {"name": }</tool_call>{% endif %}'
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["north", "south"]}, "steps": {"enum": [1, 2, 3]}},
            "required": ["where", "steps"],
        },
    },
}


@pytest.fixture(scope="module", params=["published", "special"])
def model(request, tmp_path_factory):
    """The demo model, with the added tokens of Qwen3 at the end of its vocabulary."""
    path = SHARED / "tokenizers/added_tokens/qwen3.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    added = json.loads(path.read_text())["added_tokens"]
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = tokenizer.get_vocab_size()
    special = request.param == "special"
    tokenizer.add_tokens([AddedToken(one["content"], special=one["special"] or special) for one in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    more = tokenizer.get_vocab_size() - before
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    table = weights[name]
    rows = torch.randn(more, table.shape[1], generator=torch.Generator().manual_seed(0)).to(table.dtype)
    weights[name] = torch.cat([table, rows * table.float().std().to(table.dtype)])
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = len(weights[name])
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(folder, device="cpu") as llm:
        yield llm


def answers(llm: LLM, bodies: list[dict]) -> list[dict]:
    async def ask():
        api = LocalApi(llm)
        return await asyncio.gather(*(api.whole("POST", "/v1/chat/completions", body) for body in bodies))

    found = asyncio.run(ask())
    assert all(status == 200 for status, _ in found), found
    return [json.loads(text)["choices"][0] for _, text in found]


def body(llm: LLM, seed: int, **fields) -> dict:
    close = llm.tokenizer.token_to_id("</think>")
    return {
        "messages": [{"role": "user", "content": "go"}],
        "tools": [TOOL],
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": seed,
        # A model that knows nothing would think up to its limit.
        "logit_bias": {str(close): 12},
        **fields,
    }


@pytest.mark.parametrize("thinking", [False, True])
def test_each_forced_call_comes_and_keeps_to_its_schema(model, thinking):
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    for choice in answers(model, [body(model, seed, **fields) for seed in range(8)]):
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["where"] in ("north", "south")
        assert arguments["steps"] in (1, 2, 3)
        assert choice["message"]["content"] is None
        assert bool(choice["message"].get("reasoning_content")) <= thinking


def test_a_forced_call_is_written_with_the_markers_of_the_model(model):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "return_token_ids": True}
    (choice,) = answers(model, [body(model, 0, chat_template_kwargs={"enable_thinking": False}, **fields)])
    ids = choice["token_ids"]
    assert model.tokenizer.token_to_id("<tool_call>") in ids
    assert model.tokenizer.token_to_id("</tool_call>") in ids


def test_a_thinking_model_with_strict_tools_closes_its_reasoning(model):
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    fields = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True}
    fields["max_tokens"] = 60
    close = model.tokenizer.token_to_id("</think>")
    for choice in answers(model, [body(model, seed, **fields) for seed in range(4)]):
        assert choice["token_ids"].count(close) == 1, choice


def test_a_forced_call_that_is_cut_leaves_nothing_of_a_marker(model):
    fields = {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}
    asked = [body(model, 1, max_tokens=most, **fields) for most in range(1, 60, 3)]
    for choice in answers(model, asked):
        assert not choice["message"]["content"], choice
