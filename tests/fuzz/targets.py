"""What reads bytes that others wrote: of clients, of other engines and stores, and of files."""

import asyncio
import gzip
import json
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import msgspec
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.contract.test_stores import DIGESTS, FORM, content
from tests.engine.text_helpers import DEMO_TOKENIZER
from tests.fuzz.search import Target
from tests.kv_store.test_slab import SLOT
from tokenyard.base import LogprobOptions, SamplingParams, TextOptions, TokenyardError
from tokenyard.base.plan_bytes import decode_plan
from tokenyard.disagg import handshake
from tokenyard.disagg.protocol import messages
from tokenyard.engine.frontend import paused_requests, weight_files
from tokenyard.engine.text.chat_template import ChatTemplate, load_chat_template
from tokenyard.engine.text.tokenizer_files import load_tokenizer
from tokenyard.executor import memory_fit
from tokenyard.executor.gguf_file.folder import write_folder
from tokenyard.executor.gguf_file.gguf_reader import GgufFile
from tokenyard.executor.grammar import GrammarCache
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.kv_store.resp import RespConnection, RespError, StoreAddress
from tokenyard.kv_store.slab import SlabStore
from tokenyard.kv_store.store import block_buffer
from tokenyard.router.client_connection import ClientConnection
from tokenyard.router.http1 import ChunkedBody, LengthBody, WireError, parse_head
from tokenyard.router.kv_event_subscriber import KvEventSubscriber
from tokenyard.router.request_features import parse_body
from tokenyard.router.router_sync import read_reply
from tokenyard.router.stream_continuation import BY_OUTPUT_IDS, CHAT, COMPLETIONS, OTHER_PATHS, Continuation
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.scheduler import lookahead_state
from tokenyard.server.anthropic.messages import MessagesRequest
from tokenyard.server.openai.responses import ResponsesRequest
from tokenyard.server.openai.structured_outputs import grammar_of
from tokenyard.server.parse.pythonic import read_calls
from tokenyard.server.protocol import ChatRequest, CompletionRequest, NativeRequest, parse
from tokenyard.sim.traces.formats import FORMATS, detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

TAPES = Path(__file__).resolve().parents[1] / "tape/frozen"
ROOT = Path(__file__).resolve().parents[2]


@cache
def folder() -> Path:
    """A folder for the files that targets read."""
    kept = tempfile.TemporaryDirectory(prefix="tokenyard-fuzz-")
    folder.kept = kept  # type: ignore[attr-defined]
    return Path(kept.name)


def in_file(read: Callable[[Path], Any], name: str) -> Callable[[bytes], Any]:
    """Reads the input as a file with this name."""

    def run(data: bytes) -> Any:
        path = folder() / name
        path.write_bytes(data)
        return read(path)

    return run


def as_json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


# HTTP, as the router reads it.


class Transport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Loop:
    """Calls at once what is to be called soon, and never what is to be called later."""

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)

    def call_later(self, delay_s: float, function: Callable[..., Any], *arguments: Any) -> None: ...


def served(pieces: list[bytes]) -> tuple[list[Any], bytes]:
    """The requests that arrive on a router's connection, and what is written there."""
    asked: list[Any] = []

    def handler(connection: ClientConnection, request: Any) -> None:
        asked.append((request.method, request.target, request.body, request.path))
        connection.answer(200, b"ok", [])

    transport, connections = Transport(), {}
    connection = ClientConnection(handler, connections, 10_000)
    with mock.patch.object(asyncio, "get_running_loop", Loop):
        connection.connection_made(transport)  # type: ignore[arg-type]
        for piece in pieces:
            if not transport.closed:
                connection.data_received(piece)
        connection.connection_lost(None)
    assert not connections
    return asked, transport.written


def read_requests(data: bytes) -> None:
    """The same requests arrive, however the bytes are cut."""
    asked, _ = served([data])
    size = len(data) // 3 + 1
    again, _ = served([data[at : at + size] for at in range(0, len(data), size)])
    assert again == asked, "requests depend on how they arrive"


REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/chat/completions?a=%20b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive, Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nHEAD /%zz HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n\r\n",
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"4;x=1\r\nabcd\r\n5\r\n12345\r\n0\r\na: b\r\n\r\n",
    b"HTTP/1.1 503 \r\nContent-Length: 5\r\nconnection: close, upgrade\r\nretry-after: 3\r\n\r\nabcde",
    b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\nend",
]
HTTP_WORDS = (
    b"\r\n",
    b"\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"0\r\n\r\n",
    b"HTTP/1.1 ",
)


def whole_body(head: Any, pieces: list[bytes]) -> bytes:
    body = ChunkedBody(unpack=True) if head.chunked else LengthBody(head.length or 0)
    found = b"".join(body.feed(piece) for piece in pieces if not body.done)
    return found + (b"." if body.end() else b"")


def read_response(data: bytes) -> None:
    """A body is the same, however its bytes are cut, if it is right."""
    raw, _, rest = data.partition(b"\r\n\r\n")
    head = parse_head(raw)
    found = whole_body(head, [rest])
    try:
        again = whole_body(head, [rest[at : at + 1] for at in range(len(rest))])
    except WireError:
        return  # found with the next byte, where the whole is refused or waits for more
    # A whole is refused for what comes after its end; in pieces that is of the next response.
    assert again == found, "the body depends on how it arrives"


# Bodies of requests.

BODIES = as_json(
    {"model": "m", "prompt": "Hello", "max_tokens": 5, "stream": True, "n": 2, "stop": ["a"], "logit_bias": {"5": 1}},
    {"prompt": [1, 2, 3], "temperature": 0.5, "tenant": "a", "priority": 3, "deadline_ms": 5.5, "seed": 1},
    {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text"}]}],
    },
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "array", "items": {"$ref": "#"}}},
        },
    },
    {"text": "x", "sampling_params": [{"max_new_tokens": 3, "regex": "a+"}], "return_logprob": True, "rid": "r"},
    {"prompt": "x", "regex": "[a-z]{2,3}", "structured_outputs": {"choice": ["a", "b"]}, "guided_json": {"enum": [1]}},
    {"prompt": "x", "structured_outputs": {"grammar": 'root ::= "a" | [0-9]+\n'}, "data_parallel_rank": 1},
    {
        "input": [{"type": "message", "role": "user", "content": "x"}, {"type": "function_call_output", "output": "y"}],
        "instructions": "z",
        "text": {"format": {"type": "json_schema", "schema": {"anyOf": [{"type": "null"}, {"const": 1}]}}},
    },
    {"max_tokens": 3, "system": [{"type": "text", "text": "x"}], "messages": [{"role": "user", "content": "y"}]},
)
FIELD_WORDS = tuple(
    f'"{name}":'.encode()
    for name in ("model", "prompt", "messages", "stream", "tools", "response_format", "stop", "user", "content", "type")
)


def read_body(data: bytes) -> None:
    for kind in (CompletionRequest, ChatRequest, NativeRequest, ResponsesRequest, MessagesRequest):
        try:
            body = parse(data, kind)
        except TokenyardError:
            continue
        if isinstance(body, CompletionRequest | ChatRequest):
            try:
                grammar_of(body)
            except TokenyardError:
                continue


def read_stream(data: bytes) -> None:
    """A stream of a worker, which a router takes token ids from; its second half comes from another worker."""
    for path in (CHAT, COMPLETIONS, *OTHER_PATHS):
        continuation = Continuation(path, {"stream": True, "logprobs": 1}, BY_OUTPUT_IDS)
        try:
            continuation.feed(data)
            if continuation.can_resume(1000):
                continuation.resume_stream()
                continuation.feed(data)
        except WireError:
            continue


STREAMS = [
    b'data: {"id":"a","choices":[{"index":0,"text":"x","token_ids":[5],"finish_reason":null}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n',
    b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2],"logprobs":{"text_offset":[0,3]}}]}\n\n',
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"a",'
    b'"created_at":1},"token_ids":[3]}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":9}\n\n',
    b'data: {"text":"a","output_ids":[1],"meta_info":{"id":"x"},"index":0}\n\n',
    b'{"model":"m","message":{"role":"assistant","content":"x"},"done":false,"token_ids":[4]}\n{"done":true}\n',
]


# Messages of other processes and machines.


def read_kv_events(data: bytes) -> None:
    index = PrefixIndex(1 << 20)
    subscriber = KvEventSubscriber(index, "a")
    for number in range(2):
        subscriber.take([b"", number.to_bytes(8, "big"), data])


KV_EVENTS = [
    msgspec.msgpack.encode(batch)
    for batch in (
        [1.0, [["BlockStored", [1, 2], None, list(range(32)), 16, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]],
        [
            2.0,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [3],
                    "parent_block_hash": 2,
                    "token_ids": [5] * 16,
                    "block_size": 16,
                }
            ],
        ],
        [3.0, [["BlockStored", [b"ab"], b"cd", [1] * 8, 4, 7, "GPU", "lora"]], 0],
    )
]


def read_sync_reply(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await read_reply(reader)

    coroutine = read()
    try:
        coroutine.send(None)
    except StopIteration:
        return
    finally:
        coroutine.close()


class NoOptions(socket.socket):
    """A socket that is not TCP and is asked for options of TCP."""

    def setsockopt(self, *arguments: Any) -> None:
        """Set nothing."""


def read_store_reply(data: bytes) -> None:
    one, theirs = socket.socketpair()
    with theirs, NoOptions(fileno=one.detach()) as ours:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with mock.patch.object(socket, "create_connection", return_value=ours):
            connection = RespConnection(StoreAddress("redis://x", "--url"), 1.0)
        try:
            connection.command(b"GET", b"x")
        finally:
            connection.close()


REPLIES = [b"$5\r\nhello\r\n", b"*2\r\n$1\r\na\r\n*1\r\n:5\r\n", b"-ERR no\r\n", b":12\r\n", b"$-1\r\n", b"+OK\r\n"]


def read_transfer_message(data: bytes) -> None:
    for decode in (handshake.decode_opening, handshake.decode_message):
        try:
            decode(data)
        except handshake.HandshakeError:
            continue


def transfer_messages() -> list[bytes]:
    hello = handshake.Hello(1, "a", b"n" * 16, "m", "float32", 16, 2, 128)
    beat, done = messages.Beat(["k"]), messages.Done("k")
    return [msgspec.msgpack.encode(message) for message in (hello, messages.Drop("k"), beat, done)]


def read_lookahead_message(data: bytes) -> None:
    for decode in (lookahead_state.decode, lookahead_state.decode_reply):
        try:
            decode(data)
        except ValueError:
            continue


# Files.


def slab() -> list[bytes]:
    kept = folder() / "slab-seed"
    store = SlabStore(str(kept), FORM, SLOT * 4)
    for place in range(3):
        store.put(DIGESTS[place], content(place))
    store.close()
    return [(kept / "slab-0000.kv").read_bytes()]


def read_slab(data: bytes) -> None:
    """No block that is read is another than what was written."""
    kept = folder() / "slab"
    kept.mkdir(exist_ok=True)
    for path in kept.glob("slab-*"):
        path.unlink()
    (kept / "slab-0000.kv").write_bytes(data)
    store = SlabStore(str(kept), FORM, SLOT * 4)
    try:
        for place in range(4):
            block = block_buffer(FORM.block_bytes)
            if store.get(DIGESTS[place], block):
                assert (block[: FORM.block_bytes] == content(place)[: FORM.block_bytes]).all(), "a wrong block is read"
        store.put(DIGESTS[5], content(5))
    finally:
        store.close()


def read_paused(data: bytes) -> None:
    """A record whose digest is right, so that damage before it was written is seen."""
    rid, _, body = data.partition(b"|")
    rid = rid[: paused_requests.MAX_ID_BYTES]
    digest = blake2b(rid + body, digest_size=16).digest()
    head = paused_requests.HEAD.pack(paused_requests.MAGIC, paused_requests.VERSION, len(rid), len(body), digest)
    paused_requests.decode(head + rid + body)


def paused_records() -> list[bytes]:
    record = paused_requests.PausedRequest("r", "m", b"\0" * 8, SamplingParams(), TextOptions(), [], LogprobOptions())
    return [b"r|" + msgspec.msgpack.encode(record)]


def tapes() -> list[bytes]:
    """The beginnings of the smallest frozen tapes."""
    smallest = sorted(TAPES.glob("*.tape.gz"), key=lambda path: path.stat().st_size)[:3]
    return [gzip.decompress(path.read_bytes())[:12_000] for path in smallest]


def read_tape(data: bytes) -> None:
    replay(Tape(data, "tape"))


def safetensors() -> list[bytes]:
    header = {
        "__metadata__": {"a": "b"},
        "x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "y.qweight": {"dtype": "I32", "shape": [1], "data_offsets": [16, 20]},
    }
    text = json.dumps(header).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(20)]


def read_safetensors(data: bytes) -> None:
    path = folder() / "model.safetensors"
    for read in (weight_files.check_tensor_file, lambda path: memory_fit.stored_tensors(path.parent)):
        path.write_bytes(data)
        try:
            read(path)
        except TokenyardError:
            continue


@cache
def grammar_cache() -> GrammarCache:
    """Keeps the tokenizer of the demo model between runs."""
    return GrammarCache(2048, (0,))


def read_grammar(data: bytes) -> None:
    grammar_cache().compile(data.decode("latin-1"), (DEMO_TOKENIZER.parent / "tokenizer.json").read_text)


GRAMMARS = [
    b'start: a | B\na: "x" a? "y"\nB: /[a-z]{2,5}\\d+/\n%ignore " "\n',
    b'start: one\none: %json {"type":"object","properties":{"a":{"type":"integer","minimum":3}}} // x\n',
    b'start: one\none: %json {"anyOf":[{"enum":["a",1]},{"type":"string","pattern":"^a+$"}],"not":{}} // y\n',
]


def gguf_files() -> list[bytes]:
    path, found = folder() / "seed.gguf", []
    for kind, pre, more in (
        ("llama", "llama-bpe", {}),
        ("gemma2", "", {}),
        ("granitehybrid", "", {"ssm.inner_size": 8}),
    ):
        writer = gguf.GGUFWriter(str(path), kind)
        numbers = {"context_length": 64, "embedding_length": 8, "block_count": 2, "feed_forward_length": 16}
        for name, value in (numbers | {"attention.head_count": 2, "expert_count": 0} | more).items():
            writer.add_uint32(f"{kind}.{name}", value)
        writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_string(f"{kind}.rope.scaling.type", "linear")
        writer.add_tokenizer_model("gpt2" if pre else "llama")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["<s>", "a", "b", "ab"])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_chat_template("{{ messages }}")
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path.read_bytes())
    return found


def read_gguf(path: Path) -> None:
    write_folder(GgufFile(path), folder())


def tokenizers() -> list[bytes]:
    """Small tokenizers of three kinds."""
    vocab = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    pieces = [(text, -float(number)) for text, number in vocab.items()]
    bpe = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<s>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    bpe.enable_truncation(4)
    unigram = Tokenizer(models.Unigram(pieces, 0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = Tokenizer(models.WordPiece(vocab, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("a+|b"), "isolated")
    words.decoder = decoders.WordPiece()
    words.enable_padding()
    for one in (bpe, unigram, words):
        one.add_special_tokens(["<s>"])
    return [one.to_str().encode() for one in (bpe, unigram, words)]


def tokenizer_folder(data: bytes, config: bytes) -> Path:
    """A folder with a tokenizer and its config."""
    (folder() / "tokenizer.json").write_bytes(data)
    (folder() / "tokenizer_config.json").write_bytes(config)
    return folder()


def read_tokenizer(data: bytes) -> None:
    """What is loaded encodes and decodes, or the library says why not: it does so in exceptions of no class."""
    tokenizer = load_tokenizer(str(tokenizer_folder(data, b"{}")))
    with suppress(Exception):
        tokenizer.decode(tokenizer.encode("<s> aab ba\n").ids)


@cache
def small_tokenizer() -> bytes:
    return tokenizers()[0]


def tokenizer_configs() -> list[bytes]:
    token = {"content": "[a]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": True}
    template = "{% for m in messages %}<s>{{ m.role }}{{ m['content'] | trim }}{% endfor %}{{ bos_token }}"
    plain = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": token}
    added = {"added_tokens_decoder": {"0": token | {"content": "<s>", "special": True}, "5": token}}
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    return as_json(
        plain | added | {"chat_template": template, "additional_special_tokens": ["ab", token]},
        plain | {"chat_template": named, "response_template": {"defaults": {"role": "assistant"}}},
    )


def read_tokenizer_config(data: bytes) -> None:
    kept = tokenizer_folder(small_tokenizer(), data)
    tokenizer = load_tokenizer(str(kept))
    template = load_chat_template(kept)
    tokenizer.encode(template.render(MESSAGES) if "default" in template.sources else "ab")


MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}]
TEMPLATES = [
    b"{% for m in messages %}<s>{{ m.role }}{{ m['content'] | trim }}{% endfor %}{{ bos_token }}",
    b"{%- if messages[0].content is not none -%}{{ messages | tojson(indent=2) }}{% generation %}{% endgeneration %}"
    b"{%- endif %}{{ raise_exception('no ' + tools) }}",
    b"{% macro f(x, y=1) %}{{ x * y }}{% endmacro %}{% set ns = namespace(n=0) %}{% set ns.n = 1 %}{{ f('a', 3) }}",
]


def read_template(data: bytes) -> None:
    ChatTemplate({"default": data.decode("latin-1")}, {"bos_token": "<s>"}).render(MESSAGES, max_chars=100_000)


def configs() -> list[bytes]:
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        "torch_dtype": "float32",
        "eos_token_id": [1, 2],
    }
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return as_json(
        plain,
        plain | window | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_scaling": None},
        plain | {"rope_parameters": llama3 | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
        plain
        | experts
        | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": {"quant_method": "awq", "bits": 4}},
    )


def read_config(data: bytes) -> None:
    raw = json.loads(data)
    if isinstance(raw, dict):
        read_model_config(raw, {"eos_token_id": 5})


def traces() -> list[bytes]:
    values = {"timestamp": 1.5, "input": "a b", "output": "c", "messages": [{"role": "user", "content": "x"}]}
    lines = [
        json.dumps({name: values.get(name, 7) for name in sorted(fields)}) for form in FORMATS for fields in form.fields
    ]
    tables = [",".join(form.columns) + "\n" + ",".join(["1"] * len(form.columns)) for form in FORMATS if form.columns]
    own = [
        '{"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 3, "tenant": "a"}\n{"arrival_s": 1}',
        '{"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.1,3,4\n",
    ]
    return [text.encode() + b"\n" for text in (*lines, *tables, *own)]


def read_traces(path: Path) -> None:
    read_trace(path, detect_format(path), ReadOptions(limit=100))


TARGETS: dict[str, Target] = {
    "http-request": Target(read_requests, lambda: REQUESTS, words=HTTP_WORDS),
    "http-response": Target(read_response, lambda: RESPONSES, (WireError,), HTTP_WORDS),
    "routed-body": Target(parse_body, lambda: BODIES, (TokenyardError,), FIELD_WORDS),
    "body": Target(read_body, lambda: BODIES, words=FIELD_WORDS),
    "stream": Target(read_stream, lambda: STREAMS, words=(b"data: ", b"\n\n", b'"token_ids":[1]', b"[DONE]")),
    "calls": Target(lambda data: read_calls(data.decode("latin-1")), lambda: [b'[f(a=1, b="x", c=[{"d": None}])]']),
    "kv-events": Target(read_kv_events, lambda: KV_EVENTS),
    "sync-reply": Target(read_sync_reply, lambda: REPLIES, (ConnectionError, asyncio.IncompleteReadError, ValueError)),
    "store-reply": Target(read_store_reply, lambda: REPLIES, (RespError,)),
    "transfer": Target(read_transfer_message, transfer_messages),
    "lookahead": Target(read_lookahead_message, lambda: [b"\0" + msgspec.msgpack.encode([1] * 12)]),
    "plan": Target(decode_plan, lambda: [bytes(200)], (ValueError,)),
    "slab": Target(read_slab, slab, (TokenyardError,)),
    "paused": Target(read_paused, paused_records, (ValueError,)),
    "tape": Target(read_tape, tapes, (TokenyardError,)),
    "safetensors": Target(read_safetensors, safetensors, words=(b'"data_offsets":', b'"shape":', b'"dtype":')),
    "config": Target(read_config, configs, (TokenyardError, ValueError, RecursionError)),
    "grammar": Target(read_grammar, lambda: GRAMMARS, (TokenyardError,), (b"%json {", b"/[^a]*/", b"start: ", b" | ")),
    "gguf": Target(in_file(read_gguf, "model.gguf"), gguf_files, (TokenyardError,)),
    "tokenizer": Target(read_tokenizer, tokenizers, (TokenyardError,), (b'"type":', b'"id":', b'"vocab":')),
    "tokenizer-config": Target(read_tokenizer_config, tokenizer_configs, (TokenyardError,)),
    "template": Target(read_template, lambda: TEMPLATES, (TokenyardError,), (b"{% ", b" %}", b"{{ ", b" ** ", b" * 9")),
    "trace": Target(in_file(read_traces, "trace"), traces, (TokenyardError,)),
}
