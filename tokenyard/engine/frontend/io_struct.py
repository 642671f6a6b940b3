"""What a front end hands to `TokenizerManager.generate`, and what it gets back."""

from dataclasses import dataclass, field

from tokenyard.base import Finish, Int32Array, LogprobOptions, Pooling, SamplingParams, Slo, TextOptions, TokenLogprobs
from tokenyard.base.request import BootstrapInfo


@dataclass(slots=True)
class GenerateReqInput:
    """One generation request as a front end states it: exactly one of `text` and `input_ids` is given.

    `sampling.max_new_tokens` is cut to the rest of the context if `clamp_max_new_tokens`, and refused otherwise when
    it does not fit. `seed` None draws one from the system; `sampling.seed` is overwritten either way. `rid` "" makes
    one up. `deadline_ms` counts from arrival. `text_options.stream` asks for deltas as they come; without it each
    answer arrives as one delta at its end. `add_special_tokens` is for `text`: whether the tokenizer may put its own
    marks (such as BOS) around it. `grammar` is Lark text that the answer must keep to, "" for nothing. `output_ids` are
    the first tokens of an answer that was begun elsewhere: it goes on from there, counts them and gives only what is
    new; such a request has one answer. With `pooling` nothing is generated (`sampling.max_new_tokens` is 0), and the
    finish carries the vector of the prompt. `prediction` is text that the answer may resemble, from which drafts come
    where the engine speculates. `rank` is the data-parallel rank that must serve it, None for any. `kv` is where its
    other half is, if it comes in two. `lora` is the name of its LoRA adapter, "" for none.
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


@dataclass(slots=True)
class OutputDelta:
    """New output of one answer.

    `index` says which of the n answers. `text` and `token_ids` are new since its last delta; text that may still
    turn into a stop string or that ends inside a character is held back together with its tokens. `logprobs`
    holds the entries of prompt positions first. The counts are totals so far. `finish` is set on the last delta of
    each answer and on no other.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def extend(self, later: "OutputDelta") -> None:
        """Merge the next delta of the same answer."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.completion_tokens = later.completion_tokens
        self.cached_tokens = later.cached_tokens
        self.finish = later.finish
