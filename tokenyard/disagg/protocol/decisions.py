"""Decides which prompts another engine computes, which engine, and how long to wait for it. Engines and the simulator
share it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenyard.base import CostModel, Request, StepWork
from tokenyard.base.blocks import BLOCK_TOKENS
from tokenyard.disagg.protocol.decode_peer import Peer
from tokenyard.disagg.protocol.messages import Want, pack_ids

MIN_OFFER_TIMEOUT_S = 5.0
MAX_OFFER_TIMEOUT_S = 60.0
OFFER_TIMEOUT_FACTOR = 4.0
"""Timeout of an offer, as a multiple of its predicted time."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt that another engine computes."""

    peer: Peer
    """That engine."""
    timeout_s: float
    """How long to wait for its offer, in seconds."""


@dataclass(frozen=True, slots=True)
class RemotePrefillRule:
    """The rule of one engine."""

    role: str
    """"decode": other engines compute all prompts that are long enough. "both": those that they compute faster."""
    cost: CostModel
    """Predicts prefills and copies."""
    page_size: int
    """Tokens of a page."""
    kv_bytes_per_token: int
    """Bytes of the KV of a token."""
    state_bytes: int = 0
    """Bytes of the recurrent states after a prompt; 0 for a model without."""

    def choose(
        self, peers: Sequence[Peer], tokens: int, cached: int, load: Callable[[CostModel], tuple[float, float]]
    ) -> RemotePrefill | None:
        """The engine that computes a prompt of `tokens` tokens, `cached` of which are cached here; None for this one.

        peers: the engines to choose from, those with the least work first. load: this engine's own load by a cost
        model (`Scheduler.prefill_load`).
        """
        if not peers:
            return None
        peer, uncached = peers[0], tokens - cached
        own_s = self._prefill_s(cached, uncached)
        waits_s, slowdown = load(self.cost)
        remote_s = own_s * peer.slowdown + peer.load_s
        copy_s = self.cost.copy(uncached * self.kv_bytes_per_token + self.state_bytes, "network")
        long_enough = uncached >= max(BLOCK_TOKENS, self.page_size)
        if not long_enough or not (self.role == "decode" or remote_s + copy_s < waits_s + own_s * slowdown):
            return None
        return RemotePrefill(peer, offer_timeout_s(remote_s))

    def _prefill_s(self, cached: int, uncached: int) -> float:
        """Seconds that the rest of a prompt is predicted to take on an idle device."""
        if uncached <= 0:
            return 0.0
        work = StepWork()
        work.add_chunk(cached, uncached)
        return self.cost.step(work)


def want_of(request: Request, boot_id: str) -> Want:
    """What the engine `boot_id` asks another one for to have the prompt of a request computed."""
    return Want(
        key=f"{boot_id}-{request.number}",
        prompt=pack_ids(request.known_ids),
        sampling=replace(request.sampling, n=1, stop=[]),
        cache_salt=request.cache_salt,
        lora=request.lora,
        weights=request.weights,
        priority=request.priority,
        service_class=request.service_class,
        tenant=request.tenant,
    )


def offer_timeout_s(predicted_s: float) -> float:
    """Timeout in seconds of an offer that is predicted to take `predicted_s`."""
    return min(max(OFFER_TIMEOUT_FACTOR * predicted_s, MIN_OFFER_TIMEOUT_S), MAX_OFFER_TIMEOUT_S)
