"""The simulator: the server's scheduler, driven by a cost model's clock instead of a device.

Its Python API (docs/simulator.md):

>>> from tokenyard.sim import Engine, run, synthetic
>>> print(run(synthetic("multi-turn", rate=10), Engine(device="h100", policy="slo")))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.base import SchedulerSettings
    from tokenyard.cost import Profile
    from tokenyard.policy import Policy
    from tokenyard.sim.api.engine import Engine
    from tokenyard.sim.api.run import Result, run, write_report
    from tokenyard.sim.api.sweep import Sweep, SweepRun, sweep
    from tokenyard.sim.api.workloads import synthetic, trace
    from tokenyard.sim.engine.speculation import Speculation
    from tokenyard.sim.fleet.autoscaler import Autoscale, FleetLoad, autoscale
    from tokenyard.sim.fleet.fleet_settings import Drain, Fault, Fleet, ProcessStop
    from tokenyard.sim.hardware.device_profile import Hardware
    from tokenyard.sim.kv.disagg_settings import DisaggSettings, KvStoreSettings
    from tokenyard.sim.report.intervals import Interval
    from tokenyard.sim.traces.session_workload import SessionTrace, session_workload
    from tokenyard.sim.traces.sessions import SessionOptions, SessionRecord, Turn
    from tokenyard.sim.traces.workload import Workload, WorkloadBuilder

__all__ = [
    "Autoscale",
    "DisaggSettings",
    "Drain",
    "Engine",
    "Fault",
    "Fleet",
    "FleetLoad",
    "Hardware",
    "Interval",
    "KvStoreSettings",
    "Policy",
    "ProcessStop",
    "Profile",
    "Result",
    "SchedulerSettings",
    "SessionOptions",
    "SessionRecord",
    "SessionTrace",
    "Speculation",
    "Sweep",
    "SweepRun",
    "Turn",
    "Workload",
    "WorkloadBuilder",
    "autoscale",
    "run",
    "session_workload",
    "sweep",
    "synthetic",
    "trace",
    "write_report",
]

_HOMES = {
    "Autoscale": "tokenyard.sim.fleet.autoscaler",
    "FleetLoad": "tokenyard.sim.fleet.autoscaler",
    "autoscale": "tokenyard.sim.fleet.autoscaler",
    "SchedulerSettings": "tokenyard.base",
    "Profile": "tokenyard.cost",
    "Policy": "tokenyard.policy",
    "Engine": "tokenyard.sim.api.engine",
    "Result": "tokenyard.sim.api.run",
    "run": "tokenyard.sim.api.run",
    "write_report": "tokenyard.sim.api.run",
    "Sweep": "tokenyard.sim.api.sweep",
    "SweepRun": "tokenyard.sim.api.sweep",
    "sweep": "tokenyard.sim.api.sweep",
    "synthetic": "tokenyard.sim.api.workloads",
    "trace": "tokenyard.sim.api.workloads",
    "Speculation": "tokenyard.sim.engine.speculation",
    "Drain": "tokenyard.sim.fleet.fleet_settings",
    "Fault": "tokenyard.sim.fleet.fleet_settings",
    "Fleet": "tokenyard.sim.fleet.fleet_settings",
    "ProcessStop": "tokenyard.sim.fleet.fleet_settings",
    "DisaggSettings": "tokenyard.sim.kv.disagg_settings",
    "KvStoreSettings": "tokenyard.sim.kv.disagg_settings",
    "Hardware": "tokenyard.sim.hardware.device_profile",
    "Interval": "tokenyard.sim.report.intervals",
    "SessionOptions": "tokenyard.sim.traces.sessions",
    "SessionRecord": "tokenyard.sim.traces.sessions",
    "SessionTrace": "tokenyard.sim.traces.session_workload",
    "Turn": "tokenyard.sim.traces.sessions",
    "session_workload": "tokenyard.sim.traces.session_workload",
    "Workload": "tokenyard.sim.traces.workload",
    "WorkloadBuilder": "tokenyard.sim.traces.workload",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a submodule does not load the whole simulator."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
