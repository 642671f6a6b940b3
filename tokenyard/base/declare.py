"""Declarations of settings. A dataclass field states all that its flag, the config file and the checks need."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from tokenyard.base.errors import ConfigError
from tokenyard.base.ranges import NumberRange

USER_CLASS = "module:Class"
"""Among `choices`: a class of the user's may be named as well."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is declared of a setting in addition to its name, type and default.

    group: its heading in the help.
    help_text: its help, without choices and default.
    allowed: the range of a number; None for any value.
    choices: the allowed values; empty for any.
    aliases: further flags for the same value.
    negated: flags for the opposite of a yes-or-no value.
    file_only: it has no flag; the file of --config or the environment sets it (tables, rarely changed constants).
    secret: no report shows its value.
    """

    group: str
    help_text: str
    allowed: NumberRange | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    negated: tuple[str, ...] = ()
    file_only: bool = False
    secret: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError, naming the setting, for a value that is out of range or not among the choices."""
        if self.allowed is not None:
            self.allowed.check(name, value)
        self.check_choice(name, value)

    def check_choice(self, name: str, value: Any) -> None:
        """Raise ConfigError, naming the setting, for a value, or one in a list, that is not among the choices."""
        for item in value if isinstance(value, list) else (value,):
            own = USER_CLASS in self.choices and ":" in str(item)
            if self.choices and item not in self.choices and not own:
                raise ConfigError(f"{name} is {item!r}; choose from {', '.join(self.choices)}")


def setting(default: Any, group: str, help_text: str, allowed: NumberRange | None = None, **more: Any) -> Any:
    """A dataclass field with its `Declaration`. `default` is a value, or a function that makes one: `dict`, `list`."""
    metadata = {"declaration": Declaration(group, help_text, allowed, **more)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def declarations(kind: Any) -> Mapping[str, Declaration]:
    """The declaration of each setting of a dataclass or of one of its objects, by name, in the order of the fields."""
    return {item.name: declaration(item) for item in fields(kind)}


def declaration(item: "Field[Any]") -> Declaration:
    """The declaration of one field."""
    declared: Declaration = item.metadata["declaration"]
    return declared


def check_declared(settings: Any, prefix: str = "") -> None:
    """Check every value of a settings object by its declaration. Raises ConfigError.

    Settings are named `prefix` + field name; with an empty prefix, as the command line or the file names them.
    """
    for name, declared in declarations(settings).items():
        dashed = name.replace("_", "-")
        shown = prefix + name if prefix else dashed if declared.file_only else f"--{dashed}"
        declared.check(shown, getattr(settings, name))


def check_rules(rules: tuple[tuple[bool, str], ...]) -> None:
    """Raise ConfigError with the message of the first rule that does not hold."""
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(sentence)
