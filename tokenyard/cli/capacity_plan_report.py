"""A capacity plan as tables in a terminal, as JSON, and as a page with a chart."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from tokenyard.base.percent import percent
from tokenyard.cli.terminal import command_line
from tokenyard.cost import Profile
from tokenyard.sim.planner.capacity_plan import (
    MORE_TRAFFIC,
    CapacityPlan,
    ConfidenceInterval,
    EliminatedOption,
    SizedFleet,
)
from tokenyard.sim.report.comparison import facts_of, rate_of, trust
from tokenyard.sim.report.html_page import Report, Row, Section, write_page
from tokenyard.sim.report.html_page import Table as PageTable
from tokenyard.sim.report.svg_charts import Chart
from tokenyard.sim.traces.workload import Workload


def capacity_plan_tables(plan: CapacityPlan, workload: Workload, target: float) -> Iterator[Table]:
    """A table of the finalists, and what-if tables for the best ones."""
    table = Table(title=_title(workload, target), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, (name, _) in enumerate(_columns(plan.finalists[0])):
        table.add_column(name, justify="left" if place == 0 else "right")
    table.add_column("", justify="left")
    for place, found in enumerate(plan.finalists):
        table.add_row(*(escape(text) for _, text in _columns(found)), _mark(plan, place))
    yield table
    for title, rows in _what_ifs(plan, target):
        then = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        then.add_column("", justify="left")
        then.add_column("same fleet: SLO met, 95 % interval", justify="right")
        then.add_column("needed", justify="right")
        for row in rows:
            then.add_row(*row)
        yield then


def capacity_plan_notes(plan: CapacityPlan) -> Iterator[str]:
    """Notes on prices, seeds, and the decisions that depend on the error of the cost model."""
    best, bounds = plan.finalists[plan.cheapest], plan.bounds
    if best.option.price is None:
        yield "no prices were given, so fleets are ranked by their number of devices (--devices FILE takes prices)"
    if len(best.attainment.values) == 1:
        yield "one seed does not show how attainment varies with the arrivals; use --seeds 3 or more"
    yield from _errors(found.option.setup.profile for found in plan.finalists)
    if (seen := plan.what_if[0].requests) < best.attainment.requests:
        yield f"{MORE_TRAFFIC:g} times the traffic, one down and the next lines are seen on the busiest {seen} requests"
    how = "measured" if bounds.measured else "assumed where it is unknown"
    yield f"search repeated with all steps {100 * bounds.error:.0f} % faster and slower ({how}):"
    for place, found in enumerate(plan.finalists):
        few, many = bounds.faster[place], bounds.slower[place]
        yield f"  {found.option.name}: {found.replicas} replicas, {_count(few)} if faster, {_count(many)} if slower"
    yield f"  {_sensitivity(plan)}"


def no_capacity_plan_notes(eliminated: Sequence[EliminatedOption]) -> Iterator[str]:
    """Notes for a search that found no fleet: how close each kind came, and with which cost models."""
    for one in eliminated:
        part = "the requests" if one.part == 1.0 else f"the requests of the busiest {100 * one.part:.0f} %"
        share = f"{_percent(one.attainment)} of {part}"
        yield f"{one.option.name}: at most {share} in time with {one.option.max_replicas} replicas"
    yield from _errors(one.option.setup.profile for one in eliminated)


def _errors(profiles: Iterable[Profile]) -> Iterator[str]:
    """The stated errors of the cost models."""
    for name, profile in {profile.name: profile for profile in profiles}.items():
        size = "unknown" if profile.error is None else f"{100 * profile.error:.0f} % of a step on average"
        yield f"cost model {name}: its error is {profile.measured or size}"


def _sensitivity(plan: CapacityPlan) -> str:
    """The decisions that change within the error of the cost model."""
    bounds, best = plan.bounds, plan.finalists[plan.cheapest]
    others = [place for place in (bounds.cheapest_if_faster, bounds.cheapest_if_slower) if place is not None]
    names = ("the device", "the ranks", "the router", "the schedule policy")
    ours = _choices(best)
    differ = [tuple(one != own for one, own in zip(_choices(plan.finalists[k]), ours, strict=True)) for k in others]
    changes = [name for place, name in enumerate(names) if any(changed[place] for changed in differ)]
    if {bounds.faster[plan.cheapest], bounds.slower[plan.cheapest]} != {best.replicas}:
        changes.append("the number of replicas")
    if not changes:
        return "the choice is the same in all three searches"
    return f"the error of the cost model can change {', '.join(changes)}"


def _choices(found: SizedFleet) -> tuple[str, int, str, str]:
    """The choices behind a fleet: device, ranks, router policy, schedule policy."""
    setup = found.option.setup
    return setup.profile.name, setup.dp_size, setup.router, found.option.policy


def capacity_plan_document(plan: CapacityPlan, workload: Workload, target: float) -> dict[str, Any]:
    """The capacity plan as JSON."""
    return {
        "trace": workload.name,
        "requests": len(workload),
        "rate_per_s": rate_of(workload),
        "target": target,
        "fleets": [_found_document(found) for found in plan.finalists],
        "cheapest": plan.cheapest,
        "smallest": plan.smallest,
        "what_if": [
            {
                "fleet": place,
                "replicas_for_one_nine_more": what.nine_more,
                "cost_of_one_nine_more": _extra(plan.finalists[place], what.nine_more),
                "attainment_at_1.5_times": what.more_traffic,
                "replicas_at_1.5_times": what.at_more_traffic,
                "attainment_with_one_down": what.one_down.mean,
                "requests_that_show_it": what.requests,
            }
            for place, what in zip(_best_places(plan), plan.what_if, strict=True)
        ],
        "cost_model": {
            "error": plan.bounds.error,
            "measured": plan.bounds.measured,
            "replicas_if_faster": plan.bounds.faster,
            "replicas_if_slower": plan.bounds.slower,
            "sensitivity": _sensitivity(plan),
            "hangs_on_it": _sensitivity(plan),
        },
        "left_out": _left_out_document(plan.eliminated),
        "trials": plan.trials,
    }


def no_capacity_plan_document(
    eliminated: Sequence[EliminatedOption], workload: Workload, target: float
) -> dict[str, Any]:
    """The JSON document of a search that found no fleet."""
    facts = {"trace": workload.name, "requests": len(workload), "rate_per_s": rate_of(workload), "target": target}
    return {**facts, "fleets": [], "left_out": _left_out_document(eliminated)}


def _left_out_document(eliminated: Sequence[EliminatedOption]) -> list[dict[str, Any]]:
    return [
        {
            "kind": one.option.name,
            "part_of_the_trace": one.part,
            "replicas": one.replicas,
            "attainment": one.attainment,
        }
        for one in eliminated
    ]


def _found_document(found: SizedFleet) -> dict[str, Any]:
    setup = found.option.setup
    return {
        "device": setup.profile.name,
        "replicas": found.replicas,
        "ranks": setup.dp_size,
        "devices": found.devices,
        "router": setup.router,
        "policy": found.option.policy,
        "price_per_hour": None if found.option.price is None else found.cost,
        "attainment": found.attainment.mean,
        "attainment_interval": found.attainment.bounds,
        "attainment_by_seed": found.attainment.values,
    }


def write_capacity_plan(path: Path, plan: CapacityPlan, workload: Workload, target: float) -> None:
    """Write a page with the tables and the chart."""
    names = [found.option.name for found in plan.finalists]
    columns = [[text for _, text in _columns(found)] for found in plan.finalists]
    heads = [name for name, _ in _columns(plan.finalists[0])]
    rows = [Row(head, [column[place] for column in columns]) for place, head in enumerate(heads)]
    tables = [PageTable("Fleets that meet the target", names, rows)]
    for title, what in _what_ifs(plan, target):
        tables.append(
            PageTable(title, ["same fleet: SLO met, 95 % interval", "needed"], [Row(row[0], row[1:]) for row in what])
        )
    first = plan.finalists[0].option.setup
    profiles = {found.option.setup.profile.name: found.option.setup.profile for found in plan.finalists}
    facts = facts_of(workload, first, command_line()) | {
        "device": ", ".join(profiles),
        "cost model": "; ".join(f"{name}: error {trust(one.error, one.measured)}" for name, one in profiles.items()),
    }
    section = Section("Capacity plan", capacity_plan_charts(plan), tables, list(capacity_plan_notes(plan)))
    write_page(path, Report(_title(workload, target), facts, [section], names))


def capacity_plan_charts(plan: CapacityPlan) -> list[Chart]:
    """Charts of the price of each finalist for the given traffic and at the bounds of the cost model."""
    best = plan.finalists[plan.cheapest]
    unit = "devices" if best.option.price is None else "price of an hour"
    chart = Chart("Devices needed, within the error of the cost model", "", unit, y_from_zero=True)
    kinds = _short_names(plan)
    for name, counts in (
        ("if steps are faster", plan.bounds.faster),
        ("as the cost model says", tuple(found.replicas for found in plan.finalists)),
        ("if steps are slower", plan.bounds.slower),
    ):
        costs = [
            float("nan") if count is None else found.option.cost(count)
            for found, count in zip(plan.finalists, counts, strict=True)
        ]
        chart.bars(kinds, costs, name)
    return [chart]


def _short_names(plan: CapacityPlan) -> list[str]:
    """Names for the finalists, made of the choices in which they differ; the device if they differ in none."""
    rows = [(found.option.setup.profile.device, *map(str, _choices(found)[1:])) for found in plan.finalists]
    differ = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
    kept = differ if any(differ) else [True, *([False] * (len(differ) - 1))]
    return [", ".join(word for word, keep in zip(row, kept, strict=True) if keep) for row in rows]


def _title(workload: Workload, target: float) -> str:
    return f"Fleets for {100 * target:g} % of {workload.name} within the SLO, at {rate_of(workload):.4g} requests/s"


def _columns(found: SizedFleet) -> list[tuple[str, str]]:
    setup = found.option.setup
    columns = [
        ("fleet", f"{found.replicas} x {setup.profile.name}"),
        ("ranks", f"{setup.dp_size}"),
        ("router", setup.router),
        ("policy", found.option.policy),
        ("devices", f"{found.devices}"),
        ("SLO met, 95 % interval", _interval(found.attainment)),
    ]
    if found.option.price is not None:
        columns.insert(5, ("an hour", f"{found.cost:.2f}"))
    return columns


def _mark(plan: CapacityPlan, place: int) -> str:
    marks = [name for name, best in (("cheapest", plan.cheapest), ("smallest", plan.smallest)) if best == place]
    if plan.finalists[0].option.price is None:
        marks = [mark for mark in marks if mark == "smallest"]
    return " and ".join(marks)


def _best_places(plan: CapacityPlan) -> list[int]:
    return list(dict.fromkeys((plan.cheapest, plan.smallest)))


def _what_ifs(plan: CapacityPlan, target: float) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    nine = 100 * (1.0 - (1.0 - target) / 10.0)
    for place, what in zip(_best_places(plan), plan.what_if, strict=True):
        found = plan.finalists[place]
        yield (
            f"What if: {found.replicas} x {found.option.name}",
            [
                (
                    f"{nine:g} % instead of the target",
                    _interval(found.attainment),
                    f"{_count(what.nine_more)}{_more(found, what.nine_more)}",
                ),
                (
                    f"{MORE_TRAFFIC:g} times the traffic",
                    _interval(ConfidenceInterval((what.more_traffic,), what.requests)),
                    f"{_count(what.at_more_traffic)}{_more(found, what.at_more_traffic)}",
                ),
                ("one replica down", _interval(what.one_down), "-"),
            ],
        )


def _more(found: SizedFleet, replicas: int | None) -> str:
    """The extra cost of `replicas` over the fleet, as text."""
    extra = _extra(found, replicas)
    if extra is None:
        return ""
    return f" (+{extra:g} devices)" if found.option.price is None else f" (+{extra:.2f} an hour)"


def _extra(found: SizedFleet, replicas: int | None) -> float | None:
    return None if replicas is None else found.option.cost(replicas) - found.cost


def _count(replicas: int | None) -> str:
    return "more than may be had" if replicas is None else f"{replicas}"


def _interval(interval: ConfidenceInterval) -> str:
    low, high = interval.bounds
    return f"{_percent(interval.mean)} ({percent(low, 2)} to {percent(high, 2)})"


def _percent(share: float) -> str:
    return f"{percent(share, 2)} %"
