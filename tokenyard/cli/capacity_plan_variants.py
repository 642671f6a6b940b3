"""What `tokenyard plan` tries beside plain engines: some that only prefill, and the KV store."""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from tokenyard.base import ConfigError
from tokenyard.sim.kv.disagg_settings import DisaggSettings, KvStoreSettings
from tokenyard.sim.planner.trial import FleetOption

_LINK_GBIT = DisaggSettings(1).link_gbit


def add_variant_arguments(group: argparse._ArgumentGroup) -> None:
    """The lists of both."""
    group.add_argument(
        "--prefill-shares",
        default="0",
        metavar="A,B",
        help="shares of the engines that only prefill, to try; 0: none [0]",
    )
    group.add_argument(
        "--link-gbit",
        type=float,
        default=_LINK_GBIT,
        metavar="G",
        help=f"speed of each engine's link where some only prefill, in Gbit/s [{_LINK_GBIT:g}]",
    )
    group.add_argument(
        "--tiers",
        default="0+0",
        metavar="H+D,...",
        help="gigabytes of KV in host memory and on disk below each device, to try, such as 0+0,200+0,200+2000; what "
        "they cost is not counted [0+0]",
    )


def fleet_variants(option: FleetOption, args: argparse.Namespace) -> Iterator[FleetOption]:
    """An option with each of the shares and tiers; those that cannot be had together are left out. The words for both
    follow the policy's name. Raises ConfigError for words that make no sense.
    """
    setup = option.setup
    for share in _shares(args.prefill_shares):
        for kv_store in _tiers(args.tiers):
            if (share and setup.dp_size > 1) or (kv_store is not None and setup.settings.disable_radix_cache):
                continue
            disagg = DisaggSettings(1, link_gbit=args.link_gbit) if share else None
            words = [f"{100 * share:g} % prefill at {args.link_gbit:g} Gbit/s"] if share else []
            words += [f"{kv_store.host_gb:g}+{kv_store.disk_gb:g} GB below"] if kv_store is not None else []
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


def _tiers(text: str) -> list[KvStoreSettings | None]:
    found: list[KvStoreSettings | None] = []
    for word in text.split(","):
        try:
            host_gb, disk_gb = (float(part) for part in word.split("+"))
        except ValueError:
            raise ConfigError(f"--tiers is {text!r}; give pairs of gigabytes such as 0+0,200+2000") from None
        found.append(KvStoreSettings(host_gb=host_gb, disk_gb=disk_gb) if host_gb or disk_gb else None)
    if len(found) > len(set(found)):
        raise ConfigError(f"--tiers is {text!r}; give each pair once")
    return found
