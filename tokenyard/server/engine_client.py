"""The engine as the server sees it: two protocols, both of which `engine.TokenizerManager` implements.

Handlers that answer requests need `GenerateClient` only; probes and levers need `ControlClient` only.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from tokenyard.base import AbortCause, Explanation, Int32Array, PauseMode
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.paused_requests import PausedRequests
from tokenyard.engine.frontend.streams import Ended, Reader


class LoraAdapterView(Protocol):
    """A LoRA adapter that is loaded."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def key(self) -> str:
        """Name and digest of its files."""

    @property
    def folder(self) -> str:
        """Where it was read."""


class LoraRegistryView(Protocol):
    """The LoRA adapters, which `engine.frontend.lora_registry.LoraRegistry` keeps."""

    @property
    def loaded(self) -> Mapping[str, LoraAdapterView]:
        """Those that requests may name, by name."""

    async def load(self, name: str, folder: str) -> LoraAdapterView:
        """Load one. Raises ConfigError for one that cannot be served."""

    async def unload(self, name: str) -> None:
        """Free one when its requests have ended. Raises InvalidRequestError if there is none of that name."""


class GenerateClient(Protocol):
    """Answers requests. All methods raise EngineDeadError once the engine has gone."""

    @property
    def adapters(self) -> LoraRegistryView:
        """The LoRA adapters."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where the engine takes and gives token ids only."""

    @property
    def records(self) -> PausedRequests | None:
        """The paused requests that outlive the engine; None where none do."""

    @property
    def template_sources(self) -> Mapping[str, str]:
        """The Jinja sources of the chat templates by name."""

    @property
    def response_template(self) -> Any:
        """What the checkpoint itself says of how the model writes, None where it does not."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def max_prompt_bytes(self) -> int:
        """Most bytes of text that a prompt can have."""

    async def tokenize(self, text: str, add_special_tokens: bool, *, allow_too_long: bool = False) -> Int32Array:
        """The token ids of a text, int32[n]; with `allow_too_long` also of one that is too long for a prompt.

        Raises InvalidRequestError without a tokenizer and ContextLengthError beyond what is taken.
        """

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; `options` are those of `ChatTemplate.render`. Raises InvalidRequestError."""

    async def feed(self, spec: GenerateReqInput, reader: Reader, ended: Ended) -> None:
        """Answer one request and give each delta to `reader`; tell `ended` of ends that the reader does not see.

        Cancelling it cancels the request. Raises InvalidRequestError for a wrong spec, and what `reader` raises.
        """


class ControlClient(Protocol):
    """Watches and steers the engine. All coroutines raise EngineDeadError once the engine has gone."""

    async def abort(self, rid: str | None = None, cause: AbortCause = "cancelled") -> None:
        """End one request, or all."""

    async def update(self, rid: str, *, priority: int | None = None, deadline_ms: float | None = None) -> bool:
        """Change how urgent a request is; False if there is none."""

    async def pause_request(self, rid: str) -> bool:
        """Hold one request back; False if there is none."""

    async def resume_request(self, rid: str) -> bool:
        """Let it go on; False if there is none."""

    async def explain(self, rid: str) -> list[Explanation]:
        """Where the time of each answer went; empty if the request is not known."""

    def recent_rids(self) -> list[str]:
        """The ids of requests that are open or ended not long ago."""

    def rid_of(self, number: int) -> str | None:
        """The id of the request with this number."""

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop working."""

    async def continue_(self) -> None:
        """Go on."""

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order the queue by another policy. Raises ConfigError if that cannot be."""

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False if requests are there."""

    async def clear_store(self) -> int:
        """Forget all KV below the device; returns how many blocks that was."""

    async def snapshot(self, timeout_s: float = 2.0) -> Mapping[str, Any]:
        """Counters of the scheduler, not quite new ones if it does not answer in time."""

    async def watch(self, *, prefixes: bool, bins: int) -> list[dict[str, Any]]:
        """What a live page shows of each scheduler now, and of its latest steps. Raises OverloadedError without an
        answer in time.
        """

    async def rank_snapshots(self, timeout_s: float = 2.0) -> Mapping[int, Mapping[str, Any]]:
        """The same of each data-parallel rank that runs, by its number; `snapshot` is their sum."""

    def lost_schedulers(self) -> int:
        """How many schedulers have ended so far, each with its cache."""

    def rank_ages_s(self) -> Mapping[int, float]:
        """Age of the last heartbeat of every rank in seconds; infinite for one that does not run."""

    async def start_profile(self) -> bool:
        """Begin a timeline of the steps; False if one runs."""

    async def stop_profile(self) -> bytes | None:
        """End it and return its events as a JSON list; None if none runs."""

    def health(self) -> float:
        """Age of the last heartbeat in seconds, that of the rank that is best; infinite if the engine died."""


class EngineClient(GenerateClient, ControlClient, Protocol):
    """Both."""
