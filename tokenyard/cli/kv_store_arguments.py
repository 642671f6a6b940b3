"""Tiers of KV below the device in `tokenyard simulate` and its kin: the arguments."""

import argparse

from tokenyard.base import ConfigError
from tokenyard.sim.kv.disagg_settings import PREFETCH_POLICIES, KvStoreSettings

_DEFAULT = KvStoreSettings()
_NUMBERS = {
    "hicache_size": ("GB", "gigabytes of KV in host memory, for each scheduler; 0: none [0]"),
    "hicache_storage_gb": ("GB", f"gigabytes of KV on disk, for each scheduler; 0: none [{_DEFAULT.disk_gb:g}]"),
    "hicache_storage_read_gb_s": ("GB", "gigabytes a second that the disk reads; by the cost profile if absent"),
    "hicache_storage_write_mb_s": (
        "MB",
        f"most megabytes a second that are written to it; 0: as fast as it reads [{_DEFAULT.write_mb_s:g}]",
    ),
}
_FIELDS = dict(zip(_NUMBERS, ("host_gb", "disk_gb", "read_gb_s", "write_mb_s"), strict=True))


def add_kv_store_arguments(parser: argparse.ArgumentParser) -> None:
    """What lies below the device with --enable-hierarchical-cache."""
    group = parser.add_argument_group("KV store (docs/kv_store.md)")
    for name, (unit, text) in _NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=float, metavar=unit, help=text)
    group.add_argument(
        "--hicache-storage-prefetch-policy",
        choices=PREFETCH_POLICIES,
        help=f"how long a request waits for KV from disk, as in a server [{_DEFAULT.prefetch_policy}]",
    )


def kv_store_settings_of(args: argparse.Namespace, *, enabled: bool) -> KvStoreSettings | None:
    """What the arguments ask for; None for nothing. Raises ConfigError for numbers out of range, and for any of them
    without --enable-hierarchical-cache.
    """
    numbers = {name: getattr(args, name, None) for name in _NUMBERS}
    policy = getattr(args, "hicache_storage_prefetch_policy", None)
    if not enabled:
        named = [name for name, value in {**numbers, "hicache_storage_prefetch_policy": policy}.items() if value]
        if named:
            raise ConfigError(f"--{named[0].replace('_', '-')} needs --enable-hierarchical-cache")
        return None
    given = {_FIELDS[name]: value for name, value in numbers.items() if value is not None}
    return KvStoreSettings(**given, prefetch_policy=policy or _DEFAULT.prefetch_policy)
