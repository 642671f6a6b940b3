"""Prefill and decode apart, and tiers below the device, as a simulation is told of them."""

import math
from dataclasses import dataclass, field

from tokenyard.base import ConfigError
from tokenyard.cost import Link
from tokenyard.disagg.protocol import Timeouts
from tokenyard.routing.choice import DEFAULT_POLICY, KvUsage, make_policy

PREFETCH_POLICIES = ("timeout", "wait_complete", "best_effort")
GB, MB = 10**9, 10**6
MODES = ("decode", "both")
LATENCY_S = 50e-6
BITS = 8e-9


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """Engines that compute prompts for the others, and the links between them.

    prefill_replicas: how many there are; their numbers follow those of the engines that answer. mode: "decode": a
    router names a prefill engine for each request (`prefill_policy`) and one that answers (`decode_policy`); "both":
    the router chooses only the engine that answers (`Setup.router`), which asks a prefill engine where its cost model
    says that this is faster. link_gbit: of each engine's link, in each direction; latency_s: of a message, and before
    the first byte of KV. terms: leases and timeouts. lost, doubled: shares of the messages that never arrive, and
    that arrive twice.
    """

    prefill_replicas: int
    mode: str = MODES[0]
    link_gbit: float = 100.0
    latency_s: float = LATENCY_S
    prefill_policy: str = DEFAULT_POLICY
    decode_policy: str = KvUsage.name
    terms: Timeouts = field(default_factory=Timeouts)
    lost: float = 0.0
    doubled: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be simulated."""
        if self.prefill_replicas < 1:
            raise ConfigError(f"--prefill-replicas is {self.prefill_replicas}; it must be at least 1")
        if self.mode not in MODES:
            raise ConfigError(f"--disaggregation-mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if not (math.isfinite(self.link_gbit) and self.link_gbit > 0.0):
            raise ConfigError(f"--link-gbit is {self.link_gbit}; it must be above 0")
        if not (0.0 <= self.lost <= 1.0 and 0.0 <= self.doubled <= 1.0 and self.latency_s >= 0.0):
            raise ConfigError("lost and doubled messages are shares from 0 to 1, and a latency is not negative")
        make_policy(self.prefill_policy)
        make_policy(self.decode_policy)

    @property
    def link(self) -> Link:
        """A link, as the cost models of the engines know it."""
        return Link(self.link_gbit / BITS, self.latency_s)


@dataclass(frozen=True, slots=True)
class KvStoreSettings:
    """Stores of KV below each scheduler's device, as `--enable-hierarchical-cache` makes them.

    host_gb, disk_gb: sizes in 10^9 bytes, 0 for no such tier. What the device stores goes to the highest one first.
    read_gb_s: of the disk, 0 for the profile's link. write_mb_s: 10^6 bytes a second that are written there at most, 0
    for as many as are read. prefetch_policy and timeouts: how long a request waits (`engine.watch.kv_store`).
    """

    host_gb: float = 0.0
    disk_gb: float = 10.0
    read_gb_s: float = 0.0
    write_mb_s: float = 256.0
    prefetch_policy: str = PREFETCH_POLICIES[0]
    timeout_s: float = 1.0
    timeout_per_1k_tokens_s: float = 0.25

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be simulated."""
        sizes = (self.host_gb, self.disk_gb, self.read_gb_s, self.write_mb_s)
        if not all(math.isfinite(size) and size >= 0.0 for size in sizes):
            raise ConfigError("sizes and speeds of --hicache tiers must not be negative")
        if not self.host_gb + self.disk_gb > 0.0:
            raise ConfigError("give --hicache-size or --hicache-storage-gb, the gigabytes of a tier below the device")
        if self.prefetch_policy not in PREFETCH_POLICIES:
            raise ConfigError(f"the prefetch policy {self.prefetch_policy!r} is none of {', '.join(PREFETCH_POLICIES)}")

    def disk_tokens(self, kv_bytes_per_token: int) -> int:
        """How many tokens the disk holds."""
        return int(self.disk_gb * GB) // kv_bytes_per_token
