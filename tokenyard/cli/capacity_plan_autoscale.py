"""`tokenyard plan --autoscale`: the cheapest fixed fleet next to the same engines under an autoscaler, on the trace."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tokenyard.base import ConfigError
from tokenyard.base.percent import percent
from tokenyard.sim.fleet.autoscaler import RULES, Autoscale, autoscale
from tokenyard.sim.planner.capacity_plan import CapacityPlan, SizedFleet
from tokenyard.sim.planner.trial import FleetOption
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.workload import Workload

HEADROOM = 2
"""How many times the engines of the fixed fleet an autoscaler may start, as far as there are as many."""


@dataclass(frozen=True, slots=True)
class AutoscaledFleet:
    """The cheapest fleet under one rule, on the recorded arrivals.

    engines, most: engines on average and at most.
    attainment: share of the requests that met their targets.
    price_per_hour: of an average hour; None without prices.
    """

    rule: str
    engines: float
    most: int
    attainment: float
    price_per_hour: float | None


def add_autoscale_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags of the comparison."""
    group.add_argument(
        "--autoscale",
        default="",
        metavar="A,B",
        help=f"compare the cheapest fleet with autoscaled ones by these rules: {', '.join(RULES)}",
    )
    group.add_argument(
        "--cold-start-s",
        type=float,
        default=Autoscale().start_s,
        metavar="S",
        help=f"seconds from the decision to start an engine until it serves [{Autoscale().start_s:g}]",
    )


def autoscalers(args: argparse.Namespace, options: Sequence[FleetOption]) -> list[Autoscale]:
    """The autoscalers that the arguments name. Raises ConfigError for unknown ones, and for fleets that have none."""
    names = [name.strip() for name in args.autoscale.split(",") if name.strip()]
    if len(names) > len(set(names)):
        raise ConfigError(f"--autoscale is {args.autoscale!r}; give each rule once")
    if names and any(option.setup.disagg is not None for option in options):
        raise ConfigError("--autoscale does not simulate prefill engines; leave out --prefill-shares")
    return [autoscale(name, start_s=args.cold_start_s) for name in names]


def compare_autoscaled(found: SizedFleet, workload: Workload, rules: Sequence[Autoscale]) -> list[AutoscaledFleet]:
    """Each rule on the whole trace, starting with the fixed fleet's engines."""
    fleets: list[AutoscaledFleet] = []
    option, most = found.option, min(HEADROOM * found.replicas, found.option.max_replicas)
    for rule in rules:
        setup = option.fleet(most)
        scaled = replace(rule, initial_replicas=found.replicas)
        outcome = simulate(workload, replace(setup, fleet=replace(setup.fleet, autoscale=scaled)))
        figures = fleet_summary(outcome)
        engines = figures["autoscaling"]["mean_replicas"]
        fleets.append(
            AutoscaledFleet(
                str(rule.rule),
                engines,
                figures["autoscaling"]["max_replicas"],
                figures["slo_attainment"],
                None if option.price is None else option.cost(1) * engines,
            )
        )
    return fleets


def autoscale_table(plan: CapacityPlan, fleets: Sequence[AutoscaledFleet], cold_start_s: float) -> Table:
    """The fixed fleet and each rule."""
    found = plan.finalists[plan.cheapest]
    table = Table(
        title=f"Fixed or autoscaled: {found.option.name}",
        caption=f"on the recorded arrivals, with a cold start of {cold_start_s:g} s",
        box=SIMPLE_HEAD,
    )
    priced = found.option.price is not None
    for column in ("rule", "engines on average", "at most", "SLO met", *(["an hour"] if priced else [])):
        table.add_column(column, justify="left" if column == "rule" else "right")
    fixed = ("fixed", f"{found.replicas}", f"{found.replicas}", f"{percent(found.attainment.values[0], 2)} %")
    table.add_row(*fixed, *([f"{found.cost:.2f}"] if priced else []))
    for one in fleets:
        row = (one.rule, f"{one.engines:.2f}", f"{one.most}", f"{percent(one.attainment, 2)} %")
        table.add_row(*row, *([] if one.price_per_hour is None else [f"{one.price_per_hour:.2f}"]))
    return table


def autoscale_document(fleets: Sequence[AutoscaledFleet], cold_start_s: float) -> list[dict[str, Any]]:
    """The comparison as JSON."""
    return [
        {
            "rule": one.rule,
            "mean_replicas": one.engines,
            "max_replicas": one.most,
            "attainment": one.attainment,
            "price_per_hour": one.price_per_hour,
            "cold_start_s": cold_start_s,
        }
        for one in fleets
    ]
