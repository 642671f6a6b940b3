"""Which rank of an engine gets a request if each rank has its own disk."""

import numpy as np
import pytest

from tokenyard.base import Request, SamplingParams
from tokenyard.engine.processes.engine_config import KvStoreConfig
from tokenyard.routing.balance import RankBalancer

POOL, PROMPT = 1024, 640


def request(seed: int) -> Request:
    ids = np.random.default_rng(seed).integers(3, 90, PROMPT).astype(np.int32)
    return Request(seed, str(seed), ids, SamplingParams())


def sent(balancer: RankBalancer, seed: int) -> int:
    place = balancer.choose(request(seed), range(balancer.ranks), float(seed))
    place.end()
    return place.rank


@pytest.mark.parametrize("event", ["left the pool", "process ended", "flushed"])
def test_a_prompt_goes_to_the_rank_whose_disk_has_it(event):
    """What has left a rank's memory, or was there before its process ended, is still on its disk."""
    matched = {}
    for disk_tokens in (0, 100 * POOL):
        balancer = RankBalancer("cache_aware", 2, POOL, disk_tokens=disk_tokens)
        rank = sent(balancer, 1)
        for seed in range(2, 12) if event == "left the pool" else ():
            sent(balancer, seed)
        if event == "process ended":
            balancer.lost(rank)
        elif event == "flushed":
            balancer.flushed()
        prompt = balancer.choose(request(1), range(2), 50.0)
        matched[disk_tokens] = PROMPT - prompt.sent.uncached
        if disk_tokens:
            assert prompt.rank == rank
    assert matched == {0: 0, 100 * POOL: PROMPT - 1}, "one token is always computed"


def test_only_a_ranks_own_disk_counts():
    assert KvStoreConfig(enabled=True, backend="disk", max_gb=1.0).disk_tokens(1000) == 10**6
    for tiers in (
        KvStoreConfig(backend="disk"),
        KvStoreConfig(enabled=True, backend="valkey"),
        KvStoreConfig(enabled=True),
    ):
        assert tiers.disk_tokens(1000) == 0
    assert KvStoreConfig(enabled=True, backend="disk").disk_tokens(0) == 0
