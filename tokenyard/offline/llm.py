"""`LLM`: an engine in this process, behind the server's `TokenizerManager`."""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from tokenyard import base
from tokenyard.base import (
    ConfigError,
    EngineDeadError,
    ExecutorInfo,
    InvalidRequestError,
    LogprobOptions,
    SessionEnded,
    TurnEnded,
)
from tokenyard.base.sessions import short_session
from tokenyard.config import Settings
from tokenyard.engine.frontend.io_struct import OutputDelta
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.child import set_library_environment
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.in_process import engine_in_process
from tokenyard.offline.generation import Conversation, Generation, Prompt, as_prompts, each
from tokenyard.offline.request import Request, make_request, no_answer, prepare, read_messages
from tokenyard.offline.sampling_params import Params, SamplingParams, without_none
from tokenyard.progress import follow
from tokenyard.server.native.score import label_scores
from tokenyard.server.openai.embeddings import Vectors, pooling_of, shortened, unit_vectors
from tokenyard.server.parse.output_style import OutputStyle
from tokenyard.wiring import engine_config, server_options, with_model_folder

T = TypeVar("T")

EACH = ("priority", "rid", "session_id")
"""Fields that methods of `LLM` also take as a list, with one value for each prompt."""


class LLM:
    """A model in this process (vLLM's `LLM`, SGLang's `Engine`). Use it as a context manager, or call `close`.

    Any thread may call its methods.

    `model` is a folder (the demo model if absent); `settings` are fields of `tokenyard.config.Settings`, such as
    device="cpu" or schedule_policy="lpm". Raises ConfigError for settings or a model that cannot work.

    Prompts are texts, token ids or conversations. Where a method takes sampling params, fields of `SamplingParams` may
    be given by name as well: they override the params' own, or the model's defaults if there are no params. Fields
    whose name an HTTP body has mean what they mean there.
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
        self._options = server_options(self.settings)
        config = engine_config(self.settings)
        started: Future[TokenizerManager] = Future()
        self._answering: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run_loop, args=(config, started), name="tokenyard-front", daemon=True
        )
        self._thread.start()
        manager = self._manager = started.result()
        template = manager.template_sources
        self._style = OutputStyle(
            template, manager.tokenizer, self.settings.tool_call_parser, manager.response_template
        )
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
        return SamplingParams(**{**self._options.default_sampling, **without_none(given)})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        use_tqdm: bool = False,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer all prompts concurrently; the answers are in the order of the prompts.

        `sampling_params` and `lora_path` (the name of an adapter) are one for all or one for each. `use_tqdm` shows a
        bar on standard error if that is a terminal. Raises InvalidRequestError for a prompt that cannot run, and
        cancels the others.
        """
        futures = self.submit(prompts, sampling_params, lora_path=lora_path, **sampling)
        return _results(futures, self.generated_tokens if use_tqdm else None)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        use_tqdm: bool = False,
        **sampling: Any,
    ) -> list[Generation]:
        """Answer one conversation or several, as `generate` does. With `tools`, or with `separate_reasoning=True`, each
        answer has a `message` with its calls and reasoning.
        """
        return self.generate(messages, sampling_params, lora_path=lora_path, use_tqdm=use_tqdm, **sampling)

    async def generate_async(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
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
        sampling_params: Params = None,
        *,
        lora_path: str | None = None,
        **sampling: Any,
    ) -> Iterator[OutputDelta]:
        """Stream the answer to one prompt as tokens arrive. Closing the iterator before its end cancels the request.

        Raises InvalidRequestError for a prompt that cannot run.
        """
        request = make_request(prompt, self._params(sampling_params, sampling), lora_path, self._options, stream=True)
        deltas = self._manager.generate(request.spec)
        generation = no_answer(request)

        async def following() -> OutputDelta | None:
            await prepare(request, self._manager, self._style)
            return await anext(deltas, None)

        async def close() -> None:
            await deltas.aclose()
            read_messages(request, generation)
            self._end_turn(request, generation)

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
        sampling_params: Params | Sequence[Params] = None,
        *,
        lora_path: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> "list[Future[Generation]]":
        """Start all prompts and return a future for each; cancelling one before its end cancels its request.

        Raises InvalidRequestError for a value that is not a prompt; any other error is raised by the prompt's future.
        """
        many = as_prompts(prompts)
        params = each(sampling_params, len(many), "sampling params")
        adapters = each(lora_path, len(many), "entries of lora_path")
        own = {
            name: each(value, len(many), f"entries of {name}")
            for name in EACH
            if (value := sampling.pop(name, None)) is not None
        }
        if isinstance(own.get("rid"), list) and len(many) > 1:
            own["rid"] = [
                f"{rid}-{place}" if own["rid"].count(rid) > 1 else rid for place, rid in enumerate(own["rid"])
            ]
        requests = []
        for place, prompt in enumerate(many):
            given = {**sampling, **{name: values[place] for name, values in own.items()}}
            requests.append(make_request(prompt, self._params(params[place], given), adapters[place], self._options))
        return [self.run(self._answer(request)) for request in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        lora_path: str | Sequence[str | None] | None = None,
    ) -> Vectors:
        """A vector of length 1 for each prompt, float32[prompts, size], as `/v1/embeddings` gives them.

        pooling: last or mean.
        dimensions: how many of its first values are kept, None for all.
        """
        many = as_prompts(prompts)
        if not len(many):
            raise InvalidRequestError("prompts must not be empty", param="prompts")
        adapters = each(lora_path, len(many), "entries of lora_path")
        params = SamplingParams(max_new_tokens=0, temperature=0.0)
        requests = [
            make_request(prompt, params, adapter, self._options) for prompt, adapter in zip(many, adapters, strict=True)
        ]
        for request in requests:
            request.spec.pooling = pooling_of(pooling)
        answers = _results([self.run(self._answer(request)) for request in requests])
        return shortened(unit_vectors([answer.finish for answer in answers]), dimensions)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        lora_path: str | None = None,
    ) -> list[Any]:
        """A score of each item for a query.

        With `label_token_ids` it is the list of their probabilities after query and item (SGLang's `Engine.score`, and
        `/v1/score`), which `apply_softmax` makes add up to 1. Without them it is the cosine of the two vectors (vLLM's
        `LLM.score`).
        """
        each = [items] if isinstance(items, str) else items
        if label_token_ids is None:
            vectors = self.embed([query, *each], lora_path=lora_path)
            return list((vectors[1:] @ vectors[0]).tolist())
        if not len(label_token_ids):
            raise InvalidRequestError("label_token_ids must not be empty", param="label_token_ids")
        if any(isinstance(item, str) != isinstance(query, str) or not hasattr(item, "__len__") for item in each):
            raise InvalidRequestError("query and items must both be texts or both be token ids", param="items")
        pairs = [(item, query) if item_first else (query, item) for item in each]
        prompts = [a + b if isinstance(a, str) else [*a, *b] for a, b in pairs]  # type: ignore[operator]
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        requests = [make_request(prompt, params, lora_path, self._options) for prompt in prompts]
        for request in requests:
            request.spec.logprobs = LogprobOptions(output=True, token_ids=list(label_token_ids))
        answers = _results([self.run(self._answer(request)) for request in requests])
        count = len(label_token_ids)
        return [label_scores(answer.completions[0].logprobs, count, softmax=apply_softmax) for answer in answers]

    def close_session(self, session_id: str, tenant: str = "") -> None:
        """A session has no further turns: its KV may be evicted first."""
        self.run(self._manager.end_session(SessionEnded(short_session(session_id), tenant))).result()

    def generated_tokens(self) -> int:
        """Output tokens that the engine has made so far."""
        snapshot = self.run(self._manager.snapshot()).result()
        return int(snapshot.get("counters", {}).get("generated_tokens", 0))

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

    async def _answer(self, request: Request) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        generation = no_answer(request)
        await prepare(request, self._manager, self._style)
        async with aclosing(self._manager.generate(request.spec)) as deltas:
            async for delta in deltas:
                generation.add(delta)
        read_messages(request, generation)
        self._end_turn(request, generation)
        return generation

    def _end_turn(self, request: Request, generation: Generation) -> None:
        """Tell the engine how an answer ended that is a turn of a session."""
        spec, finish = request.spec, generation.finish
        if spec.session and finish is not None and finish.complete:
            called = request.reading is not None and request.reading.called_tool
            event = TurnEnded(spec.session, "tool" if called else "user", request.ttl_ns, spec.tenant)
            self._manager.end_turn(spec.rid, event)

    def _params(self, params: Params, given: dict[str, Any]) -> base.SamplingParams:
        if params is None or isinstance(params, Mapping):
            return self.default_sampling_params(**{**(params or {}), **given})
        if not isinstance(params, base.SamplingParams):
            raise InvalidRequestError(f"sampling params must be SamplingParams or a dict, not {type(params).__name__}")
        stated = {item.name: getattr(params, item.name) for item in fields(params)}
        return SamplingParams(**{**stated, **without_none(given)})


def _results(
    futures: "Sequence[Future[Generation]]", generated_tokens: Callable[[], int] | None = None
) -> list[Generation]:
    """The results in order, with a bar if `generated_tokens` is given. The first error cancels the other requests and
    is raised.
    """
    try:
        if generated_tokens is not None:
            return follow(futures, generated_tokens)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
