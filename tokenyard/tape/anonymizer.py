"""Anonymizes requests for a tape: token ids and names change by a key that is not kept, and text is left out.

Ids go through a keyed permutation of the vocabulary, names through a keyed hash, so equal things stay equal: the same
prefixes are shared, the same tokens end an answer, and a scheduler decides the same for the anonymized requests. It
hides text from a casual reader, not from a patient analyst: how often each token occurs stays visible.
"""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b, shake_256

import numpy as np

from tokenyard.base import (
    Cancel,
    Event,
    ExecutorInfo,
    Int32Array,
    KvAvailable,
    Request,
    SamplingParams,
    SchedulerSettings,
    SessionEnded,
    StopFound,
    Submit,
    TenantUsage,
    TextOptions,
    TurnEnded,
    UnloadAdapter,
    WeightsUpdated,
)
from tokenyard.base.request import NO_TOKENS
from tokenyard.base.settings import ANY_TENANT
from tokenyard.policy.service_levels import LEVEL_OF_CLASS

NAME_BYTES = 8
DRAW_BYTES = 8


class Anonymizer:
    """Ids and names under one key; with `key` None only text is removed."""

    def __init__(self, vocab_size: int, key: bytes | None) -> None:
        self._key = key
        self._vocab_size = vocab_size
        self._ids = None if key is None else _permutation(vocab_size, key)

    def ids(self, ids: Int32Array) -> Int32Array:
        """The ids (int32[n]) as the tape shows them. Values outside the vocabulary, such as -1, stay."""
        if self._ids is None or not len(ids):
            return ids
        if ids.min() >= -1 and ids.max() < self._vocab_size:
            # The last entry is -1, so index -1 gives -1.
            return self._ids[ids]
        known = (ids >= 0) & (ids < self._vocab_size)
        return np.where(known, self._ids[np.where(known, ids, 0)], ids)

    def few_ids(self, ids: Iterable[int]) -> list[int]:
        """`ids` for a short iterable of Python integers of any size."""
        table, size = self._ids, self._vocab_size
        return [int(table[one]) if table is not None and 0 <= one < size else one for one in ids]

    def name(self, name: str) -> str:
        """A name as the tape shows it; an empty name stays empty."""
        if self._key is None or not name:
            return name
        return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, key=self._key).hexdigest()

    def event(self, event: Event) -> Event:
        """An event as the tape shows it. Messages and matched stop strings are removed; they never affect a plan."""
        match event:
            case Submit():
                return replace(event, request=self.request(event.request))
            case Cancel():
                return replace(event, message="")
            case StopFound():
                return replace(event, matched="")
            case KvAvailable():
                return replace(event, token=self.few_ids([event.token])[0])
            case WeightsUpdated():
                return replace(event, version=self.name(event.version))
            case UnloadAdapter():
                return UnloadAdapter(self.name(event.adapter))
            case TenantUsage():
                return replace(event, tenants=[self.tenant(name) for name in event.tenants])
            case TurnEnded() | SessionEnded():
                return replace(event, session=self.name(event.session), tenant=self.tenant(event.tenant))
            case _:
                return event

    def request(self, request: Request) -> Request:
        """A request as the tape shows it. Classes of service that mean a level keep their name."""
        service_class = request.service_class
        return replace(
            request,
            rid="",
            prompt_ids=self.ids(request.prompt_ids),
            output_ids=self.ids(request.output_ids),
            sampling=self.sampling(request.sampling),
            text=TextOptions(),
            logprobs=replace(request.logprobs, token_ids=[]) if request.logprobs is not None else None,
            service_class=service_class if service_class in LEVEL_OF_CLASS else self.name(service_class or "") or None,
            tenant=self.tenant(request.tenant),
            cache_salt=self.name(request.cache_salt),
            lora=self.name(request.lora),
            weights=self.name(request.weights),
            grammar=self.name(request.grammar),
            routing_key=self.name(request.routing_key or "") or None,
            kv=None,
            prediction=NO_TOKENS,
            session=self.name(request.session),
        )

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters as the tape shows them, without stop strings, which are found outside the scheduler."""
        if not (sampling.stop or sampling.stop_token_ids or sampling.logit_bias):
            return sampling
        biased = self.few_ids(sampling.logit_bias)
        return replace(
            sampling,
            stop=[],
            stop_token_ids=self.few_ids(sampling.stop_token_ids),
            logit_bias=dict(zip(biased, sampling.logit_bias.values(), strict=True)),
        )

    def tenant(self, name: str) -> str:
        """A tenant's name as the tape shows it; `ANY_TENANT` stays the same."""
        return name if name == ANY_TENANT else self.name(name)

    def settings(self, settings: SchedulerSettings) -> SchedulerSettings:
        """The settings, with tenants named as in the requests on the tape."""
        return replace(settings, tenants={self.tenant(name): tenant for name, tenant in settings.tenants.items()})

    def info(self, info: ExecutorInfo) -> ExecutorInfo:
        """The executor's facts: anonymized ids, and of the model's path only the last part."""
        eos = tuple(self.few_ids(info.eos_token_ids))
        return replace(info, eos_token_ids=eos, model=info.model.rstrip("/").rpartition("/")[2])


def _permutation(size: int, key: bytes) -> Int32Array:
    """int32[size + 1]: the ids in an order drawn from `key`, and -1 behind them."""
    draws = np.frombuffer(shake_256(key).digest(size * DRAW_BYTES), np.dtype("<u8"))
    return np.append(np.argsort(draws, kind="stable").astype(np.int32), np.int32(-1))
