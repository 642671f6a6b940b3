"""`tokenyard plan`, capacity planning: the smallest and the cheapest fleet that serves a trace within its SLO."""

import argparse
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from tokenyard.base import ConfigError
from tokenyard.base.ranges import NumberRange
from tokenyard.cli.capacity_plan_autoscale import (
    add_autoscale_arguments,
    autoscale_document,
    autoscale_table,
    autoscalers,
    compare_autoscaled,
)
from tokenyard.cli.capacity_plan_devices import read_devices
from tokenyard.cli.capacity_plan_report import (
    capacity_plan_document,
    capacity_plan_notes,
    capacity_plan_tables,
    no_capacity_plan_document,
    no_capacity_plan_notes,
    write_capacity_plan,
)
from tokenyard.cli.capacity_plan_variants import add_variant_arguments, fleet_variants
from tokenyard.cli.flags import add_deprecated_flag
from tokenyard.cli.hardware_arguments import add_hardware_arguments, hardware_of
from tokenyard.cli.simulation_arguments import (
    add_scheduler_arguments,
    add_workload_arguments,
    check_output,
    load_workload,
    named_setup,
    print_notes,
    progress_bar,
    write_numbers,
)
from tokenyard.cli.task_pool import TaskPool, add_ray_argument
from tokenyard.routing.registry import DEFAULT_POLICY, POLICIES
from tokenyard.sim.planner.capacity_plan import CapacityPlan, CapacityPlanner
from tokenyard.sim.planner.trial import FleetOption, answered
from tokenyard.sim.traces.workload import Workload

MAX_REPLICAS = 256
CAPACITY_PLAN_RANGES = {
    "target": NumberRange(0.01, 0.99999),
    "seeds": NumberRange(1, 10),
    "max_replicas": NumberRange(1, 4096),
    "jobs": NumberRange(1, 256),
}


def add_capacity_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of `tokenyard plan`."""
    add_workload_arguments(parser)
    group = parser.add_argument_group("options to try")
    group.add_argument(
        "--devices",
        default="h100",
        metavar="A,B|FILE",
        help="devices of built-in profiles, or a YAML file of devices with prices (docs/simulator.md) [h100]",
    )
    group.add_argument(
        "--model",
        dest="profile_model",
        default="llama-3-8b",
        metavar="MODEL",
        help="model of the built-in profiles, a known model such as Qwen/Qwen3-32B, or a config.json [llama-3-8b]",
    )
    add_hardware_arguments(group)
    max_replicas = group.add_argument(
        "--max-replicas",
        type=int,
        default=MAX_REPLICAS,
        metavar="N",
        help=f"maximum replicas [{MAX_REPLICAS}]",
    )
    add_deprecated_flag(group, "--most", max_replicas)
    group.add_argument("--dp-sizes", default="1", metavar="A,B", help="data-parallel sizes to try [1]")
    group.add_argument(
        "--routers", default=DEFAULT_POLICY, metavar="A,B", help=f"router policies to try [{DEFAULT_POLICY}]"
    )
    group.add_argument(
        "--policies", default="fcfs,slo", metavar="A,B", help="schedule policies or presets to try [fcfs,slo]"
    )
    add_variant_arguments(group)
    add_autoscale_arguments(group)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--target", type=float, default=0.99, metavar="F", help="share of requests that must meet their SLO [0.99]"
    )
    search.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="number of arrival seeds over which attainment is averaged [3]",
    )
    search.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel processes [all cores]"
    )
    add_ray_argument(search)
    search.add_argument("--json", type=Path, metavar="OUT", help="write the capacity plan as JSON")
    search.add_argument(
        "--report", type=Path, metavar="OUT", help="write an HTML page with the capacity plan and a chart"
    )
    search.add_argument("--quiet", action="store_true", help="show no progress bar and no table")
    add_scheduler_arguments(parser)


def run_capacity_plan(args: argparse.Namespace) -> int:
    """Search and write the requested outputs. Returns the exit status: 1 if no available fleet meets the target."""
    _check(args)
    workload = load_workload(args)
    if workload.sessions is not None:
        raise ConfigError(
            "plan draws other arrivals of the same traffic, and turns of sessions arrive when those before them end; "
            "run simulate at several values of --replicas instead"
        )
    options = make_options(args, workload)
    rules = autoscalers(args, options)
    with progress_bar(args.quiet) as bar, TaskPool(workload, args.jobs, bar, args.ray) as pool:
        planner = planner_on(pool, workload, args)
        plan = planner.plan(options)
    if plan is None:
        print(
            f"no fleet of up to {args.max_replicas} replicas serves {100 * args.target:g} % of {workload.name} in time"
        )
        print_notes([*no_capacity_plan_notes(planner.eliminated), *workload.notes])
        write_numbers(args.json, no_capacity_plan_document(planner.eliminated, workload, args.target))
        return 1
    fleets = compare_autoscaled(plan.finalists[plan.cheapest], workload, rules) if rules else []
    scaled = {"autoscaled": autoscale_document(fleets, args.cold_start_s)} if fleets else {}
    write_numbers(args.json, capacity_plan_document(plan, workload, args.target) | scaled)
    if args.report is not None:
        write_capacity_plan(args.report, plan, workload, args.target)
    if not args.quiet:
        _print(plan, workload, args.target)
        if fleets:
            Console().print(autoscale_table(plan, fleets, args.cold_start_s))
    return 0


def planner_on(pool: TaskPool, workload: Workload, args: argparse.Namespace) -> CapacityPlanner:
    """A planner that runs its searches and trials in `pool`."""
    return CapacityPlanner(workload, args.target, args.seeds, lambda what, jobs: pool.each(what, answered, jobs))


def _print(plan: CapacityPlan, workload: Workload, target: float) -> None:
    for table in capacity_plan_tables(plan, workload, target):
        Console().print(table)
    print_notes([*capacity_plan_notes(plan), *workload.notes])


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that are out of range."""
    for name, allowed in CAPACITY_PLAN_RANGES.items():
        allowed.check(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.preset is not None or args.schedule_policy is not None:
        raise ConfigError("presets and policies are given by --policies here, not as --preset or --schedule-policy")
    if args.seed < 0 or not 0.0 < args.request_rate < float("inf"):
        raise ConfigError("--seed must be at least 0 and --request-rate above 0")
    for flag in ("json", "report"):
        check_output(getattr(args, flag), f"--{flag}")


def make_options(args: argparse.Namespace, workload: Workload) -> list[FleetOption]:
    """Every kind of fleet to try. Raises ConfigError for unknown names."""
    routers, policies = _words(args.routers, "--routers"), _words(args.policies, "--policies")
    unknown = [router for router in routers if router not in POLICIES]
    if unknown:
        raise ConfigError(f"--routers: there is no router policy {unknown[0]!r}; choose of {', '.join(POLICIES)}")
    try:
        sizes = [int(word) for word in _words(args.dp_sizes, "--dp-sizes")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or max(sizes) > MAX_REPLICAS:
        raise ConfigError(f"--dp-sizes is {args.dp_sizes!r}; it must be whole numbers from 1 to {MAX_REPLICAS}")
    usual = {"host_us": 0.0, "overlap": False, "cost_error": 0.0, "learn_cost": False, "replicas": 1, "fleet": None}
    usual |= {"draft_tokens": 0}
    options: list[FleetOption] = []
    for device, ranks, router, policy in product(
        read_devices(args.devices, args.profile_model, hardware_of(args)), sizes, routers, policies
    ):
        given = {**vars(args), **usual, "profile": device.profile}
        setup = named_setup(argparse.Namespace(**given, dp_size=ranks, router=router), workload, policy)
        running = ranks * setup.settings.max_running_requests
        setup = replace(setup, settings=replace(setup.settings, max_running_requests=running))
        replicas = min(args.max_replicas, device.max_count // (ranks * device.profile.tp))
        if replicas:
            options += fleet_variants(FleetOption(setup, policy, device.price, replicas), args)
    if not options:
        raise ConfigError(f"--devices {args.devices}: there are fewer devices than one replica takes")
    return options


def _words(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(words) > len(set(words)):
        raise ConfigError(f"{flag} is {text!r}; give names with commas between them, each once")
    return words
