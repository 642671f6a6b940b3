"""What `LLM` takes and returns: prompts, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Finish,
    FinishReason,
    Int32Array,
    InvalidRequestError,
    OverloadedError,
    TokenLogprobs,
)
from tokenyard.engine.frontend.io_struct import OutputDelta

Conversation = Sequence[Mapping[str, Any]]
"""Messages of role and content, for the model's chat template."""

Prompt = str | Sequence[int] | Conversation


@dataclass(slots=True)
class Completion:
    """One answer (vLLM's `CompletionOutput`).

    finish_reason: stop, length or abort.
    matched: the token or string that stopped it.
    logprobs: those of its tokens, if they were asked for.
    message: the assistant's message as the chat API has it, with reasoning and tool calls apart from the content; None
        unless the conversation has tools or `separate_reasoning`.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    matched: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    message: dict[str, Any] | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt (vLLM's `RequestOutput`).

    latency_s: seconds from submission to the end of the last answer.
    finish: how the last answer ended, as the engine says it.
    """

    prompt: Prompt
    completions: list[Completion]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    latency_s: float = 0.0
    finish: Finish | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text

    def add(self, delta: OutputDelta) -> None:
        """Apply an update of one answer. Raises InvalidRequestError or OverloadedError if the answer was refused."""
        answer, finish = self.completions[delta.index], delta.finish
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        if finish is None:
            return
        if finish.reason == "abort" and finish.cause not in ("", "cancelled"):
            raise InvalidRequestError(finish.message) if finish.cause == "invalid" else OverloadedError(finish.message)
        self.finish = finish
        answer.finish_reason, answer.matched = finish.reason, finish.matched
        self.prompt_tokens, self.cached_tokens = finish.prompt_tokens, finish.cached_tokens
        self.latency_s = max(self.latency_s, (finish.finished_ns - finish.arrival_ns) / NS_PER_S)


def each(value: Any, count: int, what: str) -> Sequence[Any]:
    """One value for each prompt, from a sequence of them or one for all. Raises InvalidRequestError for too few."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {what} for {count} prompts")
    return value


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def token_ids(prompt: Any) -> Int32Array:
    """A prompt as token ids. Raises InvalidRequestError for anything else."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequestError("a prompt must be a text, a list of token ids or a list of messages")
    return ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as a list of prompts."""
    several = hasattr(prompts, "__len__") and not isinstance(prompts, str)
    if not several or (len(prompts) and isinstance(prompts[0], int | np.integer | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
