"""Settings of simulated PD disaggregation and of the simulated KV store."""

import math
from dataclasses import dataclass, field

from tokenyard.base import ConfigError
from tokenyard.base.kv_store_limits import PREFETCH_POLICIES, KvStoreLimits
from tokenyard.cost import Link
from tokenyard.disagg.protocol import Timeouts
from tokenyard.routing.policies import KvUsage
from tokenyard.routing.registry import DEFAULT_POLICY, make_policy

GB = 10**9
LIMITS = KvStoreLimits()
MODES = ("decode", "both")
LATENCY_S = 50e-6
BITS = 8e-9


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """PD disaggregation: the prefill engines, and the links between engines.

    prefill_replicas: number of prefill engines; their numbers follow those of the decode engines.
    mode: "decode": the router selects a prefill engine and a decode engine for each request; "both": it selects only
        the decode engine (`Setup.router`), which asks a prefill engine where its cost model predicts a gain.
    link_gbit: speed of each engine's link in each direction, in Gbit/s.
    latency_s: delay in seconds of a message, and of the first byte of KV.
    prefill_policy, decode_policy: routing policies of mode "decode".
    terms: leases and timeouts.
    lost, doubled: shares of messages that are lost, and that arrive twice.
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
        """Raise ConfigError for settings that cannot be simulated."""
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
        """The link as the cost models of the engines see it."""
        return Link(self.link_gbit / BITS, self.latency_s)


@dataclass(frozen=True, slots=True)
class KvStoreSettings:
    """The KV store of each scheduler, as `--enable-hierarchical-cache` makes it.

    host_gb, disk_gb: sizes in 10^9 bytes, 0 for none. KV is written to host memory first if there is any.
    read_gb_s: read bandwidth of the disk in 10^9 bytes per second, 0 for that of the profile's link.
    write_mb_s: maximum write rate of the disk in 10^6 bytes per second, 0 for the read bandwidth.
    prefetch_policy, timeout_s, timeout_per_1k_tokens_s: how long a request waits for KV; see `KvStoreLimits`.
    """

    host_gb: float = 0.0
    disk_gb: float = 10.0
    read_gb_s: float = 0.0
    write_mb_s: float = LIMITS.write_mb_s
    prefetch_policy: str = LIMITS.prefetch_policy
    timeout_s: float = LIMITS.timeout_s
    timeout_per_1k_tokens_s: float = LIMITS.timeout_per_1k_tokens_s

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that cannot be simulated."""
        sizes = (self.host_gb, self.disk_gb, self.read_gb_s, self.write_mb_s)
        if not all(math.isfinite(size) and size >= 0.0 for size in sizes):
            raise ConfigError("sizes and speeds of the KV store (--hicache-...) must not be negative")
        if not self.host_gb + self.disk_gb > 0.0:
            raise ConfigError("give --hicache-size or --hicache-storage-gb, the size of the KV store")
        if self.prefetch_policy not in PREFETCH_POLICIES:
            raise ConfigError(f"the prefetch policy {self.prefetch_policy!r} is none of {', '.join(PREFETCH_POLICIES)}")

    @property
    def limits(self) -> KvStoreLimits:
        """The limits, as the machine takes them."""
        return KvStoreLimits(self.write_mb_s, self.prefetch_policy, self.timeout_s, self.timeout_per_1k_tokens_s)

    def disk_tokens(self, kv_bytes_per_token: int) -> int:
        """Number of tokens that the disk holds."""
        return int(self.disk_gb * GB) // kv_bytes_per_token
