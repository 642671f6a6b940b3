"""Prefill and decode apart in `tokenyard simulate` and its kin: the arguments, and the table of what was moved."""

import argparse
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base import ConfigError
from tokenyard.routing.choice import POLICY_NAMES
from tokenyard.sim.kv.disagg_settings import MODES, DisaggSettings
from tokenyard.sim.kv.transfer_figures import transfer_figures
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.scheduler_figures import worker_names

_DEFAULT = DisaggSettings(1)
_STAGES = (
    ("queue of prefill engines", "prefill_queue_s"),
    ("prefill", "prefill_s"),
    ("queue of decode engines", "decode_queue_s"),
    ("wait for the link", "link_queue_s"),
    ("transfer, with that wait", "transfer_s"),
)


def add_disagg_arguments(parser: argparse.ArgumentParser) -> None:
    """Prefill engines beside the replicas, and the links."""
    group = parser.add_argument_group("PD disaggregation (docs/disagg.md)")
    group.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="P",
        help="engines that compute prompts for the --replicas; 0: none, each computes its own [0]",
    )
    group.add_argument(
        "--disaggregation-mode",
        choices=MODES,
        default=_DEFAULT.mode,
        help="decode: the router names a prefill engine for each request; both: the engine that answers asks one where "
        f"its cost model says that this is faster [{_DEFAULT.mode}]",
    )
    group.add_argument(
        "--link-gbit",
        type=float,
        default=_DEFAULT.link_gbit,
        metavar="G",
        help=f"speed of each engine's link in each direction, in Gbit/s [{_DEFAULT.link_gbit:g}]",
    )
    for side in ("prefill", "decode"):
        usual = getattr(_DEFAULT, f"{side}_policy")
        group.add_argument(
            f"--{side}-policy",
            choices=POLICY_NAMES,
            default=usual,
            help=f"how the router chooses the {side} engine of a request in mode decode [{usual}]",
        )


def disagg_settings(args: argparse.Namespace) -> DisaggSettings | None:
    """What the arguments ask for; None for no prefill engines. Raises ConfigError for numbers out of range."""
    count = getattr(args, "prefill_replicas", 0)
    if count < 0:
        raise ConfigError(f"--prefill-replicas is {count}; it must be at least 0")
    if count == 0:
        return None
    policies = {"prefill_policy": args.prefill_policy, "decode_policy": args.decode_policy}
    return DisaggSettings(count, args.disaggregation_mode, args.link_gbit, **policies)


def print_transfers(outcomes: Mapping[str, Outcome]) -> None:
    """A table for each of `outcomes` that had prefill engines."""
    for name, outcome in outcomes.items():
        if outcome.transfers is not None:
            Console().print(transfer_table(name, outcome))


def transfer_table(name: str, outcome: Outcome) -> Table:
    """How long each stage of a transfer took, and how busy the links were."""
    assert outcome.transfers is not None
    assert outcome.setup.disagg is not None
    figures = transfer_figures(outcome.transfers, outcome.sim_seconds)
    table = Table(
        title=f"{escape(name)}: prompts computed elsewhere, links of {outcome.setup.disagg.link_gbit:g} Gbit/s",
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
        f"computed where they are answered: {failed or 'none'}\nlinks used, in %: {used}"
    )
