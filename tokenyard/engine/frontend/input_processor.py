"""Makes the request that the scheduler sees from what a client asks for, and checks it."""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from tokenyard.base import (
    NS_PER_MS,
    ContextLengthError,
    ExecutorInfo,
    Int32Array,
    InvalidRequestError,
    Request,
    SamplingParams,
)
from tokenyard.base.ranges import MAX_MS
from tokenyard.base.request import NO_TOKENS
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.text.prompt_tokenizer import PromptTokenizer
from tokenyard.policy.service_levels import service_level_of

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 2**31 - 1
SEED_BITS = 62


LEVEL_NAMES = ("strict", "high", "normal", "low")
"""The names of the levels of service classes, in the order of policy/service_levels.py."""


def level_name(service_class: str | None) -> str:
    """The name of the level of a service class. Metrics and answers show it, as clients may make up any class."""
    return LEVEL_NAMES[service_level_of(service_class)]


def ns_from_ms(value_ms: float | None, param: str) -> int | None:
    """A deadline or target in whole nanoseconds, None for none. Raises InvalidRequestError for one out of range."""
    if value_ms is None:
        return None
    if not 0.0 < value_ms <= MAX_MS:
        raise InvalidRequestError(f"{param} must be above 0 and at most {MAX_MS:.0f} (ms)", param=param)
    return max(1, round(value_ms * NS_PER_MS))


def check_priority(priority: int | None) -> None:
    """Raise InvalidRequestError for a priority beyond 32 bits."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")


def check_token_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise InvalidRequestError for token ids that the model has no row for, which would fail the whole step.

    Clients may send such ids, and a tokenizer may have special tokens that the model does not know.
    """
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(f"token id {wrong} is not in the vocabulary of {vocab_size} tokens", param="prompt")


def extra_eos_token_ids(info: ExecutorInfo, tokenizer: Tokenizer | None, eos_token: str | None) -> list[int]:
    """Ids that end an answer in addition to those of the model's config: that of the tokenizer's `eos_token` ("" for
    none), as some checkpoints name the token that ends a turn only there.
    """
    end = tokenizer.token_to_id(eos_token) if tokenizer is not None and eos_token else None
    return [] if end is None or end in info.eos_token_ids or end >= info.vocab_size else [end]


class InputProcessor:
    """Knows the limits of one engine. `longest` is the most tokens of prompt and answer together."""

    def __init__(
        self,
        info: ExecutorInfo,
        tokenizer: Tokenizer | None,
        eos_token: str | None = "",
        adapter_key: Callable[[str], str] = lambda name: name,
    ) -> None:
        """`adapter_key` gives what the engine calls an adapter by its name, and raises InvalidRequestError."""
        self._adapter_key = adapter_key
        self._vocab_size = info.vocab_size
        self._tokenizer = tokenizer
        self._more_ends = extra_eos_token_ids(info, tokenizer, eos_token)
        # The last token of an answer is never fed back, so it needs no place in the pool.
        self.longest = min(info.context_length, info.num_pages * info.page_size + 1)
        self.prompts = PromptTokenizer(tokenizer, self.longest - 1)

    async def prompt_ids(self, spec: GenerateReqInput) -> Int32Array:
        """Return the prompt's token ids, int32[n]. Raises InvalidRequestError for no prompt or ids out of range."""
        if (spec.text is None) == (spec.input_ids is None):
            raise InvalidRequestError("give exactly one of text and token ids", param="prompt")
        if spec.text is not None:
            if not spec.text:
                raise InvalidRequestError("the prompt is empty", param="prompt")
            ids = await self.prompts.ids(spec.text, spec.add_special_tokens)
            check_token_ids(ids, self._vocab_size)
        else:
            ids = self._check_ids(spec.input_ids)
        self._check_length(len(ids))
        return ids

    async def token_ids(self, spec: GenerateReqInput) -> tuple[Int32Array, Int32Array]:
        """The token ids of the prompt and of what the client expects of the answer, int32[n] each.

        Raises InvalidRequestError for no prompt, ids out of range, or more text than fits.
        """
        return await self.prompt_ids(spec), await self._prediction_ids(spec) if spec.prediction else NO_TOKENS

    async def _prediction_ids(self, spec: GenerateReqInput) -> Int32Array:
        try:
            ids = await self.prompts.ids(spec.prediction, False)
        except ContextLengthError as error:
            message = f"the prediction is longer than any answer, which has less than {self.longest} tokens"
            raise ContextLengthError(message, param="prediction") from error
        # A tokenizer may have special tokens that the model does not know.
        return ids[ids < self._vocab_size][: self.longest]

    def _check_length(self, tokens: int) -> None:
        if not tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if tokens >= self.longest:
            # Clients know a prompt that is too long by these words, which are OpenAI's and vLLM's.
            raise ContextLengthError(
                f"This model's maximum context length is {self.longest} tokens. However, your prompt has {tokens}"
                " tokens; with at least one token of answer,"
                f" at most {self.longest - 1} fit. Please reduce its length.",
                param="prompt",
                prompt_tokens=tokens,
                most=self.longest - 1,
            )

    def make(
        self, spec: GenerateReqInput, ids: Int32Array, predicted: Int32Array, *, number: int, rid: str, arrival_ns: int
    ) -> Request:
        """Return the request for these ids of a prompt and of what is predicted.

        Raises InvalidRequestError or ContextLengthError.
        """
        sampling = self._sampling(spec, len(ids))
        check_priority(spec.priority)
        text = spec.text_options
        if sampling.stop and sampling.min_new_tokens:
            text = replace(text, min_tokens=sampling.min_new_tokens)
        return Request(
            number=number,
            rid=rid,
            prompt_ids=ids,
            sampling=sampling,
            text=text,
            logprobs=spec.logprobs,
            arrival_ns=arrival_ns,
            priority=spec.priority,
            service_class=spec.service_class,
            tenant=spec.tenant,
            deadline_ns=ns_from_ms(spec.deadline_ms, "deadline_ms"),
            slo=spec.slo,
            cache_salt=spec.cache_salt,
            lora=self._adapter_key(spec.lora),
            routing_key=spec.routing_key or spec.lora or None,
            grammar=spec.grammar,
            kv=spec.kv,
            output_ids=self._begun(spec),
            pooling=spec.pooling,
            prediction=predicted,
            session=spec.session,
            turn=spec.turn,
            age_ns=spec.age_ns,
        )

    def _check_ids(self, given: Int32Array | list[int] | None) -> Int32Array:
        # A long list is refused before its tokens are checked.
        self._check_length(len(given) if given is not None else 0)
        ids = np.asarray(given)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidRequestError("token ids must be one flat list of whole numbers", param="prompt")
        check_token_ids(ids, self._vocab_size)
        return ids.astype(np.int32, copy=False)

    def _begun(self, spec: GenerateReqInput) -> Int32Array:
        """The tokens of an answer that was begun elsewhere. Raises InvalidRequestError for such that cannot be."""
        if spec.output_ids is None or not len(spec.output_ids):
            return NO_TOKENS
        if spec.sampling.n > 1:
            raise InvalidRequestError("an answer that was begun (output_ids) needs n = 1", param="output_ids")
        ids = np.asarray(spec.output_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequestError("output_ids must be one flat list of whole numbers", param="output_ids")
        check_token_ids(ids, self._vocab_size)
        return ids.astype(np.int32, copy=False)

    def _sampling(self, spec: GenerateReqInput, prompt_tokens: int) -> SamplingParams:
        sampling = spec.sampling
        sampling.validate()
        self._check_stops(sampling)
        named = spec.logprobs.token_ids if spec.logprobs is not None else []
        for param, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
            ("token_ids_logprob", named),
        ):
            if any(not 0 <= token < self._vocab_size for token in ids):
                raise InvalidRequestError(f"{param} names a token outside of the vocabulary", param=param)
        room = self.longest - prompt_tokens
        if sampling.max_new_tokens > room and not spec.clamp_max_new_tokens:
            answer = sampling.max_new_tokens
            raise ContextLengthError(
                f"This model's maximum context length is {self.longest} tokens. However, you requested"
                f" {prompt_tokens + answer} tokens ({prompt_tokens} in the prompt, {answer} in the completion). Please"
                " reduce the length of the prompt or of the completion.",
                param="max_tokens",
                prompt_tokens=prompt_tokens,
                answer_tokens=answer,
                most=self.longest,
            )
        limit = min(sampling.max_new_tokens, room)
        seed = spec.seed if spec.seed is not None else int.from_bytes(os.urandom(8)) >> (64 - SEED_BITS)
        return replace(
            sampling,
            max_new_tokens=limit,
            min_new_tokens=min(sampling.min_new_tokens, limit),
            stop_token_ids=sampling.stop_token_ids + ([] if sampling.ignore_eos else self._more_ends),
            seed=seed % 2**SEED_BITS,
        )

    def _check_stops(self, sampling: SamplingParams) -> None:
        stops = sampling.stop
        if stops and self._tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARS} characters", param="stop"
            )
