"""Continues a stream on another worker when its worker fails. Pure.

The router requests the token ids of a stream (and removes them if the client did not request them), so that it can
send the output so far to another worker.

Tokenyard engines get the same request with `output_ids`, the tokens so far: penalties, stops, limits, grammar and usage
count from the beginning of the output. Other engines, if they also return the prompt's token ids, are asked to complete
prompt and output as one prompt. That is correct for greedy output within the engine's own determinism, if no option
depends on where the output began.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tokenyard.router.http1 import WireError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_EVENT_BYTES = 8 << 20
BY_OUTPUT_IDS, BY_PROMPT_IDS = "output_ids", "prompt_ids"
"""The ways in which an engine can go on with an answer."""

_IDS = re.compile(rb',\s*"(prompt_)?token_ids":\s*(?:\[([\d,\s]*)\]|null)')
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_CHOICES = b'"choices":'
_PREFIX = b"data: "
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


def continuation_mode(path: str, fields: Mapping[str, Any], *, ours: bool, foreign: bool) -> str:
    """How a response to this body can be continued, "" if it cannot.

    ours: whether Tokenyard engines can continue it.
    foreign: whether other engines that return token ids can.
    """
    if path not in (CHAT, COMPLETIONS) or fields.get("stream") is not True or fields.get("n") not in (None, 1):
        return ""
    if fields.get("return_token_ids") is False or "output_ids" in fields:
        return ""
    prompt = fields.get("prompt")
    if path == COMPLETIONS and not (isinstance(prompt, str) or _is_ids(prompt)):
        return ""
    if ours:
        return BY_OUTPUT_IDS
    plain = not any(fields.get(name) for name in _LOOK_BACK)
    return BY_PROMPT_IDS if foreign and plain else ""


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


class Continuation:
    """Follows one stream: the output so far, and how to continue it."""

    def __init__(self, path: str, fields: Mapping[str, Any], way: str) -> None:
        self.way = way
        self.tokens: list[int] = []
        self.finished = self.done = False
        self._path, self._fields = path, fields
        self._strip = fields.get("return_token_ids") is not True
        self._prompt_ids: list[int] | None = None
        self._head: bytes | None = None
        self._held = b""
        self._before = 0
        self._has_offsets = path == COMPLETIONS and fields.get("logprobs") is not None
        self._offset = self._next_offset = 0
        self._continued = self._was_finished = False

    @property
    def extra(self) -> dict[str, Any]:
        """Fields to add to the client's body."""
        found: dict[str, Any] = {"return_token_ids": True} if self._strip else {}
        if self._continued:
            found["output_ids"] = self.tokens
        return found

    def can_resume(self, context_length: int | None) -> bool:
        """Whether enough is known to continue elsewhere. `context_length`: of the model, None if unknown."""
        if self.done or self._head is None:
            return False
        return self.way == BY_OUTPUT_IDS or (
            self._prompt_ids is not None and not self.finished and self._max_tokens_left(context_length) is not None
        )

    def resume_stream(self) -> None:
        """Prepare to continue on another worker: discard an incomplete event of the first one."""
        self._continued, self._held = True, b""
        self._before, self._was_finished = len(self.tokens), self.finished
        self._offset = self._next_offset

    def prompt_body(self, context_length: int | None) -> bytes:
        """The body with which an engine other than Tokenyard continues, for `COMPLETIONS`."""
        body = {name: self._fields[name] for name in _SAMPLING if self._fields.get(name) is not None}
        body |= {
            "prompt": [*(self._prompt_ids or []), *self.tokens],
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
        left = asked - len(self.tokens)
        return left if left > 0 else None

    def feed(self, data: bytes) -> bytes:
        """Consume a piece of the stream; returns the events to forward. Raises WireError for an oversized event."""
        data = self._held + data if self._held else data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            if len(data) > MAX_EVENT_BYTES:
                raise WireError("the worker's stream has an endless event")
            self._held = data
            return b""
        self._held = data[end:]
        return b"".join([self._event(event) for event in data[:end].split(b"\n\n")[:-1]])

    def _event(self, event: bytes) -> bytes:
        """One event to forward to the client, b"" for none."""
        if not event.startswith(_PREFIX) or event == b"data: [DONE]":
            self.done = self.done or event == b"data: [DONE]"
            return event + b"\n\n"
        plain = self._without_ids(event)
        if self._has_offsets:
            plain = self._shifted(plain)
        finishes = _FINISHED.search(event) is not None
        self.finished = self.finished or finishes
        if not self._continued:
            if self._head is None:
                self._head = event.partition(_CHOICES)[0]
            return plain + b"\n\n"
        if finishes and self._was_finished:
            return b""
        if self.way == BY_PROMPT_IDS:
            return self._translated(plain)
        head, found, rest = plain.partition(_CHOICES)
        if b'"role":"assistant"' in rest and b'"content":""' in rest:
            return b""
        return (self._head or head) + found + rest + b"\n\n" if found else plain + b"\n\n"

    def _without_ids(self, event: bytes) -> bytes:
        """Record the token ids in an event; remove them if the client did not request them."""
        found = False
        for match in _IDS.finditer(event):
            found = True
            if match[2]:
                ids = [int(word) for word in match[2].split(b",")]
                if not match[1]:
                    self.tokens += ids
                elif self._prompt_ids is None:
                    self._prompt_ids = ids
        return _IDS.sub(b"", event) if found and self._strip else event

    def _shifted(self, event: bytes) -> bytes:
        """An event whose `text_offset` counts from the beginning of the whole output."""
        try:
            fields = orjson.loads(event[len(_PREFIX) :])
            logprobs = fields["choices"][0]["logprobs"]
            offsets = [self._offset + offset for offset in logprobs["text_offset"]]
            self._next_offset = offsets[-1] + len(logprobs["tokens"][-1])
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
            return event + b"\n\n"
        head.pop("", None)
        fields |= head
        if self._path == CHAT:
            for choice in fields.get("choices", []):
                choice["delta"] = {"content": choice.pop("text", "")}
        usage = fields.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
            usage["prompt_tokens"] -= self._before
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._before
        return _PREFIX + orjson.dumps(fields) + b"\n\n"
