"""Generation without a server: `LLM` runs an engine in this process, behind the server's `TokenizerManager`."""

import asyncio
import atexit
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
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
    Finish,
    FinishReason,
    Int32Array,
    InvalidRequestError,
    LogprobOptions,
    OverloadedError,
    SessionEnded,
    TokenLogprobs,
    TurnEnded,
)
from tokenyard.base.sessions import derived_session, named_session, short_session, turn_of
from tokenyard.config import Settings
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.child import set_library_environment
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.in_process import engine_in_process
from tokenyard.progress import follow
from tokenyard.server.http.turns import ttl_ns
from tokenyard.server.native.score import label_scores
from tokenyard.server.openai.chat_output import chat_message
from tokenyard.server.openai.completions import chat_logprob_options
from tokenyard.server.openai.embeddings import Vectors, pooling_of, shortened, unit_vectors
from tokenyard.server.openai.sampling_fields import new_generate_input, parse_text_options, refuse_unsupported
from tokenyard.server.openai.structured_outputs import grammar_text
from tokenyard.server.openai.tool_choice import chat_grammar, tool_use
from tokenyard.server.parse.events import ParsedMessage
from tokenyard.server.parse.output_style import OutputStyle, ParserOptions
from tokenyard.server.prompts import chat_prompt, predicted_text
from tokenyard.server.protocol import (
    ChatRequest,
    ConstraintFields,
    SchedulingFields,
    SessionFields,
    StructuredOutputFields,
    TemplateFields,
    UnsupportedFields,
    from_fields,
)
from tokenyard.wiring import engine_config, server_options, with_model_folder

Conversation = Sequence[Mapping[str, Any]]
"""Messages of role and content, for the model's chat template."""

Prompt = str | Sequence[int] | Conversation
Params = base.SamplingParams | Mapping[str, Any] | None
"""Sampling params, or their fields as a dict; None for the model's defaults."""

T = TypeVar("T")


_SAMPLING_FIELDS = {item.name for item in fields(base.SamplingParams)}
_OF_HTTP = (
    *(SchedulingFields, SessionFields, ConstraintFields, StructuredOutputFields, TemplateFields),
    UnsupportedFields,
)
REQUEST_FIELDS = {item.name for kind in _OF_HTTP for item in fields(kind)} | {
    *("logprobs", "top_logprobs", "skip_special_tokens", "no_stop_trim", "include_stop_str_in_output", "prediction"),
    *("parallel_tool_calls", "separate_reasoning"),
}
"""Fields of an HTTP body that `LLM` takes besides those of `base.SamplingParams`."""


@dataclass(init=False)
class SamplingParams(base.SamplingParams):
    """How tokens are sampled and when to stop: the fields of `base.SamplingParams`, in the forms a caller may give.

    `max_tokens` and `min_tokens` are other names for `max_new_tokens` and `min_new_tokens`, and `stop` may be a single
    string. A field that is None counts as not given. Without a `seed` each request draws one, so that equal prompts get
    different answers unless sampling is greedy.

    others: further fields of a request, with the names and values that they have over HTTP: `REQUEST_FIELDS`, such as
        json_schema, regex, structured_outputs, tools, logprobs, priority or session_id.
    """

    others: dict[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        stop: str | Sequence[str] | None = (),
        seed: int | None = None,
        others: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Raises TypeError for a field that does not exist."""
        if unknown := (given.keys() - _SAMPLING_FIELDS | (others or {}).keys()) - REQUEST_FIELDS:
            raise TypeError(f"there is no sampling parameter or request field {min(unknown)!r}")
        given = _stated(given)
        given |= {"max_new_tokens": max_tokens} if max_tokens is not None else {}
        given |= {"min_new_tokens": min_tokens} if min_tokens is not None else {}
        own = {name: given.pop(name) for name in _SAMPLING_FIELDS & given.keys()}
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        super().__init__(stop=stops, seed=seed, **own)  # type: ignore[arg-type]
        self.others = {**(others or {}), **given}


EACH = ("priority", "rid", "session_id")
"""Fields that methods of `LLM` also take as a list, with one value for each prompt."""


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
        return SamplingParams(**{**self._options.default_sampling, **_stated(given)})

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
        request = self._request(prompt, self._params(sampling_params, sampling), lora_path, stream=True)
        deltas = self._manager.generate(request.spec)
        generation = _no_answer(request)

        async def following() -> OutputDelta | None:
            await self._prepare(request)
            return await anext(deltas, None)

        async def close() -> None:
            await deltas.aclose()
            _read_messages(request, generation)
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
        many = _as_prompts(prompts)
        params = _each(sampling_params, len(many), "sampling params")
        adapters = _each(lora_path, len(many), "entries of lora_path")
        own = {
            name: _each(value, len(many), f"entries of {name}")
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
            requests.append(self._request(prompt, self._params(params[place], given), adapters[place]))
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
        many = _as_prompts(prompts)
        if not len(many):
            raise InvalidRequestError("prompts must not be empty", param="prompts")
        adapters = _each(lora_path, len(many), "entries of lora_path")
        params = SamplingParams(max_new_tokens=0, temperature=0.0)
        requests = [self._request(prompt, params, adapter) for prompt, adapter in zip(many, adapters, strict=True)]
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
        requests = [self._request(prompt, params, lora_path) for prompt in prompts]
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

    async def _answer(self, request: "_Request") -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        generation = _no_answer(request)
        await self._prepare(request)
        async with aclosing(self._manager.generate(request.spec)) as deltas:
            async for delta in deltas:
                generation.add(delta)
        _read_messages(request, generation)
        self._end_turn(request, generation)
        return generation

    async def _prepare(self, request: "_Request") -> None:
        """Render the prompt of a conversation, and read the constraints. Does nothing the second time."""
        spec, body, style = request.spec, request.body, self._style
        if request.prepared:
            return
        request.prepared = True
        if not body.messages:
            if body.tools:
                raise InvalidRequestError("tools need a conversation: a list of messages as prompt", param="tools")
            spec.grammar = grammar_text(body, style)
            return
        use = tool_use(body)
        spec.text = await chat_prompt(self._manager, body, style)
        spec.add_special_tokens = False
        spec.grammar = chat_grammar(body, use, style, spec.text)
        if body.tools or body.separate_reasoning:
            request.reading = style.reading(
                spec.text,
                use.functions,
                reasoning=body.separate_reasoning is not False,
                forced=use.forced,
                parallel=use.parallel,
            )
        if request.reading is not None:
            spec.text_options.keep_ids = style.keep_ids

    def _end_turn(self, request: "_Request", generation: Generation) -> None:
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
        return SamplingParams(**{**stated, **_stated(given)})

    def _request(
        self, prompt: Prompt, params: base.SamplingParams, adapter: str | None, *, stream: bool = False
    ) -> "_Request":
        """The request for the engine; `_prepare` completes it. Raises InvalidRequestError."""
        stated = {item.name: getattr(params, item.name) for item in fields(base.SamplingParams)}
        bias, seed = stated["logit_bias"], stated.pop("seed")
        if not isinstance(bias, Mapping):
            raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
        if not isinstance(seed, int | np.integer | None):
            raise InvalidRequestError("seed must be a whole number", param="seed")
        stated["logit_bias"] = {_whole(token): value for token, value in bias.items()}
        others = params.others if isinstance(params, SamplingParams) else {}
        try:
            sampling = msgspec.convert(stated, base.SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"a sampling parameter has the wrong type: {error}") from error
        messages = [dict(message) for message in prompt] if _is_conversation(prompt) else []  # type: ignore[arg-type]
        body = _chat_body(others, messages, sampling)
        refuse_unsupported(body)
        spec = new_generate_input(body, {}, self._options.class_targets)
        spec.rid = spec.rid or uuid.uuid4().hex
        spec.sampling, spec.lora = sampling, adapter or ""
        spec.seed = None if seed is None else int(seed)
        keep_stop, interval = bool(body.include_stop_str_in_output), self._options.stream_interval
        spec.text_options = parse_text_options(body, stream=stream, stream_interval=interval, keep_stop=keep_stop)
        spec.logprobs = chat_logprob_options(body)
        if self._options.speculative_algorithm != "none":
            spec.prediction = predicted_text(body.prediction)
        spec.session = named_session(others, lambda _: None) or derived_session(messages)
        spec.turn = turn_of(messages) if spec.session else 0
        if isinstance(prompt, str):
            spec.text = prompt
        elif not messages:
            spec.input_ids = _token_ids(prompt)
        markers = msgspec.json.encode({"cache_control": body.cache_control}) if body.cache_control else b""
        return _Request(prompt, spec, body, ttl_ns(markers, body.prompt_cache_retention))


@dataclass(slots=True)
class _Request:
    """One request of an `LLM`.

    prompt: as the caller gave it.
    spec: what the engine is asked for.
    body: its fields as in a body over HTTP; without messages if the prompt is no conversation.
    ttl_ns: how long its KV is asked to be kept, -1 for not said.
    reading: how its answers are parsed, None if they are not.
    prepared: whether `spec` is complete.
    """

    prompt: Prompt
    spec: GenerateReqInput
    body: ChatRequest
    ttl_ns: int
    reading: ParserOptions | None = None
    prepared: bool = False


def _chat_body(others: Mapping[str, Any], messages: list[dict[str, Any]], sampling: base.SamplingParams) -> ChatRequest:
    """The fields of a request as an HTTP body has them. vLLM's `logprobs` is a number, OpenAI's says whether."""
    given = {**others, "messages": messages, "ignore_eos": sampling.ignore_eos}
    top = given.get("logprobs")
    if type(top) is int:
        given |= {"logprobs": True, "top_logprobs": top}
    return from_fields(given, ChatRequest)


def _whole(token: Any) -> Any:
    """A token id, which JSON has as a string, as a number; anything else as it is."""
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _stated(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are given."""
    return {name: value for name, value in given.items() if value is not None}


def _read_messages(request: _Request, generation: Generation) -> None:
    """Put the message into each answer of a conversation that has tools, or whose reasoning is to be separate."""
    if not request.body.messages or not (request.body.tools or request.body.separate_reasoning):
        return
    for answer in generation.completions:
        message = ParsedMessage(answer.text)
        if request.reading is not None:
            reader = request.reading.reader()
            reader.feed(answer.text, last=True)
            message = reader.message
        answer.message = chat_message(message)


def _no_answer(request: _Request) -> Generation:
    return Generation(request.prompt, [Completion() for _ in range(request.spec.sampling.n)])


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


def _each(value: Any, count: int, what: str) -> Sequence[Any]:
    """One value for each prompt, from a sequence of them or one for all. Raises InvalidRequestError for too few."""
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {what} for {count} prompts")
    return value


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
