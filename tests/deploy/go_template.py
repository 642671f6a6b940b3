"""The part of Go's `text/template`, and of the functions that Helm adds, that the chart in `deploy/helm` uses.

No Python package has Helm, so `make test` renders the chart with this. What the chart does not use raises TemplateError
here; `make test-world` compares with Go's own engine.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TAG = re.compile(r"\{\{(-\s)?\s*(/\*.*?\*/|(?:\"(?:\\.|[^\"])*\"|`[^`]*`|[^\"`])*?)\s*(\s-)?\}\}", re.S)
TOKEN = re.compile(r"""\s*("(?:\\.|[^"])*"|`[^`]*`|:=|[()|,]|-?\d+|\$?[\w.$]+|\.)""")
OPENERS = ("if", "with", "range", "define")


class TemplateError(ValueError):
    """What Go's engine would refuse as well, or a part of the language that this renderer lacks."""


@dataclass
class Block:
    """A block such as `if`: (condition, body) pairs in order, the last condition "" for `else`."""

    word: str
    arms: list[tuple[str, list[Any]]] = field(default_factory=list)


def parse(text: str) -> list[Any]:
    """Text and tags as a tree: strings, `("tag", expression)` and `Block`s. Raises TemplateError."""
    root: list[Any] = []
    stack: list[tuple[Block | None, list[Any]]] = [(None, root)]
    end = 0
    strip = False
    for match in TAG.finditer(text):
        part = text[end : match.start()]
        part = part.lstrip() if strip else part
        part = part.rstrip() if match[1] else part
        end, strip = match.end(), bool(match[3])
        block, body = stack[-1]
        if part:
            body.append(part)
        word, _, rest = match[2].strip().partition(" ")
        if match[2].startswith("/*"):
            continue
        if word in OPENERS:
            opened = Block(word)
            body.append(opened)
            opened.arms.append((rest.strip(), []))
            stack.append((opened, opened.arms[-1][1]))
        elif word == "else":
            if block is None:
                raise TemplateError("else without if")
            stack.pop()
            block.arms.append((rest.strip().removeprefix("if "), []))
            stack.append((block, block.arms[-1][1]))
        elif word == "end":
            if block is None:
                raise TemplateError("end without a block")
            stack.pop()
        else:
            body.append(("tag", match[2].strip()))
    if len(stack) != 1:
        raise TemplateError(f"no end for {stack[-1][0].word if stack[-1][0] else ''}")
    rest = text[end:]
    root.append(rest.lstrip() if strip else rest)
    return root


def _dump(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=True, width=10_000).rstrip("\n").removesuffix("\n...")


def _indent(spaces: int, text: str) -> str:
    return "\n".join(" " * spaces + line for line in text.split("\n"))


def _show(value: Any) -> str:
    if value is None:
        return ""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _required(message: str, value: Any) -> Any:
    if value in (None, ""):
        raise TemplateError(message)
    return value


def _fail(message: str) -> Any:
    raise TemplateError(message)


def _quote(value: Any) -> str:
    return '"' + _show(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


FUNCTIONS = {
    "quote": _quote,
    "toYaml": _dump,
    "indent": _indent,
    "nindent": lambda spaces, text: "\n" + _indent(spaces, text),
    "default": lambda other, value=None: value or other,
    "required": _required,
    "fail": _fail,
    "printf": lambda form, *values: form.replace("%v", "%s") % tuple(_show(value) for value in values),
    "eq": lambda one, *others: one in others,
    "gt": lambda one, other: one > other,
    "not": lambda value: not value,
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "ternary": lambda yes, no, value: yes if value else no,
    "dict": lambda *items: dict(zip(items[::2], items[1::2], strict=True)),
    "list": lambda *items: list(items),
    "add": lambda *values: sum(values),
    "int": int,
    "trim": str.strip,
}


class Renderer:
    """One chart with one set of values: `templates` are named trees (`define`), shared by its files."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._named: dict[str, list[Any]] = {}

    def define(self, text: str) -> None:
        """Learn the `define`d templates of a file."""
        for node in parse(text):
            if isinstance(node, Block) and node.word == "define":
                ((name, body),) = node.arms
                self._named[name.strip('"')] = body

    def render(self, text: str, dot: Any) -> str:
        """The text of a template with `dot` as its data. Raises TemplateError."""
        return self._body(parse(text), {"$": dot, ".": dot})

    def _body(self, nodes: list[Any], scope: dict[str, Any]) -> str:
        parts = []
        for node in nodes:
            if isinstance(node, str):
                parts.append(node)
            elif isinstance(node, Block):
                parts.append(self._block(node, scope))
            elif (named := re.match(r"(\$\w+)\s*:=\s*(.*)", node[1], re.S)) is not None:
                scope[named[1]] = self._value(named[2], scope)
            else:
                parts.append(_show(self._value(node[1], scope)))
        return "".join(parts)

    def _block(self, block: Block, scope: dict[str, Any]) -> str:
        if block.word == "define":
            return ""
        if block.word == "range":
            return self._range(block, scope)
        for condition, body in block.arms:
            value = self._value(condition, scope) if condition else True
            if value:
                within = {".": value} if block.word == "with" and condition else {}
                return self._body(body, scope | within)
        return ""

    def _range(self, block: Block, scope: dict[str, Any]) -> str:
        (head, body), *_ = block.arms
        names, _, expression = head.rpartition(":=")
        variables = [name.strip() for name in names.split(",") if name.strip()]
        values = self._value(expression, scope) or []
        pairs = sorted(values.items()) if isinstance(values, dict) else list(enumerate(values))
        parts = []
        for key, value in pairs:
            bound = dict(zip(variables[::-1], (value, key), strict=False))
            parts.append(self._body(body, scope | {".": value} | bound))
        return "".join(parts)

    def _value(self, expression: str, scope: dict[str, Any]) -> Any:
        tokens = TOKEN.findall(expression)
        if "".join(tokens) != re.sub(r"\s+(?=(?:[^\"`]|\"(?:\\.|[^\"])*\"|`[^`]*`)*$)", "", expression):
            raise TemplateError(f"cannot read {{{{ {expression} }}}}")
        value, rest = self._pipeline(tokens, scope)
        if rest:
            raise TemplateError(f"unexpected {rest[0]!r} in {{{{ {expression} }}}}")
        return value

    def _pipeline(self, tokens: list[str], scope: dict[str, Any]) -> tuple[Any, list[str]]:
        value, tokens = self._command(tokens, scope, ())
        while tokens and tokens[0] == "|":
            value, tokens = self._command(tokens[1:], scope, (value,))
        return value, tokens

    def _command(self, tokens: list[str], scope: dict[str, Any], last: tuple[Any, ...]) -> tuple[Any, list[str]]:
        head, *tokens = tokens
        word = head
        known = word == "include" or word in FUNCTIONS or word.endswith(".Files.Get")
        if not known:
            value, tokens = self._operand([head, *tokens], scope)
            if last or (tokens and tokens[0] not in "|)"):
                raise TemplateError(f"{head} is no function that this renderer has")
            return value, tokens
        arguments = []
        while tokens and tokens[0] not in "|)":
            value, tokens = self._operand(tokens, scope)
            arguments.append(value)
        arguments.extend(last)
        if word == "include":
            name, dot = arguments
            return self._body(self._named[name], {"$": dot, ".": dot}), tokens
        if word.endswith(".Files.Get"):
            return (self._files / arguments[0]).read_text(), tokens
        return FUNCTIONS[word](*arguments), tokens

    def _operand(self, tokens: list[str], scope: dict[str, Any]) -> tuple[Any, list[str]]:
        head, *rest = tokens
        if head == "(":
            value, rest = self._pipeline(rest, scope)
            if not rest or rest[0] != ")":
                raise TemplateError("a parenthesis is not closed")
            return value, rest[1:]
        if head[0] in '"`':
            return (head[1:-1] if head[0] == "`" else yaml.safe_load(head)), rest
        if re.fullmatch(r"-?\d+", head):
            return int(head), rest
        if head in ("true", "false"):
            return head == "true", rest
        name, _, path = head.partition(".")
        if name and name not in scope:
            raise TemplateError(f"{head} is not known")
        value = scope[name or "."]
        for step in filter(None, path.split(".")):
            value = value.get(step) if isinstance(value, dict) else _fail(f"{head}: nothing has a field {step!r}")
        return value, rest


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Values with `changes` laid over them as Helm does it: by key, lists whole, a null removes."""
    result = dict(values)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def top_of(chart: Path, changes: dict[str, Any], *, release: str = "yard") -> dict[str, Any]:
    """The data of a chart's templates, but for its files."""
    values = merged(yaml.safe_load((chart / "values.yaml").read_text()), changes)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    return {
        "Values": values,
        "Chart": {key[0].upper() + key[1:]: value for key, value in about.items()},
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
    }


def render_chart(chart: Path, changes: dict[str, Any], *, release: str = "yard") -> dict[str, str]:
    """Each template's rendered text by file name, empty ones left out. Raises TemplateError."""
    dot = top_of(chart, changes, release=release) | {"Files": {}}
    renderer = Renderer(chart)
    for helpers in sorted(chart.glob("templates/*.tpl")):
        renderer.define(helpers.read_text())
    rendered = {path.name: renderer.render(path.read_text(), dot) for path in sorted(chart.glob("templates/*.yaml"))}
    return {name: text for name, text in rendered.items() if text.strip()}


ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/tokenyard"
RENDERED = ROOT / "deploy/kubernetes"


def manifests() -> dict[str, str]:
    """What `deploy/kubernetes` has for those without Helm: the chart with its defaults, as release `yard`."""
    note = "# The chart deploy/helm/tokenyard with its defaults, rendered by python -m tests.deploy.go_template.\n"
    return {name: note + text.strip() + "\n" for name, text in render_chart(CHART, {}).items()}


if __name__ == "__main__":
    for name, text in manifests().items():
        (RENDERED / name).write_text(text)
