"""Flags, environment variables and config-file keys, all derived from the fields of `Settings`.

The command line takes precedence over the environment (`TOKENYARD_<FLAG>`), the environment over the config file, and
the config file over the default. The same function parses a value from any of these sources.
"""

import argparse
import difflib
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from tokenyard.base import ConfigError
from tokenyard.base.declare import Declaration, declarations
from tokenyard.base.deprecation import warn_renamed
from tokenyard.base.settings import TenantSettings
from tokenyard.config import GROUPS, ClassTargets, Settings
from tokenyard.policy.registry import ALIASES, POLICIES

ENV_PREFIX = "TOKENYARD_"
ROUTER_PREFIX = "TOKENYARD_ROUTE_"
FOREIGN_FLAGS = {
    "a model is divided by --tp-size or --pp-size": "ep-size enable-expert-parallel",
    "each node has its own command: --nnodes, --node-rank, --dist-init-addr": "use-ray master-addr master-port",
    "models run with this package's own code only": "trust-remote-code sampling-backend",
    "one grammar engine does all, and calls are always taken out": "grammar-backend enable-auto-tool-choice",
    "drafts are set by --speculative-algorithm and --speculative-num-draft-tokens": (
        "speculative-config speculative-num-steps speculative-eagle-topk"
    ),
    "use --disaggregation-mode and --prefill-engines": "kv-transfer-config",
    "CUDA graphs are set by --disable-cuda-graph and --cuda-graph-max-bs": "cuda-graph-bs compilation-config",
    "leave it out: metrics are always there": "enable-metrics disable-log-stats",
    "leave it out: answers always report cached tokens": "enable-cache-report enable-prompt-tokens-details",
    "leave it out: prefill is always in chunks": "enable-chunked-prefill",
    "leave it out: requests are not logged": "disable-log-requests no-enable-log-requests",
}
"""Flags of SGLang and vLLM that do not exist here, grouped by the reason."""
OTHER_VARIABLES = ("CONFIG", "DISABLE_NATIVE", "NATIVE_LEVEL", "NATIVE_LIBRARY", "TEST_ALL")
"""Environment variables (without the prefix) that are not settings."""

_OF_KUBERNETES = re.compile(r"TOKENYARD(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_count(text: str) -> int:
    """An integer like 8192, 8k (8000), 8K (8192), 1m or 1M. Raises ValueError for anything else."""
    match = re.fullmatch(r"(-?\d[\d_]*(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a whole number; write it like 8192, 8k (8000) or 8K (8192)")
    value = float(match[1]) * _MULTIPLIERS[match[2]] if "." in match[1] else int(match[1]) * _MULTIPLIERS[match[2]]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def parse_bool(text: str) -> bool:
    """Yes or no, in the usual spellings. Raises ValueError for anything else."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in _TRUE


def parse_float(text: str) -> float:
    """A number. Raises ValueError for anything else, NaN included."""
    value = float(text)
    if value != value:
        raise ValueError(f"{text!r} is not a number")
    return value


def parse_list(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    return tuple(parse_count(word) for word in parse_list(text))


def parse_words(text: str) -> tuple[str, ...]:
    """Words between commas or spaces."""
    return tuple(text.replace(",", " ").split())


def parse_options(value: str | dict[str, Any]) -> dict[str, float | int | str | bool]:
    """A mapping, or pairs like name=value,name=value with YAML scalars. Raises ValueError if a pair has no `=`."""
    if isinstance(value, dict):
        return value
    options: dict[str, float | int | str | bool] = {}
    for pair in parse_list(value):
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is not a name=value pair")
        try:
            options[name.strip()] = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{pair!r}: {_in_one_line(error)}") from error
    return options


def _in_one_line(error: Exception) -> str:
    """The error in a file and its position, in one line; YAML's own messages take several."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())


def parse_tenants(value: str | dict[str, Any]) -> dict[str, TenantSettings]:
    """A mapping of tenant names to their settings, or the path of a YAML file with one. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{value} cannot be read: {_in_one_line(error)}") from error
    return _by_name(value, "tenants", TenantSettings)


def parse_slo_classes(value: Any) -> dict[str, ClassTargets]:
    """A mapping of service classes to their targets. Raises ValueError."""
    return _by_name(value, "slo-classes", ClassTargets)


def parse_texts(value: Any) -> dict[str, str]:
    """A mapping of names to texts. Raises ValueError that does not show the texts, which may be keys."""
    try:
        return msgspec.convert(value, dict[str, str])
    except msgspec.ValidationError:
        raise ValueError("this must be a mapping of names to texts") from None


Named = TypeVar("Named", TenantSettings, ClassTargets)


def _by_name(value: Any, what: str, kind: type[Named]) -> dict[str, Named]:
    """A mapping of names to settings of one kind. Raises ValueError, for an unknown setting as well."""
    try:
        read = msgspec.convert(value, dict[str, kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {error}") from error
    known = [item.name for item in fields(kind)]
    for name, given in value.items():
        for unknown in (given or {}).keys() - set(known):
            raise ValueError(f"{what}: {name} has no setting {unknown!r}; it has {', '.join(known)}")
    return read


def _parser_of(annotation: Any) -> Callable[[Any], Any]:
    """The function that reads a value of this annotation from text."""
    if typing.get_origin(annotation) is types.UnionType:
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    if annotation == dict[str, TenantSettings]:
        return parse_tenants
    if annotation == dict[str, ClassTargets]:
        return parse_slo_classes
    if annotation == dict[str, str]:
        return parse_texts
    if annotation == tuple[str, ...]:
        return parse_words
    kind = typing.get_origin(annotation) or annotation
    parsers: dict[Any, Callable[[Any], Any]] = {
        tuple: parse_counts,
        bool: parse_bool,
        int: parse_count,
        float: parse_float,
        str: str,
        list: parse_list,
        dict: parse_options,
    }
    return parsers[kind]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as the command line sees it: its declaration, and how its value is read from text."""

    name: str
    declared: Declaration
    default: Any
    parse: Callable[[Any], Any]
    prefix: str = ENV_PREFIX

    @property
    def dashed(self) -> str:
        """The name as spelled in flags and config files."""
        return self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether the setting is switched on and off."""
        return self.parse is parse_bool

    @property
    def positive(self) -> tuple[str, ...]:
        """The flags that take a value or switch the setting on; none for what is set in files only."""
        if self.declared.file_only:
            return ()
        return ("--" + self.dashed, *self.declared.aliases, *(f"--no-{flag[2:]}" for flag in self.declared.negated))

    @property
    def negative(self) -> tuple[str, ...]:
        """The flags that switch the setting off."""
        return (f"--no-{self.dashed}", *self.declared.negated) if self.is_bool else ()

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return self.prefix + self.name.upper()

    def read(self, value: Any, where: str) -> Any:
        """`value` (text, or what YAML made of it) as the setting's type. Raises ConfigError naming `where`."""
        if value is None:
            return self.default
        if isinstance(value, dict) and not isinstance(self.default, dict):
            raise ConfigError(f"{where} takes a single value")
        raw = ",".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, dict) else str(value)
        try:
            parsed = self.parse(raw)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        self.declared.check_choice(where, parsed)
        return parsed

    def matches(self, word: str) -> bool:
        """Whether `--help WORD` should show this flag."""
        names = (self.dashed, *self.positive, *self.negative)
        return any(word.lower() in text.lower() for text in (*names, self.declared.help_text))

    def describe(self) -> str:
        """Help text with choices and default."""
        names = self.declared.choices or (sorted([*POLICIES, *ALIASES]) if self.name == "schedule_policy" else ())
        choices = f" ({', '.join(names)})" if names else ""
        value = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        default = "" if value in ("", None, [], {}, False) else f" [{value}]"
        return f"{self.declared.help_text}{choices}{default}".replace("%", "%%")

    def add_to(self, group: argparse._ActionsContainer, *, hidden: bool = False) -> None:
        """Add the flag to a parser or a group of one; `hidden` leaves it out of the help."""
        text = argparse.SUPPRESS if hidden else self.describe()
        if not self.is_bool:
            metavar = self.name.rsplit("_", 1)[-1].upper()
            several = "+" if self.parse is parse_words else None
            group.add_argument(*self.positive, dest=self.name, metavar=metavar, help=text, nargs=several)
            return
        for flags, value, shown in ((self.positive, "true", text), (self.negative, "false", argparse.SUPPRESS)):
            group.add_argument(*flags, dest=self.name, action="store_const", const=value, help=shown)


def settings_of(kind: Callable[[], Any], prefix: str = ENV_PREFIX) -> list[Flag]:
    """Every setting of a dataclass that `declare.setting` made, in the order of the fields; those for files alone have
    no flag. `prefix`: of their names in the environment.
    """
    hints, defaults = typing.get_type_hints(kind), kind()
    return [
        Flag(name, declared, getattr(defaults, name), _parser_of(hints[name]), prefix)
        for name, declared in declarations(kind).items()
    ]


def all_settings() -> list[Flag]:
    """Every setting of a server."""
    return settings_of(Settings)


def all_flags() -> list[Flag]:
    """Every setting that has a flag, in the order of the fields."""
    return [flag for flag in all_settings() if flag.positive]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError for mistakes, naming the nearest flag."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise ConfigError instead of printing the usage."""
        raise ConfigError(message)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`. Raises ConfigError for an unknown flag, with a hint of what was probably meant."""
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].split("=")[0]
            known = _options_of(self, namespace)
            raise ConfigError(f"unknown argument {word}; {_hint(word, known)}")
        return namespace


def _hint(word: str, known: Sequence[str]) -> str:
    """A hint of what an unknown flag was probably meant to be."""
    name = word.lstrip("-")
    for reason, names in FOREIGN_FLAGS.items():
        if name in names.split():
            return reason
    for flag in all_settings():
        if flag.dashed == name and not flag.positive:
            return f"it has no flag: set {name} in the --config file, or {flag.env} in the environment"
    near = difflib.get_close_matches(word, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else "see --help, or --help WORD to search"


def _options_of(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> list[str]:
    """All flags of `parser` and of the subcommands that were chosen."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            sub = action.choices.get(str(getattr(chosen, action.dest, "")))
            options += _options_of(sub, chosen) if sub is not None else []
    return options


def add_setting_flags(
    parser: argparse.ArgumentParser,
    settings: Sequence[Flag] | None = None,
    groups_text: Mapping[str, str] = GROUPS,
    *,
    word: str = "",
) -> None:
    """Add `settings` (of a server, if not given) and `--config` to `parser`, in groups. With `word`, only those that it
    matches are in the help.
    """
    settings = all_settings() if settings is None else settings
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags and environment win over it")
    matching = [flag for flag in settings if flag.matches(word)]
    if not matching:
        parser.epilog = f"no setting is about {word!r}"
    shown = {flag.declared.group for flag in matching if flag.positive}
    groups = {name: parser.add_argument_group(name, text) for name, text in groups_text.items() if name in shown}
    names = {flag.name for flag in matching}
    for flag in (flag for flag in settings if flag.positive):
        flag.add_to(groups.get(flag.declared.group, parser), hidden=flag.name not in names)
    if file_only := [flag for flag in matching if not flag.positive]:
        _list_file_only(parser, file_only)


def _list_file_only(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Put settings that have no flag at the end of the help: argparse describes flags only."""
    width = shutil.get_terminal_size().columns - 2
    lines = ["settings without a flag, for the --config file or the environment:"]
    for flag in flags:
        text = f"{flag.dashed}: {flag.describe()}".replace("%%", "%")
        lines.append(
            textwrap.fill(text, width, initial_indent="  ", subsequent_indent=" " * 24, break_on_hyphens=False)
        )
    note = textwrap.fill(parser.epilog or "", width)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join([*lines, "", note]).replace("%", "%%")


class _DeprecatedFlag(argparse.Action):
    """Accepts the old name of a flag: warns, then does what the new flag does."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, replacement: argparse.Action, **kwargs: Any
    ) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self._replacement = replacement

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Store `values` as the new flag does."""
        new = self._replacement.option_strings[0]
        warn_renamed(str(option_string), new)
        self._replacement(parser, namespace, values, new)


def add_deprecated_flag(group: argparse._ActionsContainer, old: str, replacement: argparse.Action) -> None:
    """Accept `old` for one release as a name of the flag that `add_argument` returned as `replacement`.

    Using it logs a warning; the help does not show it.
    """
    group.add_argument(
        old,
        dest=replacement.dest,
        action=_DeprecatedFlag,
        replacement=replacement,
        nargs=replacement.nargs,
        type=replacement.type or str,
        choices=replacement.choices,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def hide_other_flags(parser: argparse.ArgumentParser, word: str) -> None:
    """Leave out of the help every flag that has `word` neither in its name nor in its text."""
    for action in parser._actions:
        texts = (*action.option_strings, action.help or "")
        if action.option_strings and not any(word.lower() in text.lower() for text in texts):
            action.help = argparse.SUPPRESS


def split_help_word(argv: Sequence[str]) -> tuple[list[str], str]:
    """`argv` without the word after `--help`, and that word ("" if there is none)."""
    words = list(argv)
    for place, word in enumerate(words):
        if word.startswith("--help="):
            return [*words[:place], "--help", *words[place + 1 :]], word.removeprefix("--help=")
        if word == "--help" and place + 1 < len(words) and not words[place + 1].startswith("-"):
            return [*words[: place + 1], *words[place + 2 :]], words[place + 1]
    return words, ""


def read_config_file(path: str, settings: Sequence[Flag]) -> dict[str, Any]:
    """Those of `settings` that a YAML file has, by field name. Raises ConfigError for an unreadable file or an unknown
    key.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--config {path} cannot be read: {_in_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines")
    known = {option[2:]: flag.name for flag in settings for option in flag.positive if "--no-" not in option}
    known |= {flag.dashed: flag.name for flag in settings if not flag.positive}
    values: dict[str, Any] = {}
    for key, value in content.items():
        dashed = str(key).replace("_", "-")
        if dashed not in known:
            near = difflib.get_close_matches(dashed, known, n=2)
            raise ConfigError(f"--config {path}: unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
        values[known[dashed]] = value
    return values


@dataclass(slots=True)
class Resolved:
    """Settings, and where each value that is not a default came from."""

    settings: Settings
    sources: dict[str, str]


def resolve(namespace: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    """A server's settings from parsed arguments, environment, config file and defaults, in that order of precedence.

    Raises ConfigError for a value that cannot be read.
    """
    values, sources = resolve_values(all_settings(), namespace, environ)
    return Resolved(Settings(**values), sources)


def resolve_values(
    settings: Sequence[Flag], namespace: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of `settings` that are given, and where each came from; see `resolve`."""
    environ = os.environ if environ is None else environ
    path = namespace.get("config") or environ.get(settings[0].prefix + "CONFIG")
    from_file = read_config_file(path, settings) if path else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for flag in settings:
        if namespace.get(flag.name) is not None:
            raw, sources[flag.name] = namespace[flag.name], flag.positive[0]
        elif flag.env in environ:
            raw, sources[flag.name] = environ[flag.env], flag.env
            _check_not_of_kubernetes(flag.env, raw)
        elif flag.name in from_file:
            raw, sources[flag.name] = from_file[flag.name], f"{path}: {flag.name}"
        else:
            continue
        values[flag.name] = flag.read(raw, sources[flag.name])
        if flag.declared.secret and values[flag.name] == "":
            raise ConfigError(f"{sources[flag.name]} is empty; leave it out if every client may call")
    return values, sources


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable that has the prefix of settings but names none, with the nearest names.

    Variables that Kubernetes sets for services and ports of that name are ignored.
    """
    environ = os.environ if environ is None else environ
    known = [flag.env for flag in all_settings()] + [ENV_PREFIX + name for name in OTHER_VARIABLES]
    ours = [name for name in sorted(environ) if name.startswith(ENV_PREFIX) and not name.startswith(ROUTER_PREFIX)]
    found = []
    for name in ours:
        if name not in known and not _OF_KUBERNETES.fullmatch(name):
            near = difflib.get_close_matches(name, known, n=2)
            found.append(f"{name} is no setting" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return found


def _check_not_of_kubernetes(name: str, value: str) -> None:
    """Raise ConfigError for a variable that Kubernetes set, as it does for a service named `tokenyard`."""
    if value.startswith("tcp://") and name == ENV_PREFIX + "PORT":
        raise ConfigError(
            f"{name} is {value}, which Kubernetes sets for a service named tokenyard; set enableServiceLinks: false in"
            " the pod, or name the service otherwise"
        )
