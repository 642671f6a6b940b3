"""Continues a stream on another worker when its worker fails. Pure.

The router requests the token ids of a stream (and removes them if the client did not request them), so that it can
send the output so far to another worker.

Tokenyard engines get the same request with `output_ids`, the tokens so far: penalties, stops, limits, grammar, tool
calls and usage count from the beginning of the output. They send the ids in the last event of each write. The client
gets the events before it together with it, as an engine that continues sends all events whose ids it was not given.

Other engines, if they also return the prompt's token ids, are asked to complete
prompt and output as one prompt. That is correct for greedy output within the engine's own determinism, if no option
depends on where the output began.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tokenyard.router.http1 import WireError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NATIVE, MESSAGES, RESPONSES = "/generate", "/v1/messages", "/v1/responses"
OLLAMA = ("/api/chat", "/api/generate")
OTHER_PATHS = (NATIVE, MESSAGES, RESPONSES, *OLLAMA)
MAX_EVENT_BYTES = 8 << 20
MAX_ANSWERS = 1024
BY_OUTPUT_IDS, BY_PROMPT_IDS, ANY_API = "output_ids", "prompt_ids", "any_api"
"""The ways in which an engine can continue a stream. `ANY_API`: with `output_ids`, those of all APIs and with several
answers; engines of earlier versions continue one answer of a chat or a completion.
"""

_IDS = re.compile(rb',\s*"(prompt_)?token_ids":\s*(?:\[([\d,\s]*)\]|null)')
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_INDEX = re.compile(rb'"choices":\s*\[\{"index":\s*(\d+)')
_NATIVE_INDEX = re.compile(rb'"index":(\d+)\}$')
_SEQUENCE_NUMBER = re.compile(rb'^event: [\w.]+\ndata: \{"type":"[\w.]+","sequence_number":(\d+)')
_CHOICES = b'"choices":'
_PREFIX = b"data: "
_DONE = b"data: [DONE]"
_ENDS = {
    MESSAGES: (b"event: message_stop\n",),
    RESPONSES: (b"event: response.completed\n", b"event: response.incomplete\n"),
}
"""How the last event of a stream begins; `_DONE` elsewhere, and in Ollama's API a line that is `done`."""

_ERRORS = (b"event: error\n", b'data: {"error":', b'{"error":')
_PASSING_ERROR = re.compile(rb'"code":"(?:draining|engine_dead)"|"type":"overloaded_error"')
"""An error of the engine, not of the request: the stream continues elsewhere."""

_LOOK_BACK = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "response_format", "tools"),
    *("functions", "logprobs", "top_logprobs", "echo", "suffix", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "reasoning_effort", "chat_template_kwargs", "logits_processors", "bad_words"),
)
"""What another engine would judge wrongly when the answer so far is a part of its prompt, or tell in another form."""

_SAMPLING = (
    *("model", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "ignore_eos"),
    *("logit_bias", "skip_special_tokens", "stream_options", "priority", "user", "cache_salt", "lora_path"),
)


def continuation_mode(path: str, fields: Mapping[str, Any], way: str) -> str:
    """How a response to this body can be continued by engines that continue streams in this `way`, "" if it cannot."""
    if not way or not wants_stream(path, fields) or fields.get("return_token_ids") is False or "output_ids" in fields:
        return ""
    if path in OTHER_PATHS:
        return way if way == ANY_API and _continues_other(path, fields) else ""
    if path not in (CHAT, COMPLETIONS) or (_answers(path, fields) != 1 and way != ANY_API):
        return ""
    prompt = fields.get("prompt")
    if path == COMPLETIONS and not (isinstance(prompt, str) or _is_ids(prompt)):
        return ""
    return way if way != BY_PROMPT_IDS or not any(fields.get(name) for name in _LOOK_BACK) else ""


def wants_stream(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether the response is a stream, which is the default of Ollama's API."""
    stream = fields.get("stream")
    return stream is not False if path in OLLAMA else stream is True


def _continues_other(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether an engine has all that it needs to continue a stream of `OTHER_PATHS`: not what another one stored, nor
    log-probabilities of tokens that it did not sample.
    """
    if path == NATIVE:
        text, ids = fields.get("text"), fields.get("input_ids")
        return not fields.get("return_logprob") and (isinstance(text, str) or _is_ids(ids))
    return path != RESPONSES or not fields.get("previous_response_id")


def _answers(path: str, fields: Mapping[str, Any]) -> int:
    """The number of answers that a body asks for; 0 for an invalid one."""
    if path == NATIVE:
        sampling = fields.get("sampling_params")
        fields = sampling if isinstance(sampling, dict) else {}
    n = fields.get("n") if path in (NATIVE, CHAT, COMPLETIONS) else 1
    return 1 if n is None else n if type(n) is int and 0 < n <= MAX_ANSWERS else 0


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


class Continuation:
    """Follows one stream: the output so far, and how to continue it.

    outputs: the tokens so far of each answer.
    done: whether the stream has ended.
    """

    def __init__(self, path: str, fields: Mapping[str, Any], way: str) -> None:
        self.way = way
        answers = max(1, _answers(path, fields))
        self.outputs: list[list[int]] = [[] for _ in range(answers)]
        self.done = False
        self._path, self._fields = path, fields
        self._strip = fields.get("return_token_ids") is not True
        self._separator = b"\n" if path in OLLAMA else b"\n\n"
        self._ends = _ENDS.get(path, (_DONE,))
        self._prompt_ids: list[int] | None = None
        self._head: bytes | None = None
        self._response: dict[str, Any] = {}
        self._held = b""
        self._unconfirmed: list[bytes] = []
        self._last_native: dict[int, bytes] = {}
        self._before = 0
        self._begun = self._continued = False
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self._seen_before: frozenset[int] = frozenset()
        self._finished_before: frozenset[int] = frozenset()
        self._has_offsets = path == COMPLETIONS and fields.get("logprobs") is not None
        self._offsets, self._next_offsets = [0] * answers, [0] * answers

    @property
    def extra(self) -> dict[str, Any]:
        """Fields to add to the client's body."""
        found: dict[str, Any] = {"return_token_ids": True} if self._strip and self._path != NATIVE else {}
        if self._continued:
            found["output_ids"] = self.outputs[0] if len(self.outputs) == 1 else self.outputs
            if self._response:
                found["continued_response"] = self._response
        return found

    @property
    def token_count(self) -> int:
        """The number of tokens so far."""
        return sum(map(len, self.outputs))

    def can_resume(self, context_length: int | None) -> bool:
        """Whether enough is known to continue elsewhere. `context_length`: of the model, None if unknown."""
        if self.done or not self._begun or not self._read_native():
            return False
        return self.way != BY_PROMPT_IDS or (
            self._prompt_ids is not None and not self._finished and self._max_tokens_left(context_length) is not None
        )

    def _read_native(self) -> bool:
        """Take the tokens so far from the last event of each answer, which holds all; whether they are there."""
        for index, event in self._last_native.items():
            try:
                ids = orjson.loads(event[len(_PREFIX) :])["output_ids"]
            except (orjson.JSONDecodeError, LookupError, TypeError):
                return False
            if not isinstance(ids, list):
                return False
            self.outputs[index] = ids
        return True

    def resume_stream(self) -> None:
        """Prepare to continue on another worker: discard what the first one did not complete."""
        self._continued, self._held, self._unconfirmed = True, b"", []
        self._before = len(self.outputs[0])
        self._seen_before, self._finished_before = frozenset(self._seen), frozenset(self._finished)
        self._offsets = list(self._next_offsets)

    def prompt_body(self, context_length: int | None) -> bytes:
        """The body with which an engine other than Tokenyard continues, for `COMPLETIONS`."""
        body = {name: self._fields[name] for name in _SAMPLING if self._fields.get(name) is not None}
        body |= {
            "prompt": [*(self._prompt_ids or []), *self.outputs[0]],
            "max_tokens": self._max_tokens_left(context_length),
        }
        return orjson.dumps({**body, "stream": True, "return_token_ids": True})

    def _max_tokens_left(self, context_length: int | None) -> int | None:
        """The number of tokens left for the output; None if it is unknown or zero."""
        asked = self._fields.get("max_completion_tokens", self._fields.get("max_tokens"))
        if not isinstance(asked, int):
            if context_length is None:
                return None
            asked = context_length - len(self._prompt_ids or [])
        left = asked - len(self.outputs[0])
        return left if left > 0 else None

    def feed(self, data: bytes) -> bytes:
        """Consume a piece of the stream; returns the events to forward.

        Raises WireError for an oversized event, and for one that no engine of this API sends.
        """
        data, separator = self._held + data if self._held else data, self._separator
        end = data.rfind(separator) + len(separator)
        if end < len(separator):
            if len(data) > MAX_EVENT_BYTES:
                raise WireError("the worker's stream has an endless event")
            self._held = data
            return b""
        self._held = data[end:]
        try:
            return b"".join([self._event(event) for event in data[:end].split(separator)[:-1]])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise WireError(f"the worker's stream has an event that makes no sense: {error}") from error

    def _event(self, event: bytes) -> bytes:
        """The events to forward to the client now that this one has come, b"" for none."""
        if self._path in (CHAT, COMPLETIONS):
            index, passed, confirmed = self._chunk(event)
        else:
            index, passed, confirmed = self._other_event(event)
        if event.startswith(_ERRORS):
            self.done = _PASSING_ERROR.search(event) is None
        elif event.startswith(self._ends) or (self._path in OLLAMA and b'"done":true' in event):
            self.done = True
        self._unconfirmed.append(passed + self._separator if passed else b"")
        if not (confirmed or self.done or self.way == BY_PROMPT_IDS):
            return b""
        self._begun = True
        self._seen.add(index)
        found, self._unconfirmed = b"".join(self._unconfirmed), []
        return found

    def _other_event(self, event: bytes) -> tuple[int, bytes, bool]:
        """(index of the answer, the event to forward, whether the tokens of all events so far are known)."""
        if self._path == NATIVE:
            found = _NATIVE_INDEX.search(event[-16:])
            index = int(found[1]) if found else 0
            if event.startswith(b'data: {"text":') and index < len(self.outputs):
                self._last_native[index] = event
            return index, event, not event.startswith(_ERRORS)
        plain, confirmed = self._without_ids(event, 0)
        if self._path == RESPONSES and (number := _SEQUENCE_NUMBER.match(plain)) is not None:
            if not self._response and plain.startswith(b"event: response.created\n"):
                created = orjson.loads(plain.partition(b"\ndata: ")[2])["response"]
                self._response = {"id": created["id"], "created_at": created["created_at"]}
            if confirmed:
                self._response["sequence_number"] = int(number[1]) + 1
        return 0, plain, confirmed

    def _chunk(self, event: bytes) -> tuple[int, bytes, bool]:
        """The same of a chunk of a chat or a completion."""
        if not event.startswith(_PREFIX) or event == _DONE:
            return 0, event, False
        found = _INDEX.search(event)
        index = min(int(found[1]), len(self.outputs) - 1) if found else 0
        plain, confirmed = self._without_ids(event, index)
        if self._has_offsets:
            plain = self._shifted(plain, index)
        finishes = _FINISHED.search(event) is not None
        if finishes:
            self._finished.add(index)
        if not self._continued:
            if self._head is None:
                self._head = event.partition(_CHOICES)[0]
            return index, plain, confirmed
        if finishes and index in self._finished_before:
            return index, b"", confirmed
        if self.way == BY_PROMPT_IDS:
            return index, self._translated(plain), confirmed
        head, choices, rest = plain.partition(_CHOICES)
        if index in self._seen_before and b'"role":"assistant"' in rest and b'"content":""' in rest:
            return index, b"", confirmed
        return index, (self._head or head) + choices + rest if choices else plain, confirmed

    def _without_ids(self, event: bytes, index: int) -> tuple[bytes, bool]:
        """Record the token ids in an event and remove them if the client did not request them; whether it has any."""
        found = False
        for match in _IDS.finditer(event):
            if not match[1]:
                found = True
            if match[2]:
                ids = [int(word) for word in match[2].split(b",")]
                if not match[1]:
                    self.outputs[index] += ids
                elif self._prompt_ids is None:
                    self._prompt_ids = ids
        return (_IDS.sub(b"", event) if self._strip else event), found

    def _shifted(self, event: bytes, index: int) -> bytes:
        """An event whose `text_offset` counts from the beginning of the whole output."""
        try:
            fields = orjson.loads(event[len(_PREFIX) :])
            logprobs = fields["choices"][0]["logprobs"]
            offsets = [self._offsets[index] + offset for offset in logprobs["text_offset"]]
            self._next_offsets[index] = offsets[-1] + len(logprobs["tokens"][-1])
        except (orjson.JSONDecodeError, LookupError, TypeError):
            return event
        if not self._continued:
            return event
        logprobs["text_offset"] = offsets
        return _PREFIX + orjson.dumps(fields)

    def _translated(self, event: bytes) -> bytes:
        """Convert an event of the continuing completion into an event of the original response."""
        try:
            fields = orjson.loads(event[len(_PREFIX) :])
            head = orjson.loads(self._head[len(_PREFIX) :] + b'"":0}') if self._head else {}
        except orjson.JSONDecodeError:
            raise WireError("the worker's stream has an event that is no JSON") from None
        if "error" in fields:
            return event
        head.pop("", None)
        fields |= head
        if self._path == CHAT:
            for choice in fields.get("choices", []):
                choice["delta"] = {"content": choice.pop("text", "")}
        usage = fields.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
            usage["prompt_tokens"] -= self._before
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._before
        return _PREFIX + orjson.dumps(fields)
