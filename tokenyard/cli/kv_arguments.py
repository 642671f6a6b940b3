"""PD disaggregation and the KV store in the simulator's commands: their arguments, and the table of KV transfers."""

import argparse
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base import ConfigError
from tokenyard.base.kv_store_limits import PREFETCH_POLICIES
from tokenyard.routing.registry import POLICY_NAMES
from tokenyard.sim.kv.disagg_settings import MODES, DisaggSettings, KvStoreSettings
from tokenyard.sim.kv.transfer_figures import transfer_figures
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.scheduler_figures import worker_names

_DISAGG = DisaggSettings(1)
_STAGES = (
    ("prefill queue", "prefill_queue_s"),
    ("prefill", "prefill_s"),
    ("decode queue", "decode_queue_s"),
    ("link queue", "link_queue_s"),
    ("transfer, incl. link queue", "transfer_s"),
)
_KV_STORE = KvStoreSettings()
_NUMBERS = {
    "hicache_size": ("GB", "KV store in host memory per scheduler, in GB; 0 disables it [0]"),
    "hicache_storage_gb": ("GB", f"KV store on disk per scheduler, in GB; 0 disables it [{_KV_STORE.disk_gb:g}]"),
    "hicache_storage_read_gb_s": ("GB", "read bandwidth of the disk, in GB/s [the cost profile's]"),
    "hicache_storage_write_mb_s": (
        "MB",
        f"maximum write rate to the disk, in MB/s; 0: as fast as it reads [{_KV_STORE.write_mb_s:g}]",
    ),
}
_FIELDS = dict(zip(_NUMBERS, ("host_gb", "disk_gb", "read_gb_s", "write_mb_s"), strict=True))


def add_disagg_arguments(parser: argparse.ArgumentParser) -> None:
    """The prefill engines and the links."""
    group = parser.add_argument_group("PD disaggregation (docs/disagg.md)")
    group.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="P",
        help="prefill engines, in addition to the --replicas, which then only decode; 0: no PD disaggregation [0]",
    )
    group.add_argument(
        "--disaggregation-mode",
        choices=MODES,
        default=_DISAGG.mode,
        help="decode: the router selects a prefill engine for each request; both: the decode engine asks one where its "
        f"cost model predicts that this is faster [{_DISAGG.mode}]",
    )
    group.add_argument(
        "--link-gbit",
        type=float,
        default=_DISAGG.link_gbit,
        metavar="G",
        help=f"link speed of each engine in each direction, in Gbit/s [{_DISAGG.link_gbit:g}]",
    )
    for side in ("prefill", "decode"):
        usual = getattr(_DISAGG, f"{side}_policy")
        group.add_argument(
            f"--{side}-policy",
            choices=POLICY_NAMES,
            default=usual,
            help=f"routing policy for {side} engines, in mode decode [{usual}]",
        )


def disagg_settings(args: argparse.Namespace) -> DisaggSettings | None:
    """The settings from the arguments; None without prefill engines. Raises ConfigError for numbers out of range."""
    count = getattr(args, "prefill_replicas", 0)
    if count < 0:
        raise ConfigError(f"--prefill-replicas is {count}; it must be at least 0")
    if count == 0:
        return None
    policies = {"prefill_policy": args.prefill_policy, "decode_policy": args.decode_policy}
    return DisaggSettings(count, args.disaggregation_mode, args.link_gbit, **policies)


def add_kv_store_arguments(parser: argparse.ArgumentParser) -> None:
    """The KV store, which --enable-hierarchical-cache enables."""
    group = parser.add_argument_group("KV store (docs/kv_store.md)")
    for name, (unit, text) in _NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=float, metavar=unit, help=text)
    group.add_argument(
        "--hicache-storage-prefetch-policy",
        choices=PREFETCH_POLICIES,
        help=f"how long a request waits for KV from disk [{_KV_STORE.prefetch_policy}]",
    )


def kv_store_settings(args: argparse.Namespace, *, enabled: bool) -> KvStoreSettings | None:
    """The settings from the arguments; None if not `enabled`. Raises ConfigError for numbers out of range, and for any
    of these flags without --enable-hierarchical-cache.
    """
    numbers = {name: getattr(args, name, None) for name in _NUMBERS}
    policy = getattr(args, "hicache_storage_prefetch_policy", None)
    if not enabled:
        named = [name for name, value in {**numbers, "hicache_storage_prefetch_policy": policy}.items() if value]
        if named:
            raise ConfigError(f"--{named[0].replace('_', '-')} needs --enable-hierarchical-cache")
        return None
    given = {_FIELDS[name]: value for name, value in numbers.items() if value is not None}
    return KvStoreSettings(**given, prefetch_policy=policy or _KV_STORE.prefetch_policy)


def print_transfers(outcomes: Mapping[str, Outcome]) -> None:
    """A table for each of `outcomes` that had prefill engines."""
    for name, outcome in outcomes.items():
        if outcome.transfers is not None:
            Console().print(transfer_table(name, outcome))


def transfer_table(name: str, outcome: Outcome) -> Table:
    """A table of the time that each stage of a transfer took, and of the utilisation of the links."""
    assert outcome.transfers is not None
    assert outcome.setup.disagg is not None
    figures = transfer_figures(outcome.transfers, outcome.sim_seconds)
    table = Table(
        title=f"{escape(name)}: KV transfers, links of {outcome.setup.disagg.link_gbit:g} Gbit/s",
        caption=_caption(figures, worker_names(outcome)),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("seconds", "mean", "p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    for label, key in _STAGES:
        found = figures[key]
        cells = ["-"] * 4 if found is None else [f"{found[one]:.3g}" for one in ("mean", "p50", "p99", "max")]
        table.add_row(label, *cells)
    return table


def _caption(figures: Mapping[str, Any], names: list[str]) -> str:
    failed = ", ".join(f"{number} {cause}" for cause, number in figures["failed"].items())
    used = ", ".join(
        f"{names[link['engine']]} {100 * max(link['out'], link['in']):.1f}" for link in figures["links"][:32]
    )
    return (
        f"{figures['asked']} requests, {figures['transferred']} transfers of {figures['moved_tokens']} tokens in all; "
        f"computed on the decode engine: {failed or 'none'}\nlink utilisation, %: {used}"
    )
