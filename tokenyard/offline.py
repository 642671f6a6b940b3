"""Generation without a server: scheduler, executor and detokenizer in this process, no sockets."""

import asyncio
import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Cancel,
    ConfigError,
    EngineDeadError,
    ExecutorInfo,
    Finish,
    FinishReason,
    Int32Array,
    InvalidRequestError,
    Request,
    SamplingParams,
    StopFound,
    Submit,
    TextOptions,
    TokenBatch,
)
from tokenyard.cache.eviction import get_eviction_policy
from tokenyard.config import Settings
from tokenyard.engine.processes.config import EngineConfig
from tokenyard.engine.processes.driver import Driver
from tokenyard.engine.processes.event_loop import event_loop_normal, event_loop_overlap
from tokenyard.engine.processes.libraries import set_library_environment
from tokenyard.engine.processes.messages import FromScheduler, ToScheduler
from tokenyard.engine.processes.scheduler_process import load_executor
from tokenyard.engine.requests import check_known, further_ends
from tokenyard.engine.sampling_defaults import read_sampling_defaults
from tokenyard.engine.text.text_side import TextAssembler
from tokenyard.engine.text.tokenizer_files import load_tokenizer, special_tokens
from tokenyard.engine.watch.grammars import GrammarCompiler
from tokenyard.engine.watch.kv_events import open_kv_events
from tokenyard.engine.watch.liveness import LoopState
from tokenyard.engine.watch.lookahead_client import LookaheadClient
from tokenyard.engine.watch.priority_updates import create_priority_updates
from tokenyard.engine.watch.recording import build_core, load_prior, open_tape
from tokenyard.engine.watch.step_log import StepLog
from tokenyard.executor.hub import find_model
from tokenyard.policy.priority_function import load_priority_function
from tokenyard.policy.registry import create_policy
from tokenyard.tape.recorder import Core

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]

LONGEST_CONTEXT_TOKENS = 1 << 20


def located(settings: Settings) -> Settings:
    """Effective settings with the model's folder in place of its name on the hub, downloaded if need be.

    Raises ConfigError for settings that contradict each other and for a model that is not there.
    """
    chosen = settings.effective()
    own_tokenizer = chosen.tokenizer_path == chosen.model_path and not chosen.skip_tokenizer_init
    if chosen.executor == "mock" and not own_tokenizer:
        return chosen
    found = find_model(chosen.model_path)
    if chosen.executor == "torch" and not (found / "config.json").is_file():
        raise ConfigError(f"there is no config.json in {found}; give the folder of a Hugging Face checkpoint")
    folder = str(found)
    return replace(chosen, model_path=folder, tokenizer_path=folder if own_tokenizer else chosen.tokenizer_path)


def engine_config(settings: Settings) -> EngineConfig:
    """What the engine must know, from effective settings. Raises ConfigError for names that do not exist."""
    # The engine takes the context length from the loaded model; here it only must not be in the way.
    scheduler = settings.scheduler_settings(context_length=settings.context_length or LONGEST_CONTEXT_TOKENS)
    create_policy(scheduler.schedule_policy, scheduler)
    get_eviction_policy(scheduler.radix_eviction_policy)
    load_prior(settings.believed_costs())
    if settings.priority_function:
        load_priority_function(settings.priority_function)
    alike = {item.name for item in fields(EngineConfig)} & {item.name for item in fields(Settings)}
    derived: dict[str, Any] = {
        "executor_options": settings.executor_options(),
        "scheduler": scheduler,
        "overlap": not settings.disable_overlap_schedule,
        "cost_profile": settings.believed_costs(),
    }
    return EngineConfig(**{name: getattr(settings, name) for name in alike} | derived)


@dataclass(slots=True)
class Completion:
    """One answer. `finish_reason` is stop, length or abort; `matched` is the token or string that stopped it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    matched: int | str | None = None


@dataclass(slots=True)
class Generation:
    """All answers to one prompt. `latency_s` counts from submission to the end of the last answer."""

    prompt: Prompt
    completions: list[Completion]
    prompt_tokens: int
    cached_tokens: int
    latency_s: float

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    prompt: Prompt
    future: "Future[Generation]"
    numbers: list[int]
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)


class _LocalPort:
    """The event loop's messages, as plain queues within the process."""

    def __init__(self, assembler: TextAssembler) -> None:
        self.inbox: queue.SimpleQueue[ToScheduler | None] = queue.SimpleQueue()
        self._assembler = assembler
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def add(self, request: _Open) -> None:
        """Wait for the answers of a request."""
        with self._lock:
            self._open |= dict.fromkeys(request.numbers, request)

    def receive(self, timeout_ns: int) -> list[ToScheduler] | None:
        """Messages that have come, waiting up to `timeout_ns` for the first; None means stop."""
        messages: list[ToScheduler] = []
        try:
            while True:
                wait = timeout_ns > 0 and not messages
                message = self.inbox.get(timeout=timeout_ns / NS_PER_S) if wait else self.inbox.get_nowait()
                if message is None:
                    return None
                messages.append(message)
        except queue.Empty:
            return messages

    def send(self, message: FromScheduler) -> None:
        """Take in what a step gave, and answer whoever waits for it."""
        if not isinstance(message, TokenBatch):
            return
        batch, stops = self._assembler.step(message)
        for stop in stops:
            self.inbox.put(StopFound(stop.number, stop.keep_tokens, stop.matched))
        start = 0
        for number, text, count in zip(batch.numbers.tolist(), batch.texts, batch.token_counts.tolist(), strict=True):
            request = self._open.get(number)
            if request is not None:
                request.texts[number] = request.texts.get(number, "") + text
                request.tokens.setdefault(number, []).extend(batch.tokens[start : start + count].tolist())
            start += count
        for finish in batch.finished:
            self._end(finish)

    def _end(self, finish: Finish) -> None:
        """Take in the end of an answer; the last one of a request resolves its future."""
        with self._lock:
            request = self._open.pop(finish.number, None)
        if request is None or request.future.done():
            return
        if finish.reason == "abort" and finish.cause not in ("", "cancelled"):
            request.future.set_exception(InvalidRequestError(finish.message))
            return
        tokens = request.tokens.get(finish.number, [])
        text = request.texts.get(finish.number, "")
        request.done[finish.number] = Completion(text, tokens, finish.reason, finish.matched)
        if len(request.done) == len(request.numbers):
            latency_s = (finish.finished_ns - finish.arrival_ns) / NS_PER_S
            answers = [request.done[number] for number in request.numbers]
            request.future.set_result(
                Generation(request.prompt, answers, finish.prompt_tokens, finish.cached_tokens, latency_s)
            )

    def fail_all(self, error: Exception) -> None:
        """Answer everything that is open with an error."""
        with self._lock:
            requests, self._open = list(self._open.values()), {}
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)


class LLM:
    """A model in this process. Use it as a context manager, or call `close`.

    `model` is a folder (the demo model if absent); `settings` are fields of `tokenyard.config.Settings`, such as
    device="cpu" or schedule_policy="lpm". Raises ConfigError for settings or a model that cannot work.
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
        self._start_engine(chosen)

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLM":
        """An LLM with settings that are made already."""
        llm = cls.__new__(cls)
        llm._start_engine(settings)
        return llm

    def _start_engine(self, settings: Settings) -> None:
        """Load the model and start the thread that runs the event loop."""
        set_library_environment()
        self.settings = located(settings)
        self._default_sampling = read_sampling_defaults(self.settings.model_path, self.settings.sampling_defaults)
        config = engine_config(self.settings)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer_path)
        self._tape = open_tape(config)
        self._kv_events = open_kv_events(config)
        self._port = _LocalPort(TextAssembler(self.tokenizer))
        self._next_number, self._numbering = 1, threading.Lock()
        self._failure: Exception | None = None
        ready: Future[ExecutorInfo] = Future()
        self._thread = threading.Thread(target=self._run, args=(config, ready), name="tokenyard", daemon=True)
        self._thread.start()
        try:
            self.info = ready.result()
        except BaseException:
            self._close_files()
            raise
        folder = Path(config.tokenizer_path)
        eos_token = special_tokens(folder if folder.is_dir() else folder.parent).get("eos_token", "")
        self._more_ends = further_ends(self.info, self.tokenizer, eos_token)
        atexit.register(self.close)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the model's defaults, and `given` fields of `SamplingParams` in place of them."""
        return SamplingParams(**{**self._default_sampling, **given})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Answer all prompts (texts or token ids), in their order. They run side by side.

        `sampling_params` is one for all or one for each, None for the model's defaults.
        Raises InvalidRequestError for a prompt that cannot run.
        """
        return [future.result() for future in self.submit(prompts, sampling_params)]

    async def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generation:
        """Answer one prompt from an asyncio program. Cancelling the await cancels the request."""
        (future,) = self.submit(prompt, sampling_params)
        return await asyncio.wrap_future(future)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> "list[Future[Generation]]":
        """Start all prompts and return a future for each; cancelling one before its end cancels its request."""
        many = _as_prompts(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(many)
        if len(params) != len(many):
            raise InvalidRequestError(f"{len(params)} sampling params for {len(many)} prompts")
        chosen = [self.default_sampling_params() if each is None else each for each in params]
        requests = [self._request(prompt, each) for prompt, each in zip(many, chosen, strict=True)]
        return [self._start(prompt, request) for prompt, request in zip(many, requests, strict=True)]

    def close(self) -> None:
        """Stop, end open requests with an error and give back the device. Done at exit if nobody did before."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._port.inbox.put(None)
            self._thread.join()
            self._executor.close()
        self._close_files()
        self._failure = self._failure or EngineDeadError("the LLM was closed")
        self._port.fail_all(self._failure)

    def _close_files(self) -> None:
        if self._tape is not None:
            self._tape.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, config: EngineConfig, ready: "Future[ExecutorInfo]") -> None:
        """The thread's work: load the model, then the event loop until told to stop or broken.

        The model is loaded where it runs: OpenMP keeps a number of threads for each thread that calls it, and with a
        second pool of them, made while loading, more threads than cores wait for work and wake up slowly.
        """
        try:
            self._executor = load_executor(config)
            core = build_core(config, self._executor.info, self._tape)
            lookahead = LookaheadClient(core, config.scheduler_settings(self._executor.info))
            driver = self._driver(config, core, lookahead)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(self._executor.info)
        try:
            loop = event_loop_overlap if config.overlaps(self._executor.info) else event_loop_normal
            loop(driver)
        except Exception as error:
            log.exception("the engine failed")
            self._failure = EngineDeadError(f"the engine failed: {error}")
            self._port.fail_all(self._failure)
        finally:
            lookahead.close()

    def _driver(self, config: EngineConfig, core: Core, lookahead: LookaheadClient) -> Driver:
        """What the event loop drives."""
        return Driver(
            core,
            self._executor,
            self._port,
            log=StepLog(config.decode_log_interval),
            state=LoopState(),
            hook=create_priority_updates(config.priority_function, core),
            lookahead=lookahead,
            kv_events=self._kv_events,
            grammars=GrammarCompiler(self._executor, self._port.inbox.put, self._tokenizer_text),
        )

    def _tokenizer_text(self) -> str:
        """The tokenizer as grammars need it. Raises InvalidRequestError where there is none."""
        if self.tokenizer is None:
            raise InvalidRequestError("grammars need a tokenizer")
        return str(self.tokenizer.to_str())

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        """A request, checked. Its answers take the next n numbers."""
        sampling = _checked(sampling)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer", param="stop")
        ids = self._ids(prompt)
        room = min(self.info.context_length, self.info.num_pages * self.info.page_size) - len(ids)
        if not len(ids):
            raise InvalidRequestError("the prompt is empty")
        if room < 1:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens; it must leave room for an answer")
        number = self._take_numbers(sampling.n)
        most = min(sampling.max_new_tokens, room)
        least = min(sampling.min_new_tokens, most)
        return Request(
            number=number,
            rid=str(number),
            prompt_ids=ids,
            sampling=replace(
                sampling,
                max_new_tokens=most,
                min_new_tokens=least,
                stop_token_ids=sampling.stop_token_ids + ([] if sampling.ignore_eos else self._more_ends),
            ),
            text=TextOptions(min_tokens=least),
            arrival_ns=time.monotonic_ns(),
        )

    def _take_numbers(self, count: int) -> int:
        """The first of `count` numbers that nobody else has: several threads may ask at once."""
        with self._numbering:
            self._next_number += count
            return self._next_number - count

    def _ids(self, prompt: Prompt) -> Int32Array:
        """A prompt as token ids, int32[n]. Raises InvalidRequestError for anything else and for unknown ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("there is no tokenizer: give token ids")
            prompt = self.tokenizer.encode(prompt).ids
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of several lengths
            ids = np.asarray(None)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidRequestError("a prompt must be a text or a list of token ids")
        check_known(ids, self.info.vocab_size)
        return ids.astype(np.int32)

    def _start(self, prompt: Prompt, request: Request) -> "Future[Generation]":
        """Send a request to the event loop."""
        if self._failure is not None:
            raise self._failure
        future: Future[Generation] = Future()
        numbers = list(range(request.number, request.number + request.sampling.n))
        self._port.add(_Open(prompt, future, numbers))
        self._port.inbox.put(Submit(request))
        future.add_done_callback(lambda done: self._port.inbox.put(Cancel(numbers)) if done.cancelled() else None)
        return future


def _checked(sampling: SamplingParams) -> SamplingParams:
    """The same parameters; one stop string may stand for a list of it. Raises InvalidRequestError for wrong ones."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(f"sampling params must be SamplingParams, not {type(sampling).__name__}")
    given = {item.name: getattr(sampling, item.name) for item in fields(sampling)}
    if isinstance(sampling.stop, str):
        given["stop"] = [sampling.stop]
    try:
        checked = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"a sampling parameter has the wrong type: {error}") from error
    checked.validate()
    return checked


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        return [prompts]  # type: ignore[list-item]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
