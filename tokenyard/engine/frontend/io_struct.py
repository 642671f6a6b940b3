"""What a front end hands to `TokenizerManager.generate`, and what it gets back."""

from dataclasses import dataclass, field

from tokenyard.base import Finish, Int32Array, LogprobOptions, Pooling, SamplingParams, Slo, TextOptions, TokenLogprobs
from tokenyard.base.request import BootstrapInfo


@dataclass(slots=True)
class GenerateReqInput:
    """One generation request as a front end states it: exactly one of `text` and `input_ids` is given.

    SGLang's `GenerateReqInput`.

    sampling: its `seed` is overwritten.
    text_options: with `stream`, deltas are delivered as they come; without it, each answer is one delta at its end.
    seed: None draws one from the system.
    clamp_max_new_tokens: whether `sampling.max_new_tokens` is cut to the rest of the context; without it, a value that
        does not fit is refused.
    add_special_tokens: whether the tokenizer may add its special tokens (such as BOS) to `text`.
    rid: the request's id; "" generates one.
    deadline_ms: counts from arrival.
    lora: name of the LoRA adapter; "" for none.
    grammar: Lark text that the answer must follow; "" for none.
    output_ids: the first tokens of an answer that was begun elsewhere. The request continues it, counts them, and
        returns only new output; it has one answer.
    pooling: if set, nothing is generated (`sampling.max_new_tokens` is 0), and the finish carries the prompt's vector.
    rank: the data-parallel rank that must serve the request; None for any.
    kv: the other half of the request under PD disaggregation; None for none.
    prediction: text that the answer may resemble, a source of drafts for speculative decoding.
    session: the session that the request is a turn of, "" for none. It belongs to the tenant.
    turn: its index in the session, from 0.
    age_ns: the time that it has spent at the fleet's router; arrival was so much earlier.
    """

    text: str | None = None
    input_ids: Int32Array | list[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    text_options: TextOptions = field(default_factory=TextOptions)
    logprobs: LogprobOptions | None = None
    seed: int | None = None
    clamp_max_new_tokens: bool = True
    add_special_tokens: bool = True
    rid: str = ""
    priority: int | None = None
    service_class: str | None = None
    tenant: str = ""
    deadline_ms: float | None = None
    slo: Slo | None = None
    cache_salt: str = ""
    lora: str = ""
    routing_key: str | None = None
    grammar: str = ""
    output_ids: Int32Array | list[int] | None = None
    pooling: Pooling = ""
    rank: int | None = None
    kv: BootstrapInfo | None = None
    prediction: str = ""
    session: str = ""
    turn: int = 0
    age_ns: int = 0


@dataclass(slots=True)
class OutputDelta:
    """New output of one answer.

    index: which of the n answers.
    text, token_ids: output since its last delta. Text that may become a stop string or that ends inside a character is
        held back together with its tokens.
    prompt_tokens, completion_tokens, cached_tokens: totals so far.
    finish: set on the last delta of each answer only.
    logprobs: entries of prompt positions come first.
    said: on the first delta of an answer that was begun elsewhere, the text that the client already has.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    said: str = ""

    def extend(self, later: "OutputDelta") -> None:
        """Merge the next delta of the same answer."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.completion_tokens = later.completion_tokens
        self.cached_tokens = later.cached_tokens
        self.finish = later.finish
