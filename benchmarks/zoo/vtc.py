"""VTC: the client that has had the least service goes first. The policy is `tokenyard.policy.fair`."""

from benchmarks.zoo.entry import Entry
from tokenyard.sim import Engine, Result, Workload, WorkloadBuilder, run

SECONDS = 14
RATES = {"slow": 10.0, "fast": 20.0}
PROMPT, ANSWER = 256, 256
PREFILL_WEIGHT, DECODE_WEIGHT = 1, 2


def two_clients() -> Workload:
    """Two clients at constant rates, both faster than the engine serves: the paper's first synthetic experiment."""
    sent = [(number / rate, name) for name, rate in RATES.items() for number in range(int(SECONDS * rate))]
    builder = WorkloadBuilder("two clients")
    for number, (at_s, name) in enumerate(sorted(sent)):
        builder.add(f"request {number}", at_s, PROMPT, ANSWER, tenant=name)
    return builder.build()


def difference(result: Result, until_s: float) -> int:
    """Weighted tokens that the fast client was served more, counted when answers end."""
    columns, served = result.columns, {}
    for name in RATES:
        mine = (columns["tenant"] == name) & (columns["finished_s"] <= until_s)
        prompts, answers = columns["prompt_tokens"][mine].sum(), columns["completion_tokens"][mine].sum()
        served[name] = int(PREFILL_WEIGHT * prompts + DECODE_WEIGHT * answers)
    return served["fast"] - served["slow"]


def measure() -> str:
    """The most that the clients' service differs, under fcfs and under VTC."""
    pool = 6_000
    engine = Engine(kv_pool_tokens=pool, settings={"enable_mixed_chunk": True})
    times = [4.0 + step for step in range(SECONDS - 4)]
    most = {}
    for name in ("fcfs", "vtc"):
        result = run(two_clients(), engine.with_(policy=name))
        most[name] = max(abs(difference(result, at_s)) for at_s in times)
    bound = 2 * max(PREFILL_WEIGHT * PROMPT, DECODE_WEIGHT * pool)
    return f"service of two clients differs by {most['vtc']:,} at most (bound {bound:,}); by {most['fcfs']:,} with fcfs"


ENTRY = Entry(
    "VTC",
    "Sheng et al. 2024, Fairness in Serving Large Language Models (OSDI, arXiv 2401.00588)",
    "service of backlogged clients differs by at most 2 max(wp Linput, wq M), whatever the time",
    "a simulated H100 with a pool of 6,000 tokens; theirs is an A10G with 10,000",
    measure,
)
