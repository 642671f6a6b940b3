"""The router in front of simulated replicas: its own policies, index and bookkeeping, in virtual time."""

from dataclasses import dataclass

from tokenyard.base import NS_PER_S, Finish, Request
from tokenyard.base.blocks import BLOCK_TOKENS
from tokenyard.router.choice import Features, PolicyOptions, make_policy, mix
from tokenyard.router.index import PrefixIndex, token_prompt
from tokenyard.router.load import Sent, Speed, TargetState

INDEX_BYTES = 1 << 30
KEY_BLOCKS = 4
"""A prompt is known by its first 256 tokens, as in the proxy."""


@dataclass(slots=True)
class _Open:
    """A request under way: where, and how its load is counted."""

    replica: int
    sent: Sent


class SimRouter:
    """Chooses a replica for each request, and learns from what becomes of it, as the proxy does."""

    def __init__(self, policy: str, replicas: int, seed: int, pool_tokens: int) -> None:
        """`pool_tokens`: the KV pool of a replica, which bounds what it can hold. Raises ConfigError for an unknown
        policy.
        """
        self._policy = make_policy(policy, PolicyOptions(seed=seed))
        speed = Speed()
        self.targets = [TargetState(f"r{number}", speed) for number in range(replicas)]
        self.index = PrefixIndex(INDEX_BYTES)
        for target in self.targets:
            self.index.limit(target.name, max(pool_tokens // BLOCK_TOKENS, 1))
        self._open: dict[int, _Open] = {}
        self.predicted_tokens = 0

    def choose(self, request: Request, now_ns: int) -> int:
        """The number of the replica that shall serve a request which arrives now."""
        tokens = len(request.prompt_ids)
        prompt = token_prompt(request.prompt_ids)
        matched = [BLOCK_TOKENS * self.index.match(target.name, prompt.digests) for target in self.targets]
        first = prompt.digests[min(KEY_BLOCKS, len(prompt.digests)) - 1] if prompt.digests else b""
        key = mix(int.from_bytes(bytes(first[:8]), "little")) if isinstance(first, bytes) else 0
        features = Features(tokens, matched, key, request.tenant)
        chosen = self._policy.rank(features, self.targets).order[0]
        target = self.targets[chosen]
        self._policy.sent(features, target)
        self.index.insert(target.name, prompt.digests)
        sent = Sent(target, tokens, matched[chosen], now_ns / NS_PER_S)
        self._open[request.number] = _Open(chosen, sent)
        self.predicted_tokens += matched[chosen]
        return chosen

    def first_token(self, number: int, now_ns: int) -> None:
        """The answer to request `number` begins."""
        self._open[number].sent.first_token(now_ns / NS_PER_S)

    def finished(self, finish: Finish) -> None:
        """A request has ended."""
        sent = self._open.pop(finish.number).sent
        sent.hit(finish.cached_tokens)
        sent.end()
