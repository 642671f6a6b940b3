"""What no scheduler can beat: oracle bounds on attainment and on the prefix hit rate."""

from hashlib import blake2b

import numpy as np

from tokenyard.base import Float64Array, Int32Array
from tokenyard.cost import Profile, unloaded_prefill_s
from tokenyard.sim.content import BlankContent, UniqueContent
from tokenyard.sim.engine import SloTargets
from tokenyard.sim.workload import Workload

WINDOW_EDGES = 96
MS_PER_S = 1000.0


def least_work_s(workload: Workload, profile: Profile) -> Float64Array:
    """float64[n], the least device seconds each request needs: what its own tokens and attention cost, alone of steps.

    Nothing is counted as cached and nothing for the step's constant part, which others may share.
    """
    terms = profile.terms
    prompt = workload.prompt_tokens.astype(np.float64)
    output = workload.output_tokens.astype(np.float64)
    token_ms = terms.token_ms + terms.tp_token_ms
    prefill_ms = prompt * token_ms + terms.area_ms * prompt**2 / 2
    decodes = output - 1
    read_tokens = decodes * prompt + decodes * (decodes + 1) / 2
    work: Float64Array = (prefill_ms + decodes * token_ms + terms.context_ms * read_tokens) / MS_PER_S
    return work


def attainment_bound(workload: Workload, profile: Profile, slo: SloTargets, replicas: int = 1) -> float:
    """An upper bound on the share of requests that can meet `slo`, for any scheduler that knows everything.

    Requests that arrive after t1 and must end before t2 (first token on time, then every token on time) need their
    work done within t2 - t1. Whatever does not fit is missed, largest first, as that costs the fewest requests. The
    worst set of windows without overlap is found by dynamic programming. Steps that serve decodes in time last at most
    the token target, so their constant part takes its share of the device. Several replicas count as one device that
    is as much faster.
    """
    work, arrival = least_work_s(workload, profile), workload.arrival_s
    unloaded = np.array([unloaded_prefill_s(profile.cost(), int(tokens)) for tokens in workload.prompt_tokens])
    per_token_s = slo.per_token_s(workload)
    within_s = slo.first_token_s(workload, unloaded) + per_token_s * (workload.output_tokens - 1)
    deadline = arrival + np.fmin(within_s, workload.deadline_s)
    constant_s = (profile.terms.step_ms + profile.terms.dense_ms + profile.terms.tp_step_ms) / MS_PER_S
    speed = replicas * max(1.0 - constant_s / float(per_token_s.max()), 1e-9)
    edges = np.linspace(0.0, float(deadline.max()) + 1e-6, WINDOW_EDGES)
    # missed[j]: the most misses that windows ending at or before edge j can prove.
    missed = np.zeros(WINDOW_EDGES, np.int64)
    for j in range(1, WINDOW_EDGES):
        missed[j] = missed[j - 1]
        before = deadline <= edges[j]
        for i in range(j):
            inside = work[before & (arrival >= edges[i])]
            missed[j] = max(missed[j], missed[i] + _must_miss(inside, speed * (edges[j] - edges[i])))
    return 1.0 - float(missed[-1]) / len(workload)


def _must_miss(work: Float64Array, capacity_s: float) -> int:
    """The fewest requests to leave out so that the rest fits."""
    if work.sum() <= capacity_s:
        return 0
    kept = np.searchsorted(np.cumsum(np.sort(work)), capacity_s, side="right")
    return len(work) - int(kept)


def infinite_cache_hit_rate(workload: Workload, block_tokens: int = 512) -> float:
    """The share of prompt tokens in a prefix some earlier request brought, if nothing ever left the cache.

    Only whole blocks count, a request's own prompt enters at once, answers are not cached.
    """
    if isinstance(workload.content, UniqueContent | BlankContent):
        return 0.0
    seen: set[bytes] = set()
    hits = 0
    for index, tokens in enumerate(workload.prompt_tokens.tolist()):
        hits += _hit_blocks(workload.content.prompt_ids(index, tokens), block_tokens, seen)
    return hits * block_tokens / float(workload.prompt_tokens.sum(dtype=np.int64))


def _hit_blocks(ids: Int32Array, block_tokens: int, seen: set[bytes]) -> int:
    """Blocks from the left that are in `seen`; all blocks of the prompt are added, as chained digests."""
    hits, matching, link = 0, True, b""
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        link = blake2b(link + ids[start : start + block_tokens].tobytes(), digest_size=16).digest()
        matching = matching and link in seen
        hits += matching
        seen.add(link)
    return hits
