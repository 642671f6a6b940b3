"""Fleet variants that `tokenyard plan` tries: prefill engines, and sizes of the KV store."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from tokenyard.base import ConfigError
from tokenyard.cli.flags import add_deprecated_flag
from tokenyard.sim.kv.disagg_settings import DisaggSettings, KvStoreSettings
from tokenyard.sim.planner.trial import FleetOption

_LINK_GBIT = DisaggSettings(1).link_gbit


def add_variant_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags that list the variants."""
    group.add_argument(
        "--prefill-shares",
        default="0",
        metavar="A,B",
        help="shares of prefill engines to try; 0: no PD disaggregation [0]",
    )
    group.add_argument(
        "--link-gbit",
        type=float,
        default=_LINK_GBIT,
        metavar="G",
        help=f"link speed of each engine with PD disaggregation, in Gbit/s [{_LINK_GBIT:g}]",
    )
    kv_stores = group.add_argument(
        "--kv-stores",
        default="0+0",
        metavar="H+D,...",
        help="KV stores to try, as gigabytes in host memory and on disk for each device, such as 0+0,200+0,200+2000; "
        "their price is not counted [0+0]",
    )
    add_deprecated_flag(group, "--tiers", kv_stores)


def fleet_variants(option: FleetOption, args: argparse.Namespace) -> Iterator[FleetOption]:
    """`option` with each combination of prefill share and KV store; combinations that the simulator does not support
    are skipped. The option's policy name gets a suffix for each. Raises ConfigError for values that cannot be read.
    """
    setup = option.setup
    for share in _shares(args.prefill_shares):
        for kv_store in _kv_stores(args.kv_stores):
            if (share and setup.dp_size > 1) or (kv_store is not None and setup.settings.disable_radix_cache):
                continue
            disagg = DisaggSettings(1, link_gbit=args.link_gbit) if share else None
            words = [f"{100 * share:g} % prefill at {args.link_gbit:g} Gbit/s"] if share else []
            words += [f"{kv_store.host_gb:g}+{kv_store.disk_gb:g} GB KV store"] if kv_store is not None else []
            changed = replace(setup, disagg=disagg, kv_store=setup.kv_store if kv_store is None else kv_store)
            yield replace(option, setup=changed, policy=", ".join([option.policy, *words]), prefill_share=share)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0.0 <= share < 1.0 for share in shares) or len(shares) > len(set(shares)):
        raise ConfigError(f"--prefill-shares is {text!r}; give shares from 0 to less than 1, each once")
    return shares


def _kv_stores(text: str) -> list[KvStoreSettings | None]:
    found: list[KvStoreSettings | None] = []
    for word in text.split(","):
        try:
            host_gb, disk_gb = (float(part) for part in word.split("+"))
        except ValueError:
            raise ConfigError(f"--kv-stores is {text!r}; give pairs of gigabytes such as 0+0,200+2000") from None
        found.append(KvStoreSettings(host_gb=host_gb, disk_gb=disk_gb) if host_gb or disk_gb else None)
    if len(found) > len(set(found)):
        raise ConfigError(f"--kv-stores is {text!r}; give each pair once")
    return found
