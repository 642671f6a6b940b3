"""The body of a request for each kind of server, and what an event of its stream contains."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import override

from tokenyard.base import ConfigError
from tokenyard.bench.datasets import DatasetRow


@dataclass(slots=True)
class RequestFuncOutput:
    """The answer so far. Times are seconds since sending.

    sent_s: when it was sent, since the start of the run.
    late_s: how much later than planned.
    gaps_s: seconds between tokens; of an event with several tokens their mean, once per token.
    arrivals: (time, tokens) of each event.
    error: why it failed, "" if it did not.
    """

    service_class: str = ""
    sent_s: float = 0.0
    late_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    def arrived(self, now_s: float, tokens: int) -> None:
        """Record that `tokens` tokens arrived `now_s` after sending."""
        if not self.arrivals:
            self.ttft_s = now_s
        else:
            self.gaps_s += [(now_s - self.latency_s) / tokens] * tokens
        self.latency_s = now_s
        self.arrivals.append((now_s, tokens))


class RequestBackend(Protocol):
    """One kind of server."""

    path: str

    def body(self, prompt: DatasetRow) -> dict[str, Any]:
        """The request's body. Raises ConfigError for content that this kind does not accept."""

    def read(self, event: dict[str, Any], answer: RequestFuncOutput) -> int:
        """Read an event into `answer`; returns the number of tokens in it."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields that all requests share."""

    model: str
    ignore_eos: bool
    extra: dict[str, Any]


class NativeBackend(RequestBackend):
    """`/generate` of Tokenyard and SGLang: cumulative text, and token counts in every event."""

    path = "/generate"

    def __init__(self, options: RequestOptions) -> None:
        self._options = options

    @override
    def body(self, prompt: DatasetRow) -> dict[str, Any]:
        content = prompt.content
        sampling = {"temperature": 0.0, "max_new_tokens": prompt.output_tokens, "ignore_eos": self._options.ignore_eos}
        if isinstance(content, list) and isinstance(content[0], dict):
            raise ConfigError("/generate takes no messages; choose --backend openai-chat for this data set")
        name = "text" if isinstance(content, str) else "input_ids"
        return {name: content, "sampling_params": sampling, "stream": True, **self._options.extra, **prompt.extra}

    @override
    def read(self, event: dict[str, Any], answer: RequestFuncOutput) -> int:
        meta = event["meta_info"]
        new = int(meta["completion_tokens"]) - answer.output_tokens
        answer.prompt_tokens = int(meta["prompt_tokens"])
        answer.cached_tokens = int(meta.get("cached_tokens") or 0)
        answer.output_tokens += new
        answer.text = event.get("text") or ""
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            answer.error = str(meta["finish_reason"].get("message") or "the request was aborted")
        return new


class CompletionsBackend(RequestBackend):
    """`/v1/completions`: takes text or token ids; one piece of text per event, counts at the end."""

    path = "/v1/completions"

    def __init__(self, options: RequestOptions) -> None:
        self._options = options

    @override
    def body(self, prompt: DatasetRow) -> dict[str, Any]:
        if isinstance(prompt.content, list) and isinstance(prompt.content[0], dict):
            raise ConfigError("/v1/completions takes no messages; choose --backend openai-chat for this data set")
        return {"prompt": prompt.content, **self._common(prompt)}

    def _common(self, prompt: DatasetRow) -> dict[str, Any]:
        return {
            "model": self._options.model,
            "max_tokens": prompt.output_tokens,
            "temperature": 0.0,
            "ignore_eos": self._options.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.extra,
            **prompt.extra,
        }

    @override
    def read(self, event: dict[str, Any], answer: RequestFuncOutput) -> int:
        """An event counts as one token; the usage at the end corrects the total."""
        if usage := event.get("usage"):
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.output_tokens = int(usage["completion_tokens"])
            answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        pieces = [self._piece(choice) for choice in event.get("choices") or ()]
        answer.text += "".join(pieces)
        new = sum(map(bool, pieces))
        if not event.get("usage"):
            answer.output_tokens += new
        return new

    def _piece(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class ChatBackend(CompletionsBackend):
    """`/v1/chat/completions`: takes messages; text is sent as one message of the user."""

    path = "/v1/chat/completions"

    @override
    def body(self, prompt: DatasetRow) -> dict[str, Any]:
        content = prompt.content
        if isinstance(content, list) and isinstance(content[0], int):
            raise ConfigError("chat takes no token ids; choose --backend openai, or a data set of text")
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"messages": messages, **self._common(prompt)}

    def _piece(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


BACKENDS: dict[str, type[NativeBackend] | type[CompletionsBackend]] = {
    "tokenyard": NativeBackend,
    "sglang": NativeBackend,
    "openai": CompletionsBackend,
    "vllm": CompletionsBackend,
    "sglang-oai": CompletionsBackend,
    "openai-chat": ChatBackend,
    "vllm-chat": ChatBackend,
    "sglang-oai-chat": ChatBackend,
}
