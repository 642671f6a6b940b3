"""The engine's interface to the server: two protocols, both implemented by `TokenizerManager`.

Handlers of requests need only `GenerateClient`; probes and control routes need only `ControlClient`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from tokenyard.base import AbortCause, Explanation, Int32Array, PauseMode, SessionEnded, TurnEnded
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.frontend.paused_requests import PausedRequests
from tokenyard.engine.frontend.streams import Ended, Reader
from tokenyard.engine.frontend.weight_updates import WeightUpdate, WeightUpdates


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
        """The folder that it was loaded from."""


class LoraRegistryView(Protocol):
    """The LoRA adapters, which `engine.frontend.lora_registry.LoraRegistry` keeps."""

    @property
    def loaded(self) -> Mapping[str, LoraAdapterView]:
        """The adapters that requests may name, by name."""

    async def load(self, name: str, folder: str) -> LoraAdapterView:
        """Load one. Raises ConfigError for one that cannot be served."""

    async def unload(self, name: str) -> None:
        """Unload one once its requests have ended. Raises InvalidRequestError if there is none of that name."""


class GenerateClient(Protocol):
    """Answers requests. All methods raise EngineDeadError once the engine has ended."""

    @property
    def adapters(self) -> LoraRegistryView:
        """The LoRA adapters."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None if the engine takes and returns token ids only."""

    @property
    def records(self) -> PausedRequests | None:
        """The paused requests that outlive the engine; None if records are off."""

    @property
    def template_sources(self) -> Mapping[str, str]:
        """The Jinja sources of the chat templates by name."""

    @property
    def response_template(self) -> Any:
        """The checkpoint's `response_template`, None if it has none."""

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and answer together."""

    @property
    def max_prompt_bytes(self) -> int:
        """Maximum bytes of a text prompt."""

    async def tokenize(self, text: str, add_special_tokens: bool, *, allow_too_long: bool = False) -> Int32Array:
        """The token ids of a text, int32[n]; with `allow_too_long` also of one that exceeds the prompt limit.

        Raises InvalidRequestError without a tokenizer and ContextLengthError for a text that is too long.
        """

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; `options` are those of `ChatTemplate.render`. Raises InvalidRequestError."""

    async def feed(self, spec: GenerateReqInput, reader: Reader, ended: Ended) -> None:
        """Answer one request: write each delta to `reader`, and call `ended` with ends that the reader does not get.

        Cancelling it cancels the request. Raises InvalidRequestError for a wrong spec, and what `reader` raises.
        """

    def end_turn(self, rid: str, event: TurnEnded) -> None:
        """The answer to the request `rid`, a turn of a session, has ended like this."""


class ControlClient(Protocol):
    """Observes and controls the engine. All coroutines raise EngineDeadError once the engine has ended."""

    async def abort(self, rid: str | None = None, cause: AbortCause = "cancelled") -> None:
        """Abort one request, or all."""

    async def update(self, rid: str, *, priority: int | None = None, deadline_ms: float | None = None) -> bool:
        """Change the priority or deadline of a request; False if there is none."""

    async def pause_request(self, rid: str) -> bool:
        """Pause a request; False if there is none."""

    def hold(self, rids: Sequence[str], *, held: bool) -> None:
        """Keep these requests from running, or let them go on; unknown ones are ignored."""

    async def resume_request(self, rid: str) -> bool:
        """Resume a request; False if there is none."""

    async def explain(self, rid: str) -> list[Explanation]:
        """Where the time of each answer went; empty if the request is not known."""

    def recent_rids(self) -> list[str]:
        """The ids of open and recently ended requests."""

    def turn_of(self, rid: str) -> tuple[str, int] | None:
        """The session and the index of the turn that a recent request is; None if it is none."""

    def rid_of(self, number: int) -> str | None:
        """The id of the request with this number."""

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Pause the engine."""

    async def continue_(self) -> None:
        """Continue after `pause`."""

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""

    @property
    def weight_version(self) -> str:
        """The version of the weights in use, "" for those that the engine started with."""

    async def update_weights(self, update: WeightUpdate) -> str:
        """Change the weights, in all ranks or in none; returns their version. Raises ConfigError for weights that do
        not fit or are damaged.
        """

    @property
    def weights(self) -> WeightUpdates:
        """Files of tensors that are sent, and those that wait to be used."""

    async def weight(self, name: str, rows: int) -> Any:
        """The first `rows` rows of a tensor as nested lists. Raises ConfigError if there is none of this name."""

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Change the scheduling policy. Raises ConfigError for an unknown policy or option."""

    async def end_session(self, event: SessionEnded) -> None:
        """A session has no further turns."""

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests wait or run."""

    async def clear_store(self) -> int:
        """Delete all KV in the KV store; returns the number of blocks."""

    async def snapshot(self, timeout_s: float = 2.0) -> Mapping[str, Any]:
        """The schedulers' counters; those of the last heartbeat without an answer in time."""

    async def watch(self, *, prefixes: bool, bins: int) -> list[dict[str, Any]]:
        """The state and the latest steps of each scheduler, for the live page.

        Raises OverloadedError without an answer in time.
        """

    async def rank_snapshots(self, timeout_s: float = 2.0) -> Mapping[int, Mapping[str, Any]]:
        """The same of each data-parallel rank that runs, by its number; `snapshot` is their sum."""

    def lost_schedulers(self) -> int:
        """The number of schedulers that have ended so far; each lost its prefix cache."""

    def rank_ages_s(self) -> Mapping[int, float]:
        """Age of the last heartbeat of every rank in seconds; infinite for one that does not run."""

    async def start_profile(self) -> bool:
        """Start a profile of the steps; False if one is running."""

    async def stop_profile(self) -> bytes | None:
        """End the profile and return its events as a JSON list; None if none is running."""

    def health(self) -> float:
        """Age of the latest heartbeat of any rank in seconds; infinite if the engine has ended."""


class EngineClient(GenerateClient, ControlClient, Protocol):
    """The whole interface."""
