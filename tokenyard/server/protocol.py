"""Request bodies as dataclasses, filled by msgspec.

Optional fields may be null, which means "not given". Unknown fields are ignored and logged once, or refused in strict
mode. Errors are InvalidRequestError with the field at fault.
"""

import logging
import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
import orjson

from tokenyard.base import InvalidRequestError
from tokenyard.server.http.large_bodies import check_parts, run_off_loop

log = logging.getLogger(__name__)

MAX_SEEN_FIELDS, MAX_LOGGED_FIELDS = 1000, 20
"""Unknown field names that are remembered, and that one request may log."""

MAX_ENTRIES = {
    "stop": 128,
    "stop_token_ids": 1024,
    "logit_bias": 20_000,
    "tools": 1024,
    "documents": 1024,
    "label_token_ids": 1024,
}
"""Maximum entries of a field. Longer ones are refused before their entries are checked, which would take too long."""

Priority = int | str | None
T = TypeVar("T")


@dataclass(kw_only=True)
class StreamOptions:
    """Extra content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(kw_only=True)
class SloFields:
    """Latency targets in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(kw_only=True)
class ConstraintFields:
    """What an answer must look like, in SGLang's names."""

    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None


@dataclass(kw_only=True)
class StructuredOutputFields:
    """The same in the names of the OpenAI API and vLLM, new and old."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(kw_only=True)
class TemplateFields:
    """What a chat template shows beside the messages, and which tools the answer may call."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(kw_only=True)
class SamplingFields(ConstraintFields):
    """How tokens are chosen; the names that the OpenAI API, SGLang and vLLM share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stop_regex: str | list[str] | None = None
    custom_params: dict[str, Any] | None = None


@dataclass(kw_only=True)
class SchedulingFields:
    """The client, how urgent its request is, what it may share with others, and its data-parallel rank."""

    rid: str | list[str] | None = None
    priority: Priority = None
    service_tier: str | None = None
    tenant: str | None = None
    user: str | None = None
    deadline_ms: float | None = None
    slo: SloFields | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    routing_key: str | None = None
    lora_path: str | list[str | None] | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None


@dataclass(kw_only=True)
class SessionFields:
    """Which session a request is a turn of, and how long its KV is needed (`server/http/turns.py` reads them)."""

    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_control: dict[str, Any] | None = None
    return_cached_tokens_details: bool | None = None
    nvext: dict[str, Any] | None = None


@dataclass(kw_only=True)
class DisaggFields:
    """The peer of a request under PD disaggregation (see `openai.disagg_params`)."""

    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None


@dataclass(kw_only=True)
class UnsupportedFields:
    """Fields of SGLang, vLLM and older APIs that this server refuses; see `refuse_unsupported`."""

    custom_logit_processor: Any = None
    logits_processors: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    functions: Any = None
    chat_template: Any = None
    audio: Any = None
    web_search_options: Any = None


@dataclass(kw_only=True)
class IgnoredFields:
    """Hints and options of clients; most change nothing here."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    custom_labels: dict[str, Any] | None = None
    return_cached_tokens_details: bool | None = None


@dataclass(kw_only=True)
class ContinuationFields:
    """Fields with which a router continues a stream at another engine: of all APIs.

    output_ids: the tokens of the answer that the client already has; a list for each of several answers.
    return_token_ids: whether events carry the ids of their tokens.
    """

    output_ids: list[int | list[int]] | None = None
    return_token_ids: bool | None = None


@dataclass(kw_only=True)
class OpenAIFields(
    SamplingFields,
    StructuredOutputFields,
    SchedulingFields,
    SessionFields,
    DisaggFields,
    ContinuationFields,
    UnsupportedFields,
    IgnoredFields,
):
    """Fields that chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    return_x_sched: bool | None = None
    request_id: str | None = None
    prediction: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ChatRequest(OpenAIFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None


@dataclass(kw_only=True)
class CompletionRequest(OpenAIFields):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


@dataclass(kw_only=True)
class NativeSampling(SamplingFields):
    """`sampling_params` of `POST /generate`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None


@dataclass(kw_only=True)
class NativeRequest(SchedulingFields, SessionFields, DisaggFields, ContinuationFields, UnsupportedFields):
    """`POST /generate`, one prompt or a batch."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool | None = None


@dataclass(kw_only=True)
class TokenizeRequest:
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


@dataclass(kw_only=True)
class DetokenizeRequest:
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


@dataclass(kw_only=True)
class AbortRequest:
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


@dataclass(kw_only=True)
class CloseSessionRequest:
    """`POST /close_session`."""

    session_id: str
    tenant: str | None = None
    user: str | None = None


@dataclass(kw_only=True)
class LoadAdapterRequest:
    """`POST /load_lora_adapter`."""

    lora_name: str
    lora_path: str


@dataclass(kw_only=True)
class UnloadAdapterRequest:
    """`POST /unload_lora_adapter`."""

    lora_name: str


@dataclass(kw_only=True)
class PauseRequest:
    """`POST /pause_generation`."""

    mode: str | None = None


@dataclass(kw_only=True)
class UpdateWeightsFromDisk:
    """`POST /update_weights_from_disk`.

    model_path: the folder of the checkpoint, as the server sees it.
    draft_model_path: the folder of a checkpoint of the draft model, which keeps its weights by default.
    weight_version: the name that answers have for the weights; the number of the update by default.
    abort_all_requests: whether open requests end; they go on under the new weights by default.
    flush_cache: whether KV of the old weights is evicted; new requests never use it in any case.
    torch_empty_cache, recapture_cuda_graph, is_async, keep_pause, token_step: SGLang's; they change nothing here.
    """

    model_path: str
    draft_model_path: str | None = None
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    is_async: bool | None = None
    keep_pause: bool | None = None
    token_step: int | None = None


@dataclass(kw_only=True)
class UpdateWeightsFromTensor:
    """`POST /update_weights_from_tensor` with a JSON body; a safetensors body has these as query parameters.

    path: a safetensors file as the server sees it, such as one in /dev/shm. It is copied.
    flush_cache: `false` says that more tensors follow, which are used together with these.
    serialized_named_tensors: SGLang's pickled tensors, which are refused.
    load_format, torch_empty_cache: SGLang's.
    """

    path: str | None = None
    weight_version: str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    load_format: str | None = None
    torch_empty_cache: bool | None = None
    serialized_named_tensors: Any = None


@dataclass(kw_only=True)
class InitWeightsUpdateGroup:
    """`POST /init_weights_update_group`: a group of torch.distributed whose rank 0 is the trainer.

    rank_offset: the rank of this engine's first data-parallel rank.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str | None = None
    backend: str | None = None


@dataclass(kw_only=True)
class UpdateWeightsFromDistributed:
    """`POST /update_weights_from_distributed`: what the trainer broadcasts next, in this order.

    flush_cache: `false` says that more tensors follow, which are used together with these.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: str | None = None


@dataclass(kw_only=True)
class DestroyWeightsUpdateGroup:
    """`POST /destroy_weights_update_group`."""

    group_name: str | None = None


@dataclass(kw_only=True)
class MemoryOccupation:
    """`POST /release_memory_occupation` and `/resume_memory_occupation`.

    tags: `kv_cache`, `weights`; both by default.
    """

    tags: list[str] | None = None


@dataclass(kw_only=True)
class GetWeightsByName:
    """`POST /get_weights_by_name`.

    truncate_size: how many rows of the tensor.
    """

    name: str
    truncate_size: int | None = None


@dataclass(kw_only=True)
class ResumeRequest:
    """`POST /v1/requests/{id}/resume`, for a request that was paused before the engine ended.

    shown_tokens: tokens of the answer that the client already has.
    stream: whether the rest is streamed.
    """

    shown_tokens: int | None = None
    stream: bool | None = None


@dataclass(kw_only=True)
class UpdateRequest:
    """`PATCH /v1/requests/{id}`."""

    priority: int | None = None
    deadline_ms: float | None = None


@dataclass(kw_only=True)
class SchedulerRequest:
    """`POST /v1/scheduler`."""

    policy: str
    options: dict[str, float | int | str | bool] = field(default_factory=dict)


def parse(body: bytes, kind: type[T], *, strict: bool = False) -> T:
    """`body` (JSON) as a `kind`. Raises InvalidRequestError saying what is wrong and in which field."""
    check_parts(body)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object")
    _check_unknown_fields(content, kind, strict)
    return from_fields(content, kind)


def from_fields(content: dict[str, Any], kind: type[T]) -> T:
    """A body's fields as a `kind`. Raises InvalidRequestError saying what is wrong and in which field."""
    _check_entries(content)
    sampling = content.get("sampling_params")
    for part in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(part, dict):
            _check_entries(part)
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _api_error(error) from error


def _check_entries(content: dict[str, Any]) -> None:
    """Raise InvalidRequestError for a list or an object with too many entries."""
    for name, max_entries in MAX_ENTRIES.items():
        value = content.get(name)
        if isinstance(value, list | dict) and len(value) > max_entries:
            message = f"{name} has {len(value)} entries; at most {max_entries} are accepted"
            raise InvalidRequestError(message, param=name)


async def parse_body(body: bytes, kind: type[T], *, strict: bool = False) -> T:
    """`parse`, in a thread if the body is large."""
    return await run_off_loop(body, lambda: parse(body, kind, strict=strict))


seen_unknown: set[str] = set()


def _check_unknown_fields(content: dict[str, Any], kind: type[Any], strict: bool) -> None:
    """Refuse fields that `kind` does not have, or log each name the first time it is seen."""
    known = [field.name for field in fields(kind)]
    unknown = content.keys() - set(known)
    if unknown and strict:
        name = min(unknown)
        near = get_close_matches(name, known, n=3)
        hint = f"; near names: {', '.join(near)}" if near else "; /docs has all fields"
        raise InvalidRequestError(f"unknown field {name[:64]!r}{hint}", param=name[:64])
    new = sorted(unknown - seen_unknown)
    if new and len(seen_unknown) < MAX_SEEN_FIELDS:
        seen_unknown.update(new[:MAX_SEEN_FIELDS])
        more = f" and {len(new) - MAX_LOGGED_FIELDS} more" if len(new) > MAX_LOGGED_FIELDS else ""
        log.warning(
            "ignored unknown request fields: %s%s", ", ".join(word[:64] for word in new[:MAX_LOGGED_FIELDS]), more
        )


def _api_error(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's error in the words of the API, with the field in `param`."""
    message, _, path = str(error).partition(" - at `$")
    if path:
        field = path.rstrip("`").lstrip(".")
        return InvalidRequestError(f"{field}: {_plain(message)}", param=re.split(r"[.\[]", field)[0] or None)
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return InvalidRequestError(f"the field {missing[1]!r} is required", param=missing[1])
    return InvalidRequestError(_plain(message))


def _plain(message: str) -> str:
    """msgspec's sentence without its backquotes and capital."""
    message = message.replace("`", "")
    return message[:1].lower() + message[1:]
