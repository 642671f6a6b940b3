"""Which format a model writes, by its chat template or by name."""

from collections.abc import Iterable

from tokenyard.base import ConfigError
from tokenyard.server.parse.families import FAMILIES
from tokenyard.server.parse.format import Format


def detect(sources: Iterable[str]) -> Format | None:
    """The format whose marks stand in the sources of a model's chat templates, None for none."""
    text = "\n".join(sources)
    for family in FAMILIES.values():
        if all(mark in text for mark in family.detect):
            return family
    return None


def named(name: str) -> Format:
    """The format of this name. Raises ConfigError for an unknown one."""
    if name not in FAMILIES:
        raise ConfigError(f"there is no output format {name!r}; there are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def knows_tools(sources: Iterable[str]) -> bool:
    """Whether a model's chat templates show tools to the model."""
    return any("tools" in source for source in sources)
