"""Which models there are: those of the command line, those of a folder, and their copies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.base.model_facts import ModelFacts

MAX_COPIES = 1000
LATEST = ":latest"
"""Ollama's clients may add it to a name."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model is and takes.

    path: the file or folder that the command line or the folder of models has.
    folder: the folder that the engine reads; another one for a GGUF file.
    facts: what its files say.
    need: bytes that its engine takes.
    pool_tokens: tokens that its KV pool holds; None where the engine decides.
    template: the source of its chat template, "" without one.
    capabilities: what it can do, in Ollama's words.
    """

    path: Path
    folder: Path
    facts: ModelFacts
    need: int
    pool_tokens: int | None
    template: str
    capabilities: tuple[str, ...]


PlanModel = Callable[[Path], ModelPlan]
"""Reads a model's files. Raises ConfigError for files that cannot be served."""


def models_in(folder: Path) -> list[Path]:
    """The models in a folder of models: GGUF files and folders with a config.json, sorted; none if it is a model."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return []
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [path for path in inside if path.suffix == ".gguf" or (path / "config.json").is_file()]


def are_several(models: Sequence[str]) -> bool:
    """Whether the models of a command line are several, or a folder of models."""
    return len(models) > 1 or any(models_in(Path(model).expanduser()) for model in models)


def name_of(path: Path) -> str:
    """The name of a model: the last part of its path, without .gguf."""
    return path.name.removesuffix(".gguf")


def _files_of(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of a model; empty if they cannot be read."""
    try:
        stats = [(file.name, file.stat()) for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    except OSError:
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


class Catalog:
    """The models by name.

    broken: models whose files cannot be served, and why.
    """

    def __init__(self, given: Sequence[Path], plan: PlanModel) -> None:
        """`given`: models and folders of models. Raises ConfigError if two have one name, or if there is none."""
        self._given, self._plan = [path.expanduser().absolute() for path in given], plan
        self._models: dict[str, ModelPlan] = {}
        self._copies: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self._read: dict[str, list[tuple[str, int, int]]] = {}
        paths = self._paths()
        names = [name_of(path) for path in paths]
        for name in names:
            if names.count(name) > 1:
                both = " and ".join(str(path) for path in paths if name_of(path) == name)
                raise ConfigError(f"two models have the name {name}: {both}; rename one of them")
        self.refresh()
        if not self._models:
            reasons = "; ".join(self.broken.values()) or "a model is a GGUF file or a folder with a config.json"
            raise ConfigError(f"there is no model in {', '.join(map(str, self._given))}: {reasons}")

    def __getitem__(self, name: str) -> ModelPlan:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the models, without copies."""
        return iter(sorted(self._models))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def copies(self) -> dict[str, str]:
        """The names that are copies, and of which model each is."""
        return dict(self._copies)

    def find(self, name: str) -> str:
        """The name of the model that a client's `name` means; "" if there is none."""
        for one in (name, name.removesuffix(LATEST)):
            found = self._copies.get(one, one)
            if found in self._models:
                return found
        return ""

    def refresh(self) -> list[str]:
        """Look at the folders of models again. Returns the names of models that are new.

        A model whose files have changed is read again: it may have been copied in parts, or replaced. If it is broken
        then, what was known of it stays.
        """
        fresh = []
        for path in self._paths():
            name, files = name_of(path), _files_of(path)
            known = name in self._models
            another = known and self._models[name].path != path
            if another or name in self._copies or self._read.get(name) == files:
                continue
            self._read[name] = files
            try:
                self._models[name] = self._plan(path)
            except ConfigError as error:
                if not known:
                    self.broken[name] = error.message
                continue
            self.broken.pop(name, None)
            if not known:
                fresh.append(name)
        return fresh

    def copy(self, source: str, destination: str) -> None:
        """Give a model a second name. Raises ConfigError if it is taken or no name, and beyond `MAX_COPIES`."""
        destination = destination.removesuffix(LATEST)
        if not destination or not destination.isprintable() or len(destination) > 256:
            raise ConfigError("a name has 1 to 256 printable characters")
        if destination in self._models:
            raise ConfigError(f"there is a model {destination!r} already")
        if len(self._copies) >= MAX_COPIES and destination not in self._copies:
            raise ConfigError(f"models have {MAX_COPIES} second names, which is the limit; remove some (`ollama rm`)")
        self._copies[destination] = source

    def remove_copy(self, name: str) -> bool:
        """Remove a second name; False if it is none."""
        return self._copies.pop(name, None) is not None or self._copies.pop(name.removesuffix(LATEST), None) is not None

    def _paths(self) -> list[Path]:
        return [path for given in self._given for path in (models_in(given) or [given])]
