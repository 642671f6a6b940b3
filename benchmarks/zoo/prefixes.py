"""Traffic for the experiments: clients each of whose prompts begin with the client's own long text."""

import numpy as np

from tokenyard.sim import Workload, WorkloadBuilder

PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 3_000, 200, 30


def shared_prefixes(count: int, clients: int, rate: float, seed: int = 0) -> Workload:
    """`count` requests of `clients`, one of them at random each time, at regular intervals."""
    builder, rng = WorkloadBuilder("clients with prefixes"), np.random.default_rng(seed)
    for number in range(count):
        client = int(rng.integers(clients))
        segments = [(client, PREFIX_TOKENS), (clients + number, OWN_TOKENS)]
        builder.add(
            f"request {number}",
            number / rate,
            PREFIX_TOKENS + OWN_TOKENS,
            ANSWER_TOKENS,
            segments=segments,
            tenant=f"client {client}",
        )
    return builder.build()
