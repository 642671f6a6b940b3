"""CPU cost of a policy in one step: order, and the first 32 candidates drawn and charged, by length of the queue.

The workload of the SGLang 0.5.7 figures printed next to ours: a tree of 20,000 sequences (conversations of four turns
under eight system prompts, 4.3 M tokens), waiting prompts of 2,048 tokens, half of them with 1,024 cached tokens, a
quarter with a cached system prompt, an eighth cold and an eighth sharing 512 uncached tokens in groups of eight.
Afterwards the upkeep that makes it possible: what an arrival, an admission, an insert and an evicted leaf cost with so
many waiting, also where all of them share one prefix. Prints thread CPU time, min / median in microseconds.

Run: python benchmarks/policy_cost.py [--sequences 20000] [--waiting 16,128,1000,10000]
"""

import argparse
import gc
import random
import statistics
import time
from itertools import islice

import numpy as np

from tokenyard.base import ExecutorInfo, Request, SamplingParams, SchedulerSettings, Submit
from tokenyard.cost import OnlineCost, get_profile
from tokenyard.policy import create_policy
from tokenyard.scheduler import Scheduler

DRAWN = 32
ROUNDS = 30
PROMPT = 2048
TARGET_US = {
    **dict.fromkeys(("fcfs", "lpm", "dfs-weight", "lof", "routing-key", "priority"), 300),
    **dict.fromkeys(("slo", "levels + fcfs", "vtc", "dlpm"), 600),
}
SGLANG_US = {"fcfs": 2.0, "lpm": 466_734, "dfs-weight": 471_409, "lof": 9_161, "random": 1_501, "priority": 13_046}
POLICIES = {
    "fcfs": {},
    "lpm": {},
    "dfs-weight": {},
    "lof": {},
    "routing-key": {},
    "random": {},
    "hrrn": {},
    "short-first": {},
    "mlfq": {},
    "priority": {},
    "priority + lpm": {"schedule_policy": "lpm", "enable_priority_scheduling": True},
    "priority, no aging + lpm": {
        "schedule_policy": "lpm",
        "enable_priority_scheduling": True,
        "priority_aging_s": 0.0,
    },
    "levels + fcfs": {"schedule_policy": "fcfs", "enable_service_levels": True},
    "bounded + lpm": {"schedule_policy": "lpm", "max_overtaken_tokens": 100_000},
    "edf": {},
    "slo": {},
    "vtc": {},
    "dlpm": {},
}
CLASSES = ("priority", "high", "normal", "low")


def ids(seed, count):
    return np.random.default_rng(seed).integers(1000, 128000, count).astype(np.int32)


def system_prompt(number):
    return ids(10_000_000 + number, 256)


def conversation(number):
    return np.concatenate((system_prompt(number % 8), ids(20_000_000 + number, 768)))


def waiting_prompt(index, sequences):
    kind = index % 8
    if kind < 4:
        start = conversation(7919 * index % (sequences // 4))
    elif kind < 6:
        start = system_prompt(kind)
    elif kind == 6:
        start = ids(0, 0)
    else:
        start = ids(40_000_000 + index // 64, 512)
    return np.concatenate((start, ids(50_000_000 + index, PROMPT - len(start))))


def new_scheduler(pages, **settings):
    info = ExecutorInfo("bench", "none", "none", 128256, 4096, (1, 2), 1, pages, 40)
    return Scheduler(SchedulerSettings(context_length=4096, max_running_requests=32, **settings), info)


def fill_tree(scheduler, sequences):
    """Put the background conversations into the tree, turn by turn."""
    memory = scheduler.state.memory
    prompts = [conversation(number) for number in range(sequences // 4)]
    for turn in range(1, 5):
        for tokens in prompts:
            part = tokens[: 256 + 192 * turn]
            pages = memory.allocator.alloc(len(part))
            inserted = memory.tree.insert(part.tobytes(), pages)
            memory.allocator.free(pages[: inserted.present_tokens])


def submit_waiting(scheduler, sequences, first, count):
    draw = random.Random(7)
    settings = [(draw.randint(16, 2048), draw.randint(0, 9)) for _ in range(first + count)][first:]
    for index, (max_new, priority) in enumerate(settings, first):
        request = Request(
            number=index + 1,
            rid=f"r{index}",
            prompt_ids=waiting_prompt(index, sequences),
            sampling=SamplingParams(max_new_tokens=max_new, temperature=0.0),
            arrival_ns=1 + index * 1_000_000,
            priority=priority,
            service_class=CLASSES[index % 4],
            tenant=f"tenant{index % 16}",
            routing_key=f"adapter{index % 32}",
        )
        scheduler.apply(Submit(request), 1 + index * 1_000_000)


def us(seconds):
    return f"{min(seconds) * 1e6:9.0f} / {statistics.median(seconds) * 1e6:7.0f}"


def timed(action, rounds=ROUNDS):
    """Thread CPU seconds of each of `rounds` calls; an action that answers a number of things is averaged over them."""
    seconds = []
    for _ in range(rounds):
        start = time.thread_time()
        things = action()
        seconds.append((time.thread_time() - start) / (things or 1))
    return seconds


def order_step(scheduler, policy, now):
    views = scheduler.state.views(now)
    columns = views.columns

    def step():
        policy.begin_step(views)
        for row in islice(policy.candidates(views), DRAWN):
            policy.charge(row, int(columns.target[row] - columns.matchable[row]))

    return step


def print_orders(scheduler, waiting, prior_cost):
    now = 1 + waiting * 1_000_000
    for name, more in POLICIES.items():
        settings = SchedulerSettings(**({"schedule_policy": name} | more))
        policy = create_policy(settings.schedule_policy, settings)
        scheduler.state.cost = prior_cost if policy.needs_cost or policy.budget_rule.needs_cost else None
        step = order_step(scheduler, policy, now)
        step()
        seconds = timed(step)
        print(f"{name:28} {waiting:7} {us(seconds)}  {note(name, waiting, seconds)}")
    views = timed(lambda: scheduler.state.views(now) and None)
    print(f"{'(views of the queue)':28} {waiting:7} {us(views)}")


def note(name, waiting, seconds):
    if waiting != 10_000:
        return ""
    words = [f"SGLang {SGLANG_US[name]:,}"] if name in SGLANG_US else []
    if name in TARGET_US:
        verdict = "met" if statistics.median(seconds) * 1e6 < TARGET_US[name] else "MISSED"
        words.append(f"target {TARGET_US[name]} {verdict}")
    return "; ".join(words)


def print_upkeep(scheduler, sequences, waiting):
    """Cost of single changes with `waiting` rows in line."""
    state = scheduler.state
    index, tree, allocator = state._index, state.memory.tree, state.memory.allocator
    rows = state.waiting.rows[:512].tolist()

    def leave():
        for row in rows:
            index.remove(row)
        return len(rows)

    def arrive():
        for row in rows:
            index.add(row)
        return len(rows)

    leaving, arriving = [], []
    for _ in range(10):
        leaving += timed(leave, 1)
        arriving += timed(arrive, 1)
    print(f"{'admission (index only)':28} {waiting:7} {us(leaving)}")
    print(f"{'arrival (index only)':28} {waiting:7} {us(arriving)}")
    prompts = [waiting_prompt(number, sequences) for number in range(64)]
    pages = [allocator.alloc(PROMPT) for _ in prompts]
    inserts, evicts = [], []
    for prompt, own in zip(prompts, pages, strict=True):
        inserts += timed(lambda prompt=prompt, own=own: tree.insert(prompt.tobytes(), own) and None, 1)
    for _ in prompts:
        evicts += timed(lambda: tree.evict(256) is None, 1)
    print(f"{'insert a waiting prompt':28} {waiting:7} {us(inserts)}")
    print(f"{'evict 256 tokens':28} {waiting:7} {us(evicts)}")


def print_shared(waiting):
    """All share one prefix, which comes into the tree, is used by others, and leaves again."""
    scheduler = new_scheduler(1_000_000, schedule_policy="dfs-weight")
    shared = system_prompt(0)
    for index in range(waiting):
        prompt = np.concatenate((shared, ids(70_000_000 + index, 64)))
        request = Request(index + 1, f"r{index}", prompt, SamplingParams(max_new_tokens=16, temperature=0.0))
        scheduler.apply(Submit(request), 1)
    tree, allocator = scheduler.state.memory.tree, scheduler.state.memory.allocator

    def insert(tokens):
        return timed(lambda: tree.insert(tokens.tobytes(), allocator.alloc(len(tokens))) and None, 1)

    first = insert(np.concatenate((shared, ids(80_000_000, 64))))
    split = insert(np.concatenate((shared, ids(80_000_001, 64))))
    more = [s for number in range(64) for s in insert(np.concatenate((shared, ids(80_000_002 + number, 64))))]
    evict = [s for _ in range(64) for s in timed(lambda: tree.evict(64) is None, 1)]
    gone = timed(lambda: tree.evict(tree.evictable_pages) is None, 1)
    print(f"{'first of them inserted':28} {waiting:7} {us(first)}   (all rows agree with a part of it now)")
    print(f"{'second: run is split':28} {waiting:7} {us(split)}   (all rows move, once)")
    print(f"{'each later insert':28} {waiting:7} {us(more)}")
    print(f"{'evict one leaf':28} {waiting:7} {us(evict)}")
    print(f"{'evict the shared prefix':28} {waiting:7} {us(gone)}   (all rows move back)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--waiting", default="16,128,1000,10000")
    options = parser.parse_args()
    scheduler = new_scheduler(6_000_000, schedule_policy="dfs-weight")
    prior_cost = OnlineCost(get_profile("h100", "llama-3-8b"))
    fill_tree(scheduler, options.sequences)
    gc.collect()
    gc.disable()
    print(f"{'policy':28} {'waiting':>7} {'min':>9} / {'median':>7}  us")
    present = 0
    for waiting in map(int, options.waiting.split(",")):
        submit_waiting(scheduler, options.sequences, present, waiting - present)
        present = waiting
        print_orders(scheduler, waiting, prior_cost)
        print_upkeep(scheduler, options.sequences, waiting)
    print("one shared prefix of 256 tokens:")
    print_shared(present)


if __name__ == "__main__":
    main()
