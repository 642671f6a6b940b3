"""Short searches with fixed seeds, and what longer ones have found. `python -m tests.fuzz all` searches for longer."""

import random

import pytest

from tests.fuzz.search import Search, Target, defect_of, shrink
from tests.fuzz.targets import TARGETS, gguf_files, safetensors
from tokenyard.router.http1 import WireError, parse_head

DEEP = b"\x91" * 4000
CONFIG = b'{"architectures":["Qwen3ForCausalLM"],"hidden_size":4,"num_attention_heads":4,'
FOUND = [
    ("transfer", b"\x92\xa4Drop\xa1\x84"),
    ("stream", b'data: {"choices":[{"index":' + b"1" * 5000 + b'}],"token_ids":[1]}\n\n'),
    ("stream", b'\n\ndata: ,"token_ids":[,]\n\n'),
    ("stream", b'data: {"text":\n\n'),
    ("kv-events", DEEP),
    # A parent whose hash is a list.
    (
        "kv-events",
        b"\x93\xcb@\x08\0\0\0\0\0\0\x91\x98\xabBlockStored\x91\xc4\2ad\x98\1\1\1\1\1\1\1\xff\xfe\4\7\xa3GPU\xa4lora\0",
    ),
    ("lookahead", b"\x9c\x01\x90\x01" + DEEP),
    ("lookahead", b"\0\x9c\0\x9c" + b"\x81\xa1a" * 2000),
    ("paused", b"r|\x81\xa1a" + DEEP),
    ("safetensors", safetensors()[0].replace(b'"shape"', b'"_hape"')),
    ("safetensors", b"\x07\0\0\0\0\0\0\0[1,2,3]"),
    ("safetensors", (8000).to_bytes(8, "little") + b"[" * 8000),
    ("config", CONFIG + b'"num_key_value_heads":1e999}'),
    ("grammar", b": %json {t} // "),
    ("grammar", b': %json {"a":' + b"[" * 4000 + b"} // "),
    ("gguf", gguf_files()[0].replace(b"attention.head_count\4\0\0\0\2", b"attention.head_count\4\0\0\0\0")),
    ("tokenizer", b'{"model":{"type":"BPE","continuing_subword_prefix":"##","vocab":{"":0},"merges":[["",""]]}}'),
    ("tokenizer-config", b'{"added_tokens_decoder":{"' + b"1" * 5000 + b'":{"content":"x"}}}'),
    ("tokenizer-config", b'{"added_tokens_decoder":{"5":{"content":"[a]","special":7}}}'),
    ("tokenizer-config", b'{"added_tokens_decoder":{"5":"special"}}'),
    ("tokenizer-config", b'{"bos_token":"\\ud800","add_bos_token":true}'),
    ("template", b"{{" + b"[" * 4000),
    ("template", b"{{ messages" + b".a[0]" * 100 + b" }}"),
    ("template", b"{%macro f(x,x)%}{%endmacro%}"),
    ("template", b"{{" + b"1" * 5000 + b"}}"),
    ("trace", b'{"resourceSpans":7}'),
    ("trace", b'{"resourceSpans":"x"}'),
]


@pytest.mark.parametrize(("target", "data"), FOUND, ids=[f"{name}-{place}" for place, (name, _) in enumerate(FOUND)])
def test_what_was_found_is_refused(target, data):
    assert defect_of(TARGETS[target], data) == ""


SLOW = ("tape", "slab", "gguf", "grammar", "template", "tokenizer", "tokenizer-config")


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_search_finds_nothing(name):
    search = Search(TARGETS[name], random.Random(1))
    search.begin()
    for _ in range(60 if name in SLOW else 1000):
        search.step()
    assert search.found == {}


def test_a_defect_is_found_and_shrunk():
    def run(data):
        if parse_head(data).get(b"a"):
            raise KeyError("a")

    target = Target(run, lambda: [b"HTTP/1.1 200 OK\r\nb: c\r\nc: d"], (WireError,), (b"\r\na:x",))
    search = Search(target, random.Random(3))
    search.begin()
    assert search.found == {}
    while not search.found:
        search.step()
    ((kind, data),) = search.found.items()
    assert kind.startswith("KeyError")
    assert len(shrink(target, kind, data)) <= len(b"HTTP/1.1 200 \r\nc:\r\na:x")
