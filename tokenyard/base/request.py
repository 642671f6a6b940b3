"""Requests, as every room sees them: token ids, sampling parameters, text options and urgency."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tokenyard.base.errors import InvalidRequestError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Pooling = Literal["", "last", "mean"]
"""How a prompt's vector is made: from the hidden state of its last token, or the mean of all; "" for no vector."""

GREEDY_BELOW_TEMPERATURE = 1e-6
NO_TOKENS: Int32Array = np.empty(0, np.int32)


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Field names follow SGLang's native API.

    top_k: -1 for all tokens.
    stop: strings, which the detokenizer finds; the scheduler sees only token ids.
    seed: keys a token's random number together with its position, so a resumed request samples the same tokens.
    logit_bias: the value added to the logit of each token id.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    n: int = 1
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, under any seed."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def validate(self) -> None:
        """Raise InvalidRequestError naming the first field that is out of range (NaN counts as out of range)."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (all) or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "above 0 and at most 10"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            ("n", 1 <= self.n <= 128, "between 1 and 128"),
            ("stop", all(self.stop), "without empty strings"),
        )
        for name, holds, rule in checks:
            if not holds:
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be {rule}", param=name)
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError("logit_bias maps token ids to values from -100 to 100", param="logit_bias")


@dataclass(slots=True)
class TextOptions:
    """What the detokenizer needs to turn one request's tokens into text.

    min_tokens: stop strings are searched only in the text of later tokens.
    keep_ids: special tokens that stay in the text when others are skipped, because they mark tool calls or reasoning.
    shown: how many tokens of `Request.output_ids` the client already has; the rest is delivered first. -1 for all.
    """

    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream: bool = False
    stream_interval: int = 1
    min_tokens: int = 0
    keep_ids: list[int] = field(default_factory=list)
    shown: int = -1


@dataclass(slots=True)
class LogprobOptions:
    """Which log-probabilities are requested.

    output: whether those of output tokens are.
    top: how many of the likeliest tokens are reported at each position.
    prompt_from: the first prompt position reported; -1 for none.
    token_ids: further tokens reported at each position, after the `top` likeliest.
    """

    output: bool = False
    top: int = 0
    prompt_from: int = -1
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slo:
    """Latency targets of one request in nanoseconds; None means that its class decides."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


def adapter_of(namespace: str) -> str:
    """The adapter (`Request.lora`) in a namespace of the prefix cache, "" for none."""
    return namespace.partition("\x00")[0]


def salt_of(namespace: str) -> str:
    """The salt (`Request.cache_salt`) in a namespace of the prefix cache, "" for none."""
    parts = namespace.split("\x00")
    return parts[1] if len(parts) > 1 else ""


def weights_of(namespace: str) -> str:
    """The weights (`Request.weights`) in a namespace of the prefix cache, "" for those that the engine started with."""
    parts = namespace.split("\x00")
    return parts[2] if len(parts) > 2 else ""


def weights_key(version: str, digest: str) -> str:
    """What KV of weights is named by (`Request.weights`): the version that clients see, and a digest of the weights."""
    return f"{version}#{digest}"


def weight_version(key: str) -> str:
    """The version in a `weights_key`, "" for that of the weights that the engine started with."""
    return key.rpartition("#")[0]


def adapter_name(adapter: str) -> str:
    """The name of an adapter, without the digest of its files."""
    return adapter.partition("#")[0]


@dataclass(slots=True)
class BootstrapInfo:
    """Links the two halves of a request under PD disaggregation: one engine prefills it, another one decodes it.

    room: the name that both halves share.
    peer: host:port of the engine that prefills; "" for the half that goes there.
    boot_id: the boot id of that engine's process; "" for any.
    """

    room: str
    peer: str = ""
    boot_id: str = ""


@dataclass(slots=True)
class Request:
    """One generation request as the engine sees it.

    number: unique in the engine, assigned by the submitter. A request with `sampling.n > 1` owns the numbers
        `number .. number + n - 1`, one per answer.
    prompt_ids: int32[prompt length].
    arrival_ns: the monotonic time at which the API received the request, or the router in front of it did.
    priority: None for none given, which ranks lowest.
    deadline_ns: counted from `arrival_ns`; None for none.
    cache_salt, lora: divide the prefix cache into namespaces. `lora` is the LoRA adapter, as name and digest of its
        files (`name#digest`), "" for none.
    grammar: the grammar that the answer must follow, as Lark text; "" for none.
    output_ids: int32[n], an answer that was begun earlier or elsewhere and continues from there. It counts for limits,
        penalties, stops, seeds and usage as if it had been generated here, but is not delivered again. Such a request
        has one answer.
    awaits_kv: hold it back (Gate.KV) until a `KvAvailable` or `OpenGate` arrives for its KV.
    awaits_adapter: hold it back (Gate.ADAPTER) until its adapter has been read.
    handover: it ends with its first token; its pages are held for a reader outside until `PagesReleased`.
    kv: the link to its other half under PD disaggregation.
    pooling: the prompt's vector is the answer, and `max_new_tokens` is 0; "" for a generated answer.
    prediction: int32[n], what the client expects of the answer, as a source of drafts. It changes no answer.
    session: the conversation that the request is a turn of, "" for none. A session belongs to its tenant.
    turn: its index in the session, from 0.
    age_ns: the time it spent at a router; `arrival_ns`, when it arrived there, is earlier than here by that.
    weights: the weights that its KV is computed by, as version and digest (`weights_key`), "" for those that the engine
        started with. They divide the prefix cache as `cache_salt` does. The engine sets it.
    """

    number: int
    rid: str
    prompt_ids: Int32Array
    sampling: SamplingParams
    text: TextOptions = field(default_factory=TextOptions)
    logprobs: LogprobOptions | None = None
    arrival_ns: int = 0
    priority: int | None = None
    service_class: str | None = None
    tenant: str = ""
    deadline_ns: int | None = None
    slo: Slo | None = None
    cache_salt: str = ""
    lora: str = ""
    routing_key: str | None = None
    grammar: str = ""
    output_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)
    awaits_kv: bool = False
    awaits_adapter: bool = False
    handover: bool = False
    kv: BootstrapInfo | None = None
    pooling: Pooling = ""
    prediction: Int32Array = field(default_factory=lambda: NO_TOKENS)
    session: str = ""
    turn: int = 0
    age_ns: int = 0
    weights: str = ""

    @property
    def known_ids(self) -> Int32Array:
        """Prompt and `output_ids`, int32[prompt + output]: all tokens that are known when it arrives."""
        return np.concatenate((self.prompt_ids, self.output_ids)) if len(self.output_ids) else self.prompt_ids

    @property
    def namespace(self) -> str:
        """The namespace of the prefix cache. Requests in different namespaces never share KV."""
        if self.weights:
            return f"{self.lora}\x00{self.cache_salt}\x00{self.weights}"
        return f"{self.lora}\x00{self.cache_salt}" if self.lora or self.cache_salt else ""
