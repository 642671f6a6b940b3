"""Generation without a server: `LLM` runs an engine in this process, behind the server's `TokenizerManager`."""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer

from tokenyard import base
from tokenyard.base import (
    NS_PER_S,
    ConfigError,
    EngineDeadError,
    ExecutorInfo,
    FinishReason,
    Int32Array,
    InvalidRequestError,
    OverloadedError,
    TextOptions,
)
from tokenyard.config import Settings
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.sampling_defaults import read_sampling_defaults
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.child import set_library_environment
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.in_process import engine_in_process
from tokenyard.wiring import engine_config, with_model_folder

Conversation = Sequence[Mapping[str, Any]]
"""Messages of role and content, for the model's chat template."""

Prompt = str | Sequence[int] | Conversation
T = TypeVar("T")


class SamplingParams(base.SamplingParams):
    """How tokens are sampled and when to stop: the fields of `base.SamplingParams`, in the forms a caller may give.

    `max_tokens` is another name for `max_new_tokens`, and `stop` may be a single string. Without a `seed` each request
    draws one, so that equal prompts get different answers unless sampling is greedy.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        **others: Any,
    ) -> None:
        """Raises TypeError for a field that does not exist."""
        if max_tokens is not None:
            others["max_new_tokens"] = max_tokens
        stops = [stop] if isinstance(stop, str) else list(stop)
        super().__init__(stop=stops, seed=seed, **others)  # type: ignore[arg-type]


@dataclass(slots=True)
class Completion:
    """One answer (vLLM's `CompletionOutput`).

    finish_reason: stop, length or abort.
    matched: the token or string that stopped it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    matched: int | str | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt (vLLM's `RequestOutput`).

    latency_s: seconds from submission to the end of the last answer.
    """

    prompt: Prompt
    completions: list[Completion]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    latency_s: float = 0.0

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text

    def add(self, delta: OutputDelta) -> None:
        """Apply an update of one answer. Raises InvalidRequestError or OverloadedError if the answer was refused."""
        answer, finish = self.completions[delta.index], delta.finish
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        if finish is None:
            return
        if finish.reason == "abort" and finish.cause not in ("", "cancelled"):
            raise InvalidRequestError(finish.message) if finish.cause == "invalid" else OverloadedError(finish.message)
        answer.finish_reason, answer.matched = finish.reason, finish.matched
        self.prompt_tokens, self.cached_tokens = finish.prompt_tokens, finish.cached_tokens
        self.latency_s = max(self.latency_s, (finish.finished_ns - finish.arrival_ns) / NS_PER_S)


class LLM:
    """A model in this process (vLLM's `LLM`, SGLang's `Engine`). Use it as a context manager, or call `close`.

    Any thread may call its methods.

    `model` is a folder (the demo model if absent); `settings` are fields of `tokenyard.config.Settings`, such as
    device="cpu" or schedule_policy="lpm". Raises ConfigError for settings or a model that cannot work.

    Prompts are texts, token ids or conversations. Where a method takes sampling params, fields of `SamplingParams` may
    be given by name as well: they override the params' own, or the model's defaults if there are no params.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        given = {"model_path": os.fspath(model), **settings}
        try:
            Settings(**given)
            chosen = msgspec.convert(given, Settings)
        except TypeError as error:
            raise ConfigError(f"unknown setting: {error}") from error
        except msgspec.ValidationError as error:
            raise ConfigError(f"a setting has the wrong type: {error}") from error
        self._start(chosen)

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLM":
        """An LLM with existing `Settings`."""
        llm = cls.__new__(cls)
        llm._start(settings)
        return llm

    def _start(self, settings: Settings) -> None:
        """Load the model, and serve it from a thread with an event loop."""
        set_library_environment()
        self.settings = with_model_folder(settings)
        self._defaults = read_sampling_defaults(self.settings.model_path, self.settings.sampling_defaults)
        config = engine_config(self.settings)
        started: Future[TokenizerManager] = Future()
        self._answering: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run_loop, args=(config, started), name="tokenyard-front", daemon=True
        )
        self._thread.start()
        self._manager = started.result()
        atexit.register(self.close)

    def _run_loop(self, config: EngineConfig, started: "Future[TokenizerManager]") -> None:
        """Run `_serve` on a new event loop.

        `asyncio.run` starts a thread at the end to join its pool. In a program that does not call `close`, that happens
        at exit, when the interpreter refuses new threads.
        """
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(config, started))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _serve(self, config: EngineConfig, started: "Future[TokenizerManager]") -> None:
        """The thread's work: an engine until `close`."""
        self._loop = asyncio.get_running_loop()
        try:
            async with engine_in_process(config) as manager:
                started.set_result(manager)
                await self._closing.wait()
            await asyncio.gather(*self._answering, return_exceptions=True)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    @property
    def manager(self) -> TokenizerManager:
        """The engine's request interface. Pass its coroutines to `run`."""
        return self._manager

    @property
    def info(self) -> ExecutorInfo:
        """The properties of the loaded model and its executor."""
        return self._manager.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None if prompts and answers are token ids."""
        return self._manager.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be prompts."""
        return bool(self._manager.template_sources)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the model's defaults, overridden by the `given` fields of `SamplingParams`."""
        return SamplingParams(**{**self._defaults, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: base.SamplingParams | Sequence[base.SamplingParams] | None = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer all prompts concurrently; the answers are in the order of the prompts.

        `sampling_params` and `lora_path` (the name of an adapter) are one for all or one for each. Raises
        InvalidRequestError for a prompt that cannot run, and cancels the others.
        """
        futures = self.submit(prompts, sampling_params, lora_path=lora_path, **sampling)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: base.SamplingParams | Sequence[base.SamplingParams] | None = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer one conversation or several, as `generate` does."""
        return self.generate(messages, sampling_params, lora_path=lora_path, **sampling)

    async def generate_async(
        self,
        prompt: Prompt,
        sampling_params: base.SamplingParams | None = None,
        *,
        lora_path: str | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answer one prompt from an asyncio program. Cancelling the await cancels the request."""
        (future,) = self.submit(prompt, sampling_params, lora_path=lora_path, **sampling)
        return await asyncio.wrap_future(future)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: base.SamplingParams | None = None,
        *,
        lora_path: str | None = None,
        **sampling: Any,
    ) -> Iterator[OutputDelta]:
        """Stream the answer to one prompt as tokens arrive. Closing the iterator before its end cancels the request.

        Raises InvalidRequestError for a prompt that cannot run.
        """
        spec = self._spec(prompt, self._params(sampling_params, sampling), stream=True)
        spec.lora = lora_path or ""
        deltas = self._manager.generate(spec)
        generation = Generation(prompt, [Completion() for _ in range(spec.sampling.n)])

        async def following() -> OutputDelta | None:
            await self._render(prompt, spec)
            return await anext(deltas, None)

        async def close() -> None:
            await deltas.aclose()

        try:
            while (delta := self.run(following()).result()) is not None:
                generation.add(delta)
                yield delta
        finally:
            if self._thread.is_alive():
                self.run(close()).result()

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: base.SamplingParams | Sequence[base.SamplingParams] | None = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> "list[Future[Generation]]":
        """Start all prompts and return a future for each; cancelling one before its end cancels its request.

        Raises InvalidRequestError for a value that is not a prompt; any other error is raised by the prompt's future.
        """
        many = _as_prompts(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(many)
        if len(params) != len(many):
            raise InvalidRequestError(f"{len(params)} sampling params for {len(many)} prompts")
        chosen = [self._params(each, sampling) for each in params]
        specs = [self._spec(prompt, each) for prompt, each in zip(many, chosen, strict=True)]
        adapters = [lora_path] * len(many) if lora_path is None or isinstance(lora_path, str) else lora_path
        if len(adapters) != len(many):
            raise InvalidRequestError(f"{len(adapters)} entries of lora_path for {len(many)} prompts")
        for spec, adapter in zip(specs, adapters, strict=True):
            spec.lora = adapter or ""
        return [self.run(self._answer(prompt, spec)) for prompt, spec in zip(many, specs, strict=True)]

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter that requests may name from now on. Raises ConfigError for one that cannot be served."""
        self.run(self._manager.adapters.load(name, os.fspath(folder))).result()

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and free it once its open requests have ended.

        Raises InvalidRequestError if there is none of that name.
        """
        self.run(self._manager.adapters.unload(name)).result()

    def close(self) -> None:
        """Stop, end open requests with EngineDeadError and release the device. Runs at exit if not called before."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the engine's event loop. Raises EngineDeadError if that is closed."""
        if not self._thread.is_alive():
            work.close()
            raise EngineDeadError("the LLM was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, prompt: Prompt, spec: GenerateReqInput) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        generation = Generation(prompt, [Completion() for _ in range(spec.sampling.n)])
        await self._render(prompt, spec)
        async with aclosing(self._manager.generate(spec)) as deltas:
            async for delta in deltas:
                generation.add(delta)
        return generation

    async def _render(self, prompt: Prompt, spec: GenerateReqInput) -> None:
        """Put the prompt of a conversation into its spec."""
        if spec.text is None and spec.input_ids is None:
            spec.text = await self._manager.render_chat([dict(message) for message in prompt])  # type: ignore[arg-type]
            spec.add_special_tokens = False

    def _params(self, params: base.SamplingParams | None, given: dict[str, Any]) -> base.SamplingParams:
        if params is None:
            return self.default_sampling_params(**given)
        if not isinstance(params, base.SamplingParams):
            raise InvalidRequestError(f"sampling params must be SamplingParams, not {type(params).__name__}")
        stated = {item.name: getattr(params, item.name) for item in fields(params)}
        return SamplingParams(**{**stated, **given})

    def _spec(self, prompt: Prompt, params: base.SamplingParams, *, stream: bool = False) -> GenerateReqInput:
        """The request for the engine; a conversation is rendered later. Raises InvalidRequestError."""
        stated = {item.name: getattr(params, item.name) for item in fields(params)}
        seed = stated.pop("seed")
        try:
            sampling = msgspec.convert(stated, base.SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"a sampling parameter has the wrong type: {error}") from error
        spec = GenerateReqInput(sampling=sampling, seed=seed, text_options=TextOptions(stream=stream))
        if isinstance(prompt, str):
            spec.text = prompt
        elif not _is_conversation(prompt):
            spec.input_ids = _token_ids(prompt)
        return spec


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _token_ids(prompt: Any) -> Int32Array:
    """A prompt as token ids. Raises InvalidRequestError for anything else."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequestError("a prompt must be a text, a list of token ids or a list of messages")
    return ids


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as a list of prompts."""
    several = hasattr(prompts, "__len__") and not isinstance(prompts, str)
    if not several or (len(prompts) and isinstance(prompts[0], int | np.integer | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
