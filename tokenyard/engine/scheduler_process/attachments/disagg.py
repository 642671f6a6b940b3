"""PD disaggregation in a scheduler process: which prompts other engines compute, and which this one does.

It is what vLLM calls a KVConnector: it connects the event loop to the thread of `disagg.transfer_manager`. The loop
passes requests, output and KV moves; results enter the scheduler as events.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tokenyard.base import (
    NS_PER_S,
    Cancel,
    Event,
    Executor,
    ExecutorInfo,
    Handover,
    InvalidRequestError,
    KvLoaded,
    KvMove,
    Load,
    Request,
    SamplingParams,
    Submit,
    TextOptions,
    TokenBatch,
)
from tokenyard.base.request import BootstrapInfo
from tokenyard.disagg.handshake import EngineIdentity, Hello
from tokenyard.disagg.peer_discovery import Dialer
from tokenyard.disagg.process_vm import Probe, machine_id
from tokenyard.disagg.protocol import VERSION, Prefill, Timeouts, Want
from tokenyard.disagg.protocol.decisions import MAX_OFFER_TIMEOUT_S, RemotePrefillRule, want_of
from tokenyard.disagg.protocol.messages import unpack_ids
from tokenyard.disagg.transfer_manager import KvTransferManager
from tokenyard.engine.processes.engine_config import DisaggConfig, EngineConfig
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.kv_layout.layout import map_pages
from tokenyard.kv_layout.model_digest import model_digest
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.tape.recorder import Core

MODEL_OPTIONS = ("load_format", "seed", "quantization", "kv_cache_dtype")
"""Settings of an executor that decide, with the checkpoint, what KV its model computes."""

FIRST_NUMBER = 1 << 40
"""Requests for other engines have numbers from here on; those of clients are counted up from 1."""

LOAD_INTERVAL_NS = NS_PER_S // 10


class DisaggConnector(Attachment):
    """The transfers of one scheduler. `deliver` takes events to it, from any thread."""

    name = "disagg"

    def __init__(
        self,
        config: DisaggConfig,
        identity: EngineIdentity,
        core: Core,
        info: ExecutorInfo,
        deliver: Callable[[Event], None],
        rank: int = 0,
    ) -> None:
        """Raises ConfigError if it cannot listen where it should."""
        self._config = config
        self._rank = rank
        self._core = core
        self._deliver = deliver
        self._info = info
        self._cost = core.cost or prior_cost_model(info)
        state_bytes = 0 if info.states is None else info.states.slot_bytes
        self._rule = RemotePrefillRule(config.role, self._cost, info.page_size, info.kv_bytes_per_token, state_bytes)
        self._remote_prefills: set[int] = set()
        self._bootstrap_requests: set[int] = set()
        self._load_at_ns = 0
        beat_ns = round(config.beat_s * NS_PER_S)
        timeouts = Timeouts(lease_ns=round(config.lease_s * NS_PER_S), beat_ns=beat_ns, silence_ns=3 * beat_ns)
        self._manager = KvTransferManager(
            identity,
            timeouts,
            deliver,
            partial(request_for, info.vocab_size),
            first_number=FIRST_NUMBER,
            host=config.host if config.role in ("prefill", "both") else None,
            port=config.port + rank if config.port else 0,
            backend=config.backend,
        )
        self._dialer = Dialer(config.prefill_engines, self._manager.dialled)
        self._manager.on_lost = self._dialer.lost
        self._dialer.on_unreachable = lambda name: self._manager.call(
            partial(self._manager.decode_peer.unreachable, name)
        )
        self._manager.start()
        self._dialer.start()

    def close(self) -> None:
        """End all transfers and wait for their ends."""
        self._dialer.close()
        self._manager.close()

    def busy(self) -> bool:
        """Whether requests wait for other engines. Raises what ended the transfers: nothing would wake them again."""
        if self._manager.failure is not None:
            raise self._manager.failure
        return self._manager.decode_peer.open_keys > 0

    def held_reasons(self) -> Mapping[str, str]:
        """Requests wait for KV from other engines."""
        return {"kv": "until the prefill engine answers"}

    def describe(self, now: int) -> Mapping[str, Any]:
        """What people and other engines should know, by rank."""
        return {"transfer": {f"rank {self._rank}": self._counters()}}

    def _counters(self) -> dict[str, Any]:
        manager = self._manager
        return {
            "role": self._config.role,
            "address": manager.address,
            "boot_id": manager.identity.hello.boot_id,
            "open": manager.decode_peer.open_keys,
            "computing_for_others": manager.prefill_peer.open_keys,
            "held_for_others": manager.prefill_peer.held_keys,
            "moved_bytes": manager.moved_bytes,
            "connected": [peer.name for peer in manager.healthy_peers],
            **{name: count for name, count in manager.prefill_peer.counters.items() if count},
            **dict(manager.decode_peer.counters),
        }

    # ---- calls of the event loop ----------------------------------------------------------------------------------

    def submitted(self, request: Request, now: int) -> Request:
        """Decide where the prompt of a request is computed; returns the request for the scheduler."""
        if request.number >= FIRST_NUMBER:
            return request
        if request.kv is not None and request.sampling.n == 1:
            return self._join_bootstrap_room(request, request.kv)
        if self._config.role == "prefill" or not self._config.prefill_engines:
            return request
        options = request.logprobs
        if options is not None and options.prompt_from >= 0:
            return request
        tokens = len(request.prompt_ids) + len(request.output_ids)
        cached, peers = self._core.cached_tokens(request), self._manager.healthy_peers
        chosen = self._rule.choose(peers, tokens, cached, lambda cost: self._core.prefill_load(cost, now))
        if chosen is None:
            return request
        want = want_of(request, self._manager.identity.hello.boot_id)
        self._want(want, request, chosen.peer.name, chosen.timeout_s)
        return replace(request, awaits_kv=True)

    def take(self, moves: list[KvMove]) -> list[KvMove]:
        """Start the handovers and loads among `moves`; returns the rest."""
        rest: list[KvMove] = []
        for one in moves:
            if isinstance(one, Load):
                self._load(one)
            elif isinstance(one, Handover):
                self._hand_over(one)
            else:
                rest.append(one)
        return rest

    def on_output(self, batch: TokenBatch) -> None:
        """Look at the output of a step, and take out what is not for clients of this engine."""
        now = time.monotonic_ns()
        if now - self._load_at_ns > LOAD_INTERVAL_NS:
            self._load_at_ns = now
            prefill_peer = self._manager.prefill_peer
            prefill_peer.load_s, prefill_peer.slowdown = self._core.prefill_load(self._cost, now)
        if self._remote_prefills:
            self._report_ended(batch)
        if self._bootstrap_requests:
            self._report_bootstrap_prefills(batch)
        foreign = batch.numbers >= FIRST_NUMBER
        if foreign.any() or any(finish.number >= FIRST_NUMBER for finish in batch.finished):
            self._remove_foreign_rows(batch, foreign)

    # ---- asking ----------------------------------------------------------------------------------------------------

    def _want(self, want: Want, request: Request, peer: str, max_s: float) -> None:
        numbers = range(request.number, request.number + request.sampling.n)
        plain = request.sampling.n == 1 and not request.grammar and request.logprobs is None
        takes_token = plain and not len(request.output_ids)
        timeout_ns, decode_peer = round(max_s * NS_PER_S), self._manager.decode_peer
        self._remote_prefills.add(request.number)
        self._manager.call(lambda now: decode_peer.want(want, numbers, peer, now, timeout_ns, takes_token=takes_token))

    def _join_bootstrap_room(self, request: Request, route: BootstrapInfo) -> Request:
        """One half of a request with a bootstrap room: hand its KV over in the room, or fetch it from there."""
        prefill_peer, deliver, number = self._manager.prefill_peer, self._deliver, request.number
        if not route.peer:
            self._bootstrap_requests.add(number)

            def expect(now: int) -> None:
                if not prefill_peer.expect(route.room, number, now):
                    deliver(Cancel([number], f"{route.room} is in use, or was", "room_in_use"))

            self._manager.call(expect)
            return replace(request, handover=True)
        options = request.logprobs
        if options is not None and options.prompt_from >= 0:
            return request
        want = Want(route.room, b"", SamplingParams(), boot_id=route.boot_id, attach=True, weights=self._core.weights)
        self._want(want, request, route.peer, MAX_OFFER_TIMEOUT_S)
        self._dialer.want(route.peer)
        return replace(request, awaits_kv=True)

    def _load(self, load: Load) -> None:
        decode_peer, deliver = self._manager.decode_peer, self._deliver

        def command(now: int) -> None:
            if not decode_peer.loads(load, now):
                # The offer has gone meanwhile.
                deliver(KvLoaded(load.number, load.start))

        self._manager.call(command)

    def _report_ended(self, batch: TokenBatch) -> None:
        """Report requests that have ended, or continue without the KV that was offered for them."""
        decode_peer = self._manager.decode_peer
        over = [finish.number for finish in batch.finished if finish.number in self._remote_prefills]
        over += [number for number in self._manager.offered if not self._core.awaits_admission(number)]
        for number in over:
            self._remote_prefills.discard(number)
            self._manager.call(partial(decode_peer.ended, number))

    # ---- serving ---------------------------------------------------------------------------------------------------

    def _report_bootstrap_prefills(self, batch: TokenBatch) -> None:
        """Note how the halves ended that clients sent for prefill; to a client, a handover is the end of a token."""
        for finish in batch.finished:
            if finish.number not in self._bootstrap_requests:
                continue
            self._bootstrap_requests.discard(finish.number)
            if finish.reason == "handover":
                finish.reason = "length"
                continue
            why = (finish.cause or "aborted") if finish.reason == "abort" else ""
            found = batch.tokens[batch.numbers == finish.number]
            token = int(found[-1]) if len(found) else -1
            finished = partial(self._manager.prefill_peer.finished, weights=self._core.weights)
            self._manager.call(partial(finished, finish.number, why, token))

    def _hand_over(self, handover: Handover) -> None:
        prefill_peer, weights = self._manager.prefill_peer, self._core.weights
        self._manager.call(lambda now: prefill_peer.handed_over(handover, now, weights))

    def _remove_foreign_rows(self, batch: TokenBatch, foreign: np.ndarray) -> None:
        """Take the rows of other engines' requests out of a batch, and note how these requests ended."""
        prefill_peer = self._manager.prefill_peer
        tokens = dict(zip(batch.numbers[foreign].tolist(), batch.tokens[foreign].tolist(), strict=True))
        for finish in batch.finished:
            if finish.number < FIRST_NUMBER or finish.reason == "handover":
                continue
            why = (finish.cause or "aborted") if finish.reason == "abort" else ""
            token = tokens.get(finish.number, -1)
            finished = partial(prefill_peer.finished, weights=self._core.weights)
            self._manager.call(partial(finished, finish.number, why, token))
        keep = ~foreign
        batch.numbers, batch.tokens, batch.hits = batch.numbers[keep], batch.tokens[keep], batch.hits[keep]
        batch.started = [started for started in batch.started if started.number < FIRST_NUMBER]
        batch.finished = [finish for finish in batch.finished if finish.number < FIRST_NUMBER]


def open_disagg_connector(
    config: EngineConfig, core: Core, executor: Executor, deliver: Callable[[Event], None], rank: int = 0
) -> DisaggConnector | None:
    """The transfers that the settings ask for, if they do. Raises ConfigError for an executor whose KV cannot be moved
    or an address that cannot be had.
    """
    settings = config.disagg
    if settings.role == "null":
        return None
    return DisaggConnector(settings, identify(config, executor), core, executor.info, deliver, rank)


def weights_digest(config: EngineConfig, info: ExecutorInfo) -> str:
    """A digest of what computes the KV of this engine."""
    options = config.executor_options
    facts = (config.executor, str(info.vocab_size), *(str(options.get(name, "")) for name in MODEL_OPTIONS))
    return model_digest(config.model_path, *facts)


def identify(config: EngineConfig, executor: Executor) -> EngineIdentity:
    """This engine as the others see it. Raises ConfigError for an executor whose KV cannot be moved."""
    pages, info, states = map_pages(executor.pieces), executor.info, map_pages(executor.state_pieces)
    hello = Hello(
        version=VERSION,
        boot_id=secrets.token_hex(8),
        nonce=b"",
        model=weights_digest(config, info),
        dtype=info.dtype,
        page_size=info.page_size,
        pieces=len(pages.origins),
        piece_bytes=pages.nbytes,
        machine=machine_id(),
        pid=os.getpid(),
        state_pieces=len(states.origins),
        state_piece_bytes=states.nbytes,
    )
    return EngineIdentity(hello, pages, config.disagg.secret.encode(), Probe(), states)


def request_for(vocabulary: int, prefill: Prefill) -> Event:
    """The event that submits what another engine wants; vocabulary: tokens of the model.

    Raises InvalidRequestError for a prompt that is cut off and for tokens that the model does not have.
    """
    want = prefill.want
    if len(want.prompt) % 4:
        raise InvalidRequestError("a prompt that is cut off")
    ids = unpack_ids(want.prompt).astype(np.int32, copy=False)
    want.sampling.validate()
    named = [*want.sampling.logit_bias, *want.sampling.stop_token_ids]
    known = not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary)
    if not known or any(not 0 <= token < vocabulary for token in named) or want.sampling.n != 1:
        raise InvalidRequestError("tokens that this model does not have")
    request = Request(
        number=prefill.number,
        rid=f"for {want.key}",
        prompt_ids=ids,
        sampling=want.sampling,
        text=TextOptions(),
        arrival_ns=time.monotonic_ns(),
        priority=want.priority,
        service_class=want.service_class,
        tenant=want.tenant,
        cache_salt=want.cache_salt,
        lora=want.lora,
        handover=True,
    )
    return Submit(request)
