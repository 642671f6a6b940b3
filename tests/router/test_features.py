"""What the router reads out of a request's body."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.base import InvalidRequestError
from tokenyard.router.request_features import parse_body

TEXTS = st.text("aé€\0", max_size=6)
LEAVES = st.sampled_from([None, True, 0, -1, 7, 2**70, 1.5, -1e300, "", "high"]) | TEXTS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "text",
        "input",
        "input_ids",
        "tools",
        "system",
        "model",
        "stream",
        "priority",
        "tenant",
        "user",
        "deadline_ms",
        "cache_salt",
        "extra_key",
        "service_tier",
    ]
)


def body(**fields):
    return json.dumps(fields).encode()


def test_what_is_read():
    parsed = parse_body(
        body(model="m", prompt="x" * 400, stream=True, priority=3, user="me", deadline_ms=5, data_parallel_rank=2)
    )
    assert (parsed.model, parsed.stream, parsed.priority, parsed.tenant) == ("m", True, 3, "me")
    assert (parsed.deadline_ns, parsed.rank, parsed.tokens, parsed.counted) == (5_000_000, 2, 100, False)
    assert len(parsed.prompt.digests) == 1


def test_token_ids_are_counted():
    parsed = parse_body(body(prompt=list(range(200))))
    assert (parsed.tokens, parsed.counted, len(parsed.prompt.digests)) == (200, True, 3)
    assert parse_body(body(input_ids=list(range(200)))).prompt.digests == parsed.prompt.digests
    assert parse_body(body(prompt=list(range(200)), cache_salt="s")).prompt.digests != parsed.prompt.digests


def test_a_tokenizer_counts_texts():
    parsed = parse_body(body(prompt="hello"), tokenize=lambda fields: np.arange(130, dtype=np.int32))
    assert (parsed.tokens, len(parsed.prompt.digests)) == (130, 2)
    assert parse_body(body(prompt="hello"), tokenize=lambda fields: None).counted is False


def test_a_conversations_next_turn_begins_with_the_last_one():
    turns = [
        {"role": "system", "content": "s" * 300},
        {"role": "user", "content": [{"type": "text", "text": "u" * 400}]},
    ]
    first = parse_body(body(messages=turns, tools=[{"name": "t"}], temperature=1))
    turns += [{"role": "assistant", "content": "a" * 500}, {"role": "user", "content": "more"}]
    second = parse_body(body(messages=turns, temperature=0, tools=[{"name": "t"}]))
    assert second.prompt.digests[: len(first.prompt.digests)] == first.prompt.digests
    assert len(second.prompt.digests) > len(first.prompt.digests) >= 2
    assert second.key != 0


def test_salts_and_tools_part_prompts():
    several = ({}, {"cache_salt": "a"}, {"tools": [{"n": "t"}]}, {"lora_path": "b"})
    assert len({tuple(parse_body(body(prompt="x" * 300, **more)).prompt.digests) for more in several}) == 4


@pytest.mark.parametrize("prompt", ["x" * 300, list(range(200))])
def test_an_adapters_prefixes_are_apart_however_it_is_named(prompt):
    named = [{"lora_path": "poet"}, {"model": "poet"}, {"model": "base:poet"}, {"model": "base", "lora_path": "poet"}]
    read = [parse_body(body(prompt=prompt, **name), adapters={"poet", "base:poet"}).prompt.digests for name in named]
    assert all(list(digests) == list(read[0]) for digests in read)
    base = parse_body(body(prompt=prompt, model="base"), adapters={"poet", "base:poet"}).prompt.digests
    assert list(base) != list(read[0])
    assert list(base) == list(parse_body(body(prompt=prompt, model="other:name")).prompt.digests)


def test_the_key_is_that_of_the_beginning_and_the_same_everywhere():
    code = 'from tokenyard.router.request_features import parse_body; print(parse_body(b\'{"prompt": "abc"}\').key)'
    keys = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert keys == {f"{parse_body(body(prompt='abc')).key}\n"}
    assert parse_body(body(prompt="x" * 2000 + "y")).key == parse_body(body(prompt="x" * 2000 + "z")).key


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_object_is_read(fields):
    parsed = parse_body(json.dumps(fields).encode())
    assert parsed.tokens >= 1
    assert abs(parsed.priority) < 2**31


@pytest.mark.parametrize("wrong", [b"", b"{", b"[]", b"1", b"\xff"])
def test_what_is_no_object_is_refused(wrong):
    with pytest.raises(InvalidRequestError):
        parse_body(wrong)


def test_the_router_needs_neither_torch_nor_a_tokenizer():
    code = (
        "import sys\n"
        "for name in ('torch', 'tokenizers', 'safetensors', 'jinja2', 'starlette'): sys.modules[name] = None\n"
        "import tokenyard.router.process, tokenyard.cli.route\n"
        "from tokenyard.cli.main import build_parser\n"
        "build_parser('route')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
