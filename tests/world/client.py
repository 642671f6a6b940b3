"""Clients that know the true answer: its tokens are a function of prompt and position (`executor/mock.py`)."""

import asyncio
import functools
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.world import divided_model
from tests.world.engine import MODEL, adapter_folder, text_side
from tokenyard.base import WeightSource
from tokenyard.executor.kv_ownership_check import history_marks, mix
from tokenyard.executor.mock import load_executor
from tokenyard.kv_layout.model_digest import adapter_digest

INFO = load_executor(MODEL).info


def true_tokens(prompt: list[int], count: int, adapter: str = "", weights: str = "") -> list[int]:
    """The greedy answer to a prompt. It has no eos, so its length is the one that was asked for.

    adapter: the name of a LoRA adapter.
    weights: the folder of the weights in use, "" for those that the engines start with.
    """
    key = mix(history_marks(np.array(prompt, np.int32), adapter=adapter and adapter_key(adapter))[-1:])
    positions = np.arange(len(prompt), len(prompt) + count, dtype=np.uint64)
    if weights:
        positions += np.uint64(zlib.crc32(load_executor(MODEL).prepare_weights(WeightSource(weights)).encode()))
    tokens = (mix(key + positions) % np.uint64(INFO.vocab_size)).astype(np.int64)
    for _ in INFO.eos_token_ids:
        tokens += np.isin(tokens, INFO.eos_token_ids)
        tokens %= INFO.vocab_size
    return tokens.tolist()


def is_prefix(
    tokens: list[int], prompt: list[int], count: int, adapter: str, weights: tuple[str, ...], *, divided: bool
) -> bool:
    """Whether tokens begin a true answer, each being one that some of the weights choose."""
    if len(tokens) > count:
        return False
    if not divided:
        truths = zip(*(true_tokens(prompt, len(tokens), adapter, folder) for folder in weights), strict=True)
        return all(token in possible for token, possible in zip(tokens, truths, strict=True))
    answer = divided_model.Answer(prompt, INFO)
    for token in tokens:
        if all(token != answer.next(folder) for folder in weights):
            return False
        answer.take(token)
    return True


def answer_of(ask: "Ask") -> list[int]:
    """A true answer, by the weights of the start."""
    if not ask.divided:
        return true_tokens(ask.prompt_ids(), ask.tokens, ask.adapter)
    answer, tokens = divided_model.Answer(ask.prompt_ids(), INFO), list[int]()
    for _ in range(ask.tokens):
        tokens.append(answer.next(""))
        answer.take(tokens[-1])
    return tokens


@functools.cache
def adapter_key(name: str) -> str:
    """What engines call an adapter."""
    return f"{name}#{adapter_digest(adapter_folder(name))}"


def true_text(tokens: list[int]) -> str:
    """Their text, as one decode gives it."""
    return str(text_side(MODEL)[0].decode(tokens, skip_special_tokens=True))


@dataclass
class Ask:
    """What a client asks for, and how it behaves.

    leaves_after: tokens after which it hangs up; None for never.
    slow_s: seconds it takes before each read.
    chat: the content of a message, instead of the prompt's ids.
    n: how many answers. Greedy ones are all the same.
    priority: as in the API; other requests may preempt it.
    adapter: a LoRA adapter; "" for none.
    regex: a grammar, which the mock executor compiles and does not follow; "" for none.
    session: the session that it is a turn of; "" for none.
    closes: whether the client closes the session after the answer.
    weights: the weights that engines may have in turn while it runs, as folders; "" for those of the start.
    divided: whether the model is that of ranks (`divided_model.py`) in place of the mock's.
    """

    number: int
    at_s: float
    prompt: list[int]
    tokens: int
    stream: bool = True
    leaves_after: int | None = None
    slow_s: float = 0.0
    router: int = 0
    chat: str = ""
    n: int = 1
    priority: int = 0
    adapter: str = ""
    regex: str = ""
    session: str = ""
    closes: bool = False
    weights: tuple[str, ...] = ("",)
    divided: bool = False

    @property
    def path(self) -> str:
        """The API that it uses."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The fields that it sends."""
        fields = {"messages": [{"role": "user", "content": self.chat}]} if self.chat else {"prompt": self.prompt}
        fields |= {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": not self.regex, "stream": self.stream}
        fields |= {"return_token_ids": True, "n": self.n, "priority": self.priority}
        fields |= {"model": self.adapter} if self.adapter else {}
        fields |= {"regex": self.regex} if self.regex else {}
        fields |= {"session_id": self.session} if self.session else {}
        return fields | ({"stream_options": {"include_usage": True}} if self.stream else {})

    def prompt_ids(self) -> list[int]:
        """The prompt as the engine computes it."""
        if not self.chat:
            return self.prompt
        tokenizer, template = text_side(MODEL)
        text = template.render([{"role": "user", "content": self.chat}])
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def __str__(self) -> str:
        how = "stream" if self.stream else "whole"
        if self.leaves_after is not None:
            how += f", leaves after {self.leaves_after}"
        size = f"{len(self.prompt_ids())} + {self.n} x {self.tokens} tokens"
        return f"{self.at_s:.2f} s: request {self.number} to router{self.router}, {size}, {how}"


@dataclass
class Answer:
    """What has come of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


@dataclass
class Seen:
    """What the client saw. `end`: "" while open; done, left, broken, or an error's status and code."""

    ask: Ask
    answers: dict[int, Answer] = field(default_factory=dict)
    end: str = ""
    usage: dict[str, Any] | None = None
    wrong: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return sum(len(answer.tokens) for answer in self.answers.values())


async def run(ask: Ask, seen: Seen, address: tuple[str, int]) -> None:
    """Send the request and read its answer into `seen`."""
    data = json.dumps(ask.body()).encode()
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        seen.end = "broken"
        return
    lines = [f"POST {ask.path} HTTP/1.1", "Host: fleet", "Content-Type: application/json"]
    lines.append(f"Content-Length: {len(data)}\r\n\r\n")
    writer.write("\r\n".join(lines).encode() + data)
    try:
        await _read(ask, seen, reader)
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
        seen.end = "broken"
        if isinstance(error, ValueError):
            seen.wrong.append(f"the answer is no HTTP: {error}")
    finally:
        writer.close()


PASSED_ON = "passed on"
"""How an answer ends that is the last error of an engine of another make, once there are no retries left."""


async def _read(ask: Ask, seen: Seen, reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ")[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    if "content-length" in headers:
        raw = await reader.readexactly(int(headers["content-length"]))
        if status >= 500 and not raw.startswith(b"{"):
            seen.end = f"{status} {PASSED_ON}"
            return
        body = json.loads(raw)
        if status != 200:
            seen.end = f"{status} {body['error'].get('code')}: {body['error'].get('message')}"
            return
        if ask.stream:
            seen.wrong.append("no stream")
        _take(seen, body)
        seen.usage, seen.end = body.get("usage"), "done"
        return
    if status != 200:
        raise ValueError(f"status {status} with a stream")
    await _read_stream(ask, seen, reader)


async def _read_stream(ask: Ask, seen: Seen, reader: asyncio.StreamReader) -> None:
    text, done = b"", False
    while True:
        if ask.slow_s:
            await asyncio.sleep(ask.slow_s)
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        piece = (await reader.readexactly(size + 2))[:-2]
        if not size:
            break
        text += piece
        *events, text = text.split(b"\n\n")
        for event in events:
            if done:
                seen.wrong.append("an event after the end")
            done = _event(seen, event)
            if seen.end:
                return
        if ask.leaves_after is not None and seen.token_count >= ask.leaves_after:
            seen.end = "left"
            return
    if text or not done:
        seen.wrong.append("the stream ends without [DONE]")
    seen.end = "done"


def _event(seen: Seen, event: bytes) -> bool:
    """Take one event; whether it is the last."""
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return True
    fields = json.loads(data)
    if "error" in fields:
        seen.end = f"event {fields['error'].get('code')}"
        return False
    if fields.get("usage"):
        seen.usage = fields["usage"]
    if fields["choices"]:
        _take(seen, fields)
    return False


def _take(seen: Seen, fields: dict[str, Any]) -> None:
    for choice in fields["choices"]:
        answer = seen.answers.setdefault(choice["index"], Answer())
        part = choice.get("delta") or choice.get("message") or {}
        text, tokens = choice.get("text") or part.get("content") or "", choice.get("token_ids") or []
        if answer.finish is not None and (text or tokens):
            seen.wrong.append("output after its finish")
        answer.text += text
        answer.tokens += tokens
        if choice.get("finish_reason") is not None:
            if answer.finish is not None:
                seen.wrong.append("two finish reasons")
            answer.finish = choice["finish_reason"]


async def post(address: tuple[str, int], path: str, body: dict[str, Any]) -> int:
    """Call a control route; returns the status, 0 if nothing answers."""
    data = json.dumps(body).encode()
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return 0
    lines = [f"POST {path} HTTP/1.1", f"Host: {address[0]}", "Content-Type: application/json", "Connection: close"]
    lines.append(f"Content-Length: {len(data)}\r\n\r\n")
    writer.write("\r\n".join(lines).encode() + data)
    try:
        return int((await reader.readuntil(b"\r\n")).split(b" ")[1])
    except (asyncio.IncompleteReadError, OSError):
        return 0
    finally:
        writer.close()


def violations(seen: Seen) -> list[str]:
    """What is wrong with an answer, whatever happened to the fleet."""
    ask, found, prompt = seen.ask, list(seen.wrong), seen.ask.prompt_ids()
    for answer in seen.answers.values():
        if not is_prefix(answer.tokens, prompt, ask.tokens, ask.adapter, ask.weights, divided=ask.divided):
            found.append(f"tokens {answer.tokens[:8]}... are not a prefix of {answer_of(ask)[:8]}...")
        elif seen.end == "done":
            found += _incomplete(answer, ask.tokens)
    if seen.end == "done":
        usage, wanted = seen.usage or {}, (len(prompt), ask.n * ask.tokens)
        if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != wanted:
            found.append(f"usage {usage}")
        if not 0 <= usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) <= ask.n * len(prompt):
            found.append(f"cached tokens in {usage}")
        if len(seen.answers) != ask.n:
            found.append(f"{len(seen.answers)} of {ask.n} answers")
    return [f"request {ask.number}: {text}" for text in found]


def _incomplete(answer: Answer, count: int) -> list[str]:
    """What is wrong with an answer of right tokens that has ended well."""
    found, text = [], true_text(answer.tokens)
    if len(answer.tokens) < count:
        found.append(f"{len(answer.tokens)} of {count} tokens")
    if answer.text != text:
        found.append(f"text {answer.text[:40]!r} instead of {text[:40]!r}")
    if answer.finish != "length":
        found.append(f"finish reason {answer.finish}")
    return found
