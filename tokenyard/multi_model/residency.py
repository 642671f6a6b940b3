"""Which models are in memory: decides what to load and what to unload. Pure.

A model is loaded when a request waits for it, and unloaded when it has been idle for its `keep_alive`, or when another
model needs its memory; never while a request runs on it. Models are loaded one at a time, the one that has waited
longest first. Idle models leave first, the longest unused before the others. If all are busy, those that have
been loaded for `MIN_LOADED_NS` yield once the first in line has waited for `MAX_WAIT_NS`: they take no new request, and
leave when their running ones have ended, or stay if no model waits any more. So the wait for a model is bounded by the
requests that run, and two models that do not fit together take turns of at least `MIN_LOADED_NS`. A load that takes
longer than requests wait for one is given up once another model waits, or a hung one would keep all others away.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenyard.base import NS_PER_S

MAX_WAIT_NS = 10 * NS_PER_S
MIN_LOADED_NS = 10 * NS_PER_S

UNLOADED, LOADING, LOADED, UNLOADING = "unloaded", "loading", "loaded", "unloading"


@dataclass(slots=True)
class Usage:
    """The requests for one model. running: those that its engine has; waiting: the others."""

    running: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Resident:
    """A model and where it is.

    need: bytes that it takes while its engine runs.
    phase: UNLOADED, LOADING, LOADED or UNLOADING.
    default_ns: how long it stays loaded without requests, where none says it; None for ever.
    keep_alive_ns: the same, by the last request that said it since it was loaded.
    loading_ns: since when it is loading.
    loaded_ns: since when it is loaded.
    used_ns: when its last request ended, or when it was loaded.
    waited_ns: since when requests wait for it to be loaded; None if none does.
    yields: whether it takes no new requests, as another model waits for its memory.
    """

    name: str
    need: int
    default_ns: int | None
    keep_alive_ns: int | None
    phase: str = UNLOADED
    loading_ns: int = 0
    loaded_ns: int = 0
    used_ns: int = 0
    waited_ns: int | None = None
    yields: bool = False

    def expires_ns(self) -> int | None:
        """When it is unloaded if no request comes; None for never."""
        return None if self.keep_alive_ns is None else self.used_ns + self.keep_alive_ns


@dataclass(frozen=True, slots=True)
class Load:
    """Start the engine of a model."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop the engine of a model, on which no request runs. why: for the log."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Yield:
    """Send no new requests to the engine of a model."""

    name: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Send new requests to the engine of a model that yielded: no other model waits any more."""

    name: str


ResidencyAction = Load | Unload | Yield | Resume


class Residency:
    """The models of a machine and their memory.

    budget: bytes that the engines may take together.
    max_loaded: most models in memory at once; 0 for no limit.
    max_load_ns: how long a model may load while another one waits.
    """

    def __init__(self, budget: int, max_loaded: int = 0, max_load_ns: int = 300 * NS_PER_S) -> None:
        self.budget, self.max_loaded, self.max_load_ns = budget, max_loaded, max_load_ns
        self._models: dict[str, Resident] = {}

    def __getitem__(self, name: str) -> Resident:
        return self._models[name]

    def __iter__(self) -> Iterator[Resident]:
        return iter(list(self._models.values()))

    @property
    def used(self) -> int:
        """Bytes of the models that are not unloaded."""
        return sum(model.need for model in self._models.values() if model.phase != UNLOADED)

    def add(self, name: str, need: int, keep_alive_ns: int | None) -> None:
        """Add a model, which is not loaded."""
        self._models[name] = Resident(name, need, keep_alive_ns, keep_alive_ns)

    def loaded(self, name: str, now: int) -> None:
        """The engine of a model accepts requests."""
        model = self._models[name]
        if model.phase == LOADING:
            model.phase, model.loaded_ns, model.used_ns, model.waited_ns = LOADED, now, now, None

    def keep(self, name: str, keep_alive_ns: int | None) -> None:
        """A client wants a model to stay loaded so long, if it is in memory."""
        model = self._models[name]
        if model.phase in (LOADING, LOADED):
            model.keep_alive_ns = keep_alive_ns

    def ended(self, name: str, now: int) -> None:
        """A request for a model has ended."""
        self._models[name].used_ns = now

    def stopped(self, name: str) -> None:
        """The engine of a model has ended, as it was told or by itself."""
        model = self._models[name]
        if model.phase != UNLOADING:
            model.keep_alive_ns = model.default_ns
        model.phase, model.yields = UNLOADED, False

    def plan(self, now: int, usage: Mapping[str, Usage]) -> list[ResidencyAction]:
        """What to do now. Called after every event, and once in a while.

        usage: the requests for each model.
        """
        for model in self._models.values():
            waits = model.phase == UNLOADED and usage[model.name].waiting > 0
            model.waited_ns = (now if model.waited_ns is None else model.waited_ns) if waits else None
        actions = self._end_yields()
        for model in self._models.values():
            if model.phase != LOADED:
                continue
            use, expires = usage[model.name], model.expires_ns()
            idle = not use.running and not use.waiting
            if model.yields and not use.running:
                actions.append(self._unload(model, "another model waits for its memory"))
            elif idle and expires is not None and expires <= now:
                actions.append(self._unload(model, "it was idle for its keep_alive"))
        actions += self._load_next(now, usage)
        return actions

    def _end_yields(self) -> list[ResidencyAction]:
        """Keep the models that yield where no model waits for memory any more."""
        if any(model.waited_ns is not None for model in self._models.values()):
            return []
        yielding = [model for model in self._models.values() if model.yields and model.phase == LOADED]
        for model in yielding:
            model.yields = False
        return [Resume(model.name) for model in yielding]

    def _load_next(self, now: int, usage: Mapping[str, Usage]) -> list[ResidencyAction]:
        """Load the model that has waited longest, or make room for it."""
        models = self._models.values()
        line = [model for model in models if model.waited_ns is not None]
        if not line:
            return []
        first = min(line, key=lambda model: model.waited_ns or 0)
        for model in models:
            if model.phase == LOADING:
                late = now - model.loading_ns >= self.max_load_ns
                why = f"it was not loaded in {self.max_load_ns / NS_PER_S:g} s, and {first.name} waits"
                return [self._unload(model, why)] if late else []
        if self._fits(first, [model for model in models if model.phase != UNLOADED]):
            first.phase, first.loading_ns, first.waited_ns = LOADING, now, None
            return [Load(first.name)]
        staying = [model for model in models if model.phase == LOADED and not model.yields]
        actions: list[ResidencyAction] = []
        for model in sorted(staying, key=lambda model: model.used_ns):
            if self._fits(first, staying):
                return actions
            use = usage[model.name]
            if not use.running and not use.waiting:
                staying.remove(model)
                actions.append(self._unload(model, f"{first.name} needs its memory"))
        if now - (first.waited_ns or 0) < MAX_WAIT_NS:
            return actions
        for model in sorted(staying, key=lambda model: model.loaded_ns):
            if not self._fits(first, staying) and now - model.loaded_ns >= MIN_LOADED_NS:
                staying.remove(model)
                model.yields = True
                actions.append(Yield(model.name))
        return actions

    def _fits(self, model: Resident, others: list[Resident]) -> bool:
        """Whether a model fits into memory together with `others`."""
        enough = sum(other.need for other in others) + model.need <= self.budget
        return enough and not (self.max_loaded and len(others) >= self.max_loaded)

    def _unload(self, model: Resident, why: str) -> Unload:
        # Requests that arrive meanwhile may say another time for the next load.
        model.phase, model.keep_alive_ns = UNLOADING, model.default_ns
        return Unload(model.name, why)
