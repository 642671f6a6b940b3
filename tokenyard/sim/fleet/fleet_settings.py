"""Settings of a simulated fleet other than its engines: routers, their queue, faults and planned drains.

`read_fleet` reads them from a YAML or JSON file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from tokenyard.base import ConfigError
from tokenyard.base.deprecation import accept_old_keys
from tokenyard.cost import Profile, load_profile
from tokenyard.sim.fleet.autoscaler import Autoscale, autoscale
from tokenyard.sim.hardware.device_profile import find_device_profile

QUEUE_SIZE, QUEUE_TIMEOUT_S, QUEUE_AGING_S = 1000, 60.0, 10.0
"""The defaults of `tokenyard route`."""

ROUTER_KEYS = ("routers", "dp_aware", "load_balance_method", "assumed_pool_tokens")
RENAMED_KEYS = {"believed_pool_tokens": "assumed_pool_tokens"}
"""Old keys, accepted with a warning for one release."""
QUEUE_KEYS = ("max_worker_requests", "queue_size", "queue_timeout_s", "queue_aging_s", "tenant_weights")
LOAD_BALANCE_METHODS = ("predicted_ttft", "cache_aware", "shortest_queue", "total_tokens", "round_robin")
"""How an engine with several ranks can choose one: policies of the router."""

EVENT_KINDS = ("kill", "slow", "drain", "join", "stop")
MAX_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at_s` on, `replica` takes `factor` times as long for every step; infinity means that it is dead.

    It recovers after `for_s`, with an empty cache if it was dead. A replica that is dead from 0 on joins later.
    """

    at_s: float
    replica: int
    for_s: float
    factor: float = math.inf

    @property
    def deadly(self) -> bool:
        """Whether the replica loses its requests and its cache."""
        return self.factor == math.inf


@dataclass(frozen=True, slots=True)
class Drain:
    """From `at_s` on `replica` gets no new requests and finishes those it has; after `for_s` it gets requests again."""

    at_s: float
    replica: int
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ProcessStop:
    """From `at_s` on the process of `replica` is stalled for `for_s`, as after SIGSTOP.

    It neither plans nor receives, and loses nothing.
    """

    at_s: float
    replica: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """The routers in front of the replicas, and the schedule of events for the replicas.

    routers: number of routers; they share no state.
    kv_event_lag_s: delay of KV events in seconds; None if routers use only their own routing decisions.
    kv_event_loss: share of KV event batches that are lost.
    assumed_pool_tokens: KV pool that routers assume a replica to have, 0 for the true one.
    faults, drains, stops: the schedule.
    dp_aware: whether routers choose the rank of a replica; otherwise the replica does.
    load_balance_method: how a replica chooses a rank.
    max_worker_requests: most open requests of a replica, 0 for as many as it runs at a time.
    queue_size, queue_timeout_s, queue_aging_s, tenant_weights: as in `tokenyard route`.
    profiles: devices by replica, where they differ from the setup's.
    autoscale: how many of the replicas run, None for all.
    """

    routers: int = 1
    kv_event_lag_s: float | None = None
    kv_event_loss: float = 0.0
    assumed_pool_tokens: int = 0
    faults: tuple[Fault, ...] = ()
    drains: tuple[Drain, ...] = ()
    stops: tuple[ProcessStop, ...] = ()
    dp_aware: bool = True
    load_balance_method: str = LOAD_BALANCE_METHODS[0]
    max_worker_requests: int = 0
    queue_size: int = QUEUE_SIZE
    queue_timeout_s: float = QUEUE_TIMEOUT_S
    queue_aging_s: float = QUEUE_AGING_S
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    autoscale: Autoscale | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers out of range."""
        if self.routers < 1 or not 0.0 <= self.kv_event_loss <= 1.0 or (self.kv_event_lag_s or 0.0) < 0.0:
            raise ConfigError("a fleet needs at least 1 router, a loss from 0 to 1 and a lag that is not negative")
        if min(self.max_worker_requests, self.queue_size, self.queue_aging_s, self.assumed_pool_tokens) < 0:
            raise ConfigError("the queue of a fleet's router takes no negative numbers")
        if not self.queue_timeout_s > 0.0 or not all(weight > 0.0 for weight in self.tenant_weights.values()):
            raise ConfigError("queue_timeout_s and the tenant_weights of a fleet must be above 0")
        if self.load_balance_method not in LOAD_BALANCE_METHODS:
            raise ConfigError(
                f"load_balance_method is {self.load_balance_method!r}; choose one of {', '.join(LOAD_BALANCE_METHODS)}"
            )
        for event in self.events:
            if not (event.at_s >= 0.0 and event.for_s > 0.0):
                raise ConfigError("an event of a fleet needs a time that is not negative and a length above 0")
        if not all(fault.factor > 0.0 for fault in self.faults):
            raise ConfigError("the factor of an event is how many times as long everything takes; it must be above 0")

    @property
    def events(self) -> tuple[Fault | Drain | ProcessStop, ...]:
        """All faults, drains and stops."""
        return self.faults + self.drains + self.stops

    def check(self, replicas: int) -> None:
        """Raise ConfigError for an event or a device of a replica that does not exist."""
        named = [*(event.replica for event in self.events), *self.profiles]
        if any(not 0 <= replica < replicas for replica in named):
            raise ConfigError(
                f"an event or a device names a replica that is not there; there are {replicas}, numbered from 0"
            )
        if self.autoscale is not None:
            self.autoscale.check(replicas)
            if self.drains or any(fault.deadly and not fault.at_s for fault in self.faults):
                raise ConfigError("an autoscaler decides which engines serve; leave out drain and join")


def read_fleet(path: Path, model: str) -> Fleet:
    """Read the fleet from a YAML or JSON file (docs/simulator.md). `model` is the model of devices given by name.

    Raises ConfigError, in one line, for a file that cannot be read or has another form.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--fleet {path}: {error.strerror}; name a YAML or JSON file") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"--fleet {path} is neither YAML nor JSON") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--fleet {path} holds no mapping; give keys such as routers and events")
    return _Reader(path, model).fleet(document)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one file, and names it in every error."""

    path: Path
    model: str

    def fleet(self, document: Mapping[str, Any]) -> Fleet:
        """The whole file as a `Fleet`."""
        document = accept_old_keys(document, RENAMED_KEYS, f"--fleet {self.path}")
        known = (*ROUTER_KEYS, "queue", "kv_events", "workers", "events", "autoscale")
        self._known("a fleet", document, known)
        changes = {key: document[key] for key in ROUTER_KEYS if key in document}
        queue, kv_events = self._mapping(document, "queue"), self._mapping(document, "kv_events")
        self._known("queue", queue, QUEUE_KEYS)
        self._known("kv_events", kv_events, ("lag_s", "loss"))
        changes |= queue
        if "kv_events" in document:
            changes |= {"kv_event_lag_s": kv_events.get("lag_s", 0.0), "kv_event_loss": kv_events.get("loss", 0.0)}
        self._check_kinds(changes)
        faults, drains, stops = self._events(document.get("events", []))
        profiles = {
            self._whole(worker): self._profile(what) for worker, what in self._mapping(document, "workers").items()
        }
        scaling = self._autoscale(self._mapping(document, "autoscale"))
        try:
            scale = autoscale(**scaling) if "autoscale" in document else None
            changed = replace(Fleet(**changes), faults=faults, drains=drains, stops=stops, profiles=profiles)
            return replace(changed, autoscale=scale)
        except ConfigError as error:
            raise self._wrong(error.message) from None

    def _autoscale(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of an autoscaler, with numbers of the kind of the defaults."""
        usual = Autoscale()
        self._known("autoscale", given, tuple(item.name for item in fields(Autoscale)))
        changes: dict[str, Any] = {"rule": str(given.get("rule", usual.rule))}
        for key, value in given.items():
            if isinstance(getattr(usual, key), float):
                changes[key] = self._number(value, key)
            elif key != "rule" and (isinstance(value, bool) or not isinstance(value, int)):
                raise self._wrong(f"{key} is {value!r}; it must be a whole number")
            elif key != "rule":
                changes[key] = value
        return changes

    def _check_kinds(self, changes: Mapping[str, Any]) -> None:
        """Check that values have the type of the defaults that they replace."""
        for key, value in changes.items():
            usual = getattr(Fleet(), key)
            kinds = (dict,) if key == "tenant_weights" else (int, float) if usual is None else (type(usual),)
            kinds = (int, float) if float in kinds else kinds
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise self._wrong(f"{key} is {value!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")
        for tenant, weight in changes.get("tenant_weights", {}).items():
            self._number(weight, f"the weight of {tenant}")

    def _events(self, rows: Any) -> tuple[tuple[Fault, ...], tuple[Drain, ...], tuple[ProcessStop, ...]]:
        faults, drains, stops = [], [], []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._wrong("events must be a list of mappings such as {at_s: 8, kill: 1, for_s: 5}")
        for row in rows:
            self._known("an event", row, ("at_s", "for_s", "factor", *EVENT_KINDS))
            kinds = [kind for kind in EVENT_KINDS if kind in row]
            if len(kinds) != 1:
                raise self._wrong(f"an event is one of {', '.join(EVENT_KINDS)}, not {kinds or 'none'}")
            kind, at_s = kinds[0], self._number(row.get("at_s"), "at_s")
            worker, for_s = self._whole(row[kind]), self._number(row.get("for_s", MAX_SECONDS), "for_s")
            if kind == "drain":
                drains.append(Drain(at_s, worker, for_s))
            elif kind == "stop":
                stops.append(ProcessStop(at_s, worker, for_s))
            elif kind == "join":
                faults.append(Fault(0.0, worker, at_s))
            else:
                factor = self._number(row.get("factor", 2.0), "factor") if kind == "slow" else math.inf
                faults.append(Fault(at_s, worker, for_s, factor))
        return tuple(faults), tuple(drains), tuple(stops)

    def _profile(self, what: Any) -> Profile:
        if isinstance(what, dict) and what.keys() == {"device"}:
            return find_device_profile(str(what["device"]), self.model)
        if isinstance(what, dict) and what.keys() == {"profile"}:
            return load_profile(Path(str(what["profile"])))
        raise self._wrong("a worker is {device: NAME} or {profile: FILE}")

    def _mapping(self, document: Mapping[str, Any], key: str) -> dict[Any, Any]:
        found = document.get(key, {})
        if not isinstance(found, dict):
            raise self._wrong(f"{key} must be a mapping")
        return found

    def _known(self, what: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> None:
        unknown = [str(key) for key in given if key not in known]
        if unknown:
            raise self._wrong(f"{what} has no {unknown[0]!r}; it has {', '.join(known)}")

    def _whole(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(f"a worker is a number from 0 on, not {value!r}")
        return value

    def _number(self, value: Any, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_SECONDS:
            raise self._wrong(f"{what} is {value!r}; it must be a number")
        return float(value)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"--fleet {self.path}: {what}")
