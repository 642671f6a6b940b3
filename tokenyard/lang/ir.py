"""Expressions that programs add to their state: texts, roles, generations and choices."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenyard.lang.values import ChoicesMethod, token_length_normalized

REGEX_OF_TYPE: dict[type, str] = {
    int: r"[-+]?[0-9]{1,18}",
    float: r"[-+]?[0-9]{1,15}(\.[0-9]{1,15})?",
    bool: r"(True|False)",
    str: r'"[^"\\\n]*"',
}


class Expression:
    """Anything that can be added to a state (SGLang's `SglExpr`). `+` joins expressions and texts."""

    def __add__(self, other: "Expression | str") -> "Expression":
        return Several([self, as_expression(other)])

    def __radd__(self, other: "Expression | str") -> "Expression":
        return Several([as_expression(other), self])


@dataclass
class Text(Expression):
    """A constant text (SGLang's `SglConstantText`)."""

    text: str


@dataclass
class Several(Expression):
    """A sequence of expressions (SGLang's `SglExprList`)."""

    parts: list[Expression]


@dataclass
class Role(Expression):
    """A message of a role (SGLang's `SglRoleBegin` and `SglRoleEnd`); without content, only its beginning or end."""

    role: str
    content: Expression | None = None
    begins: bool = True
    ends: bool = True


@dataclass
class Gen(Expression):
    """A generation (SGLang's `SglGen`).

    name: under which the value is stored, None for none.
    sampling: `sampling_params` of /generate.
    logprobs: whether to return log-probabilities.
    """

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False


@dataclass
class Select(Expression):
    """A choice by the model among several texts (SGLang's `SglSelect`)."""

    name: str | None
    choices: list[str]
    temperature: float
    method: ChoicesMethod


def as_expression(value: "Expression | str") -> Expression:
    """Convert a text to an expression; expressions are returned unchanged. Raises TypeError for anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(f"a program adds texts and expressions to its state, not {type(value).__name__}")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    return_logprob: bool = False,
    dtype: type | None = None,
    choices: list[str] | None = None,
    choices_method: ChoicesMethod = token_length_normalized,
    regex: str | None = None,
    ebnf: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
) -> Expression:
    """A generation, stored under `name`. Parameters that are None take the program's or the server's default.

    dtype: int, float, bool or str. The output is constrained to this form; the value is still a text.
    choices: the same as `select`.
    json_schema: a JSON schema, or a pydantic model, whose schema is taken.
    n: number of answers. The value is then a list, and the program continues after the first.

    Raises ValueError for parameters that exclude each other.
    """
    if choices:
        return select(name, choices, temperature or 0.0, choices_method)
    if sum(value is not None for value in (dtype, regex, ebnf, json_schema)) > 1:
        raise ValueError("dtype, regex, ebnf and json_schema exclude each other")
    if isinstance(json_schema, type):
        json_schema = _schema_of(json_schema)
    if dtype is not None:
        if dtype not in REGEX_OF_TYPE:
            raise ValueError(f"dtype must be int, float, bool or str, not {dtype!r}")
        regex = REGEX_OF_TYPE[dtype]
    wishes = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "regex": regex,
        "ebnf": ebnf,
        "json_schema": json_schema,
    }
    sampling = {name: value for name, value in wishes.items() if value is not None}
    return Gen(name, sampling, return_logprob)


def _schema_of(model: type) -> dict[str, Any]:
    if not hasattr(model, "model_json_schema"):
        raise ValueError(f"json_schema must be a schema or a pydantic model, not {model!r}")
    schema: dict[str, Any] = model.model_json_schema()
    return schema


def gen_int(name: str | None = None, **wishes: Any) -> Expression:
    """A generation constrained to an integer."""
    return gen(name, dtype=int, **wishes)


def gen_string(name: str | None = None, **wishes: Any) -> Expression:
    """A generation constrained to a quoted string."""
    return gen(name, dtype=str, **wishes)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> Expression:
    """A choice by the model among `choices`. Raises ValueError if there are none."""
    if not choices or not all(choices):
        raise ValueError("select needs choices, which are texts that are not empty")
    return Select(name, list(choices), temperature, choices_method)


def system(content: Expression | str) -> Expression:
    """A system message."""
    return Role("system", as_expression(content))


def user(content: Expression | str) -> Expression:
    """A user message."""
    return Role("user", as_expression(content))


def assistant(content: Expression | str) -> Expression:
    """An assistant message."""
    return Role("assistant", as_expression(content))


def system_begin() -> Expression:
    """Begin a system message."""
    return Role("system", ends=False)


def system_end() -> Expression:
    """End the system message."""
    return Role("system", begins=False)


def user_begin() -> Expression:
    """Begin a user message."""
    return Role("user", ends=False)


def user_end() -> Expression:
    """End the user message."""
    return Role("user", begins=False)


def assistant_begin() -> Expression:
    """Begin an assistant message."""
    return Role("assistant", ends=False)


def assistant_end() -> Expression:
    """End the assistant message."""
    return Role("assistant", begins=False)
