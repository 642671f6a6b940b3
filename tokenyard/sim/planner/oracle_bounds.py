"""Upper bounds: on attainment and prefix hit rate for any scheduler, and on the gain from predicted output lengths."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenyard.base import Float64Array, Int64Array
from tokenyard.cost import Profile, lower_terms, unloaded_prefill_s
from tokenyard.policy.registry import canonical_name
from tokenyard.policy.sjf import ShortestJobFirst
from tokenyard.sim.simulate import DefaultSlo, Setup
from tokenyard.sim.traces.conversations import PrefixHashes
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, BlankContent, UniqueContent, stream_tokens
from tokenyard.sim.traces.workload import Workload

WINDOW_EDGES = 96
MS_PER_S = 1000.0


def min_work_s(workload: Workload, profile: Profile, cached_tokens: Int64Array | None = None) -> Float64Array:
    """float64[n], the least device seconds that each request needs: the cost of its tokens and attention.

    The constant part of steps is left out, because other requests may share it, and so are `cached_tokens` (int64[n],
    None for no cache).
    """
    terms = lower_terms(profile.terms, profile.table)
    prompt = workload.prompt_tokens.astype(np.float64)
    cached = np.zeros(len(workload)) if cached_tokens is None else cached_tokens.astype(np.float64)
    output = workload.output_tokens.astype(np.float64)
    token_ms = terms.token_ms + terms.tp_token_ms
    prefill_ms = (prompt - cached) * token_ms + terms.area_ms * (prompt**2 - cached**2) / 2
    decodes = output - 1
    read_tokens = decodes * prompt + decodes * (decodes + 1) / 2
    work: Float64Array = (prefill_ms + decodes * token_ms + terms.context_ms * read_tokens) / MS_PER_S
    return work


def attainment_bound(
    workload: Workload,
    profile: Profile,
    slo: DefaultSlo,
    replicas: int = 1,
    cached_tokens: Int64Array | None = None,
) -> float:
    """An upper bound on the share of requests that meet `slo`, for any scheduler, even with perfect knowledge.

    Requests that arrive after t1 and must end before t2 (first token on time, then every token on time) need their work
    done within t2 - t1. If their work does not fit, requests are missed, largest first, which is the fewest. Dynamic
    programming finds the worst set of windows without overlap. Steps that serve decodes in time last at most the token
    target, so their constant part takes its share of the device. Several replicas count as one device that is as many
    times faster. `cached_tokens` as in `min_work_s`.
    """
    work, arrival = min_work_s(workload, profile, cached_tokens), workload.arrival_s
    unloaded = np.array([unloaded_prefill_s(profile.cost(), int(tokens)) for tokens in workload.prompt_tokens])
    per_token_s = slo.per_token_s(workload)
    within_s = slo.first_token_s(workload, unloaded) + per_token_s * (workload.output_tokens - 1)
    deadline = arrival + np.fmin(within_s, workload.deadline_s)
    terms = lower_terms(profile.terms, profile.table)
    constant_s = (terms.step_ms + terms.dense_ms + terms.tp_step_ms) / MS_PER_S
    longest_step_s = float(per_token_s[workload.output_tokens > 1].max(initial=0.0)) or np.inf
    speed = replicas * max(1.0 - constant_s / longest_step_s, 1e-9)
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


@dataclass(frozen=True, slots=True)
class EndlessCache:
    """The hits of a prefix cache without evictions, for any order of the requests.

    hit_rate: share of all prompt tokens.
    shared_tokens: int64[n], leading tokens of each prompt that another request has too; every request but the first
        hits all of them.
    """

    hit_rate: float
    shared_tokens: Int64Array


def endless_cache(workload: Workload, page_tokens: int) -> EndlessCache:
    """The hits if all prompts and answers stay cached, in whole pages: all copies of each page but one."""
    if isinstance(workload.content, UniqueContent | BlankContent):
        return EndlessCache(0.0, np.zeros(len(workload), np.int64))
    hashes = PrefixHashes()
    pages = workload.prompt_tokens.astype(np.int64) // page_tokens
    prompts, answers = [], []
    for index, tokens in enumerate(workload.prompt_tokens.tolist()):
        answer = stream_tokens(ANSWER_STREAM + index, np.arange(workload.output_tokens[index] - 1))
        known = np.concatenate((workload.content.prompt_ids(index, tokens), answer))
        ends = hashes.of(known)[page_tokens - 1 :: page_tokens].copy()  # so that the rest need not stay
        prompts.append(ends[: pages[index]])
        answers.append(ends[pages[index] :])
    distinct, which, copies = np.unique(np.concatenate(prompts), return_inverse=True, return_counts=True)
    answered = np.isin(distinct, np.concatenate(answers))
    owner = np.repeat(np.arange(len(workload)), pages)
    shared = np.bincount(owner, ((copies > 1) | answered)[which], len(workload)).astype(np.int64)
    hits = len(which) - int(np.count_nonzero(~answered))
    return EndlessCache(hits * page_tokens / float(workload.prompt_tokens.sum(dtype=np.int64)), shared * page_tokens)


def with_oracle(setup: Setup) -> Setup:
    """`setup` with each request's max_new_tokens set to its true length, which all predictions then use.

    Two settings predict answers: `headroom`, unless it is "none", and the policy `short-first` (`sjf`).
    """
    settings = setup.settings
    changes: dict[str, Any] = {} if settings.headroom == "none" else {"headroom": "limit"}
    if canonical_name(settings.schedule_policy) == ShortestJobFirst.name:
        # The longest answer so far, cut to max_new_tokens: the true length for all but the longest answers.
        changes["policy_options"] = {**settings.policy_options, "quantile": 1.0}
    return replace(setup, settings=replace(settings, **changes), oracle=True)
